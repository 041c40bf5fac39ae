"""The command `encoder-sglang-gateway`, which runs the gateway for SGLang."""

import os
from collections.abc import Sequence

from encoder_contract.command_line import command
from prefill_client.http_settings import run_service
from prefill_client.sglang_gateway.config import GatewayConfig


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    about = "Serve images to an unmodified SGLang that runs with --language-only."
    return run_service(
        "encoder-sglang-gateway",
        about,
        GatewayConfig,
        _serve,
        extra="sglang-gateway",
        arguments=arguments,
        environment=os.environ,
    )


async def _serve(config: GatewayConfig) -> None:
    # The extra may be missing, and its packages take long to import: the flags are checked first.
    from prefill_client.sglang_gateway.server import serve

    await serve(config)
