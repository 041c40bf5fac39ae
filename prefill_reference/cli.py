"""The command `prefill-reference`, which runs the reference prefill service."""

import os
from collections.abc import Sequence

from encoder_contract.checkpoint import require_files
from encoder_contract.command_line import command
from encoder_contract.settings import require_folder
from prefill_client.http_settings import run_service
from prefill_reference.config import ServiceConfig


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    about = "Serve OpenAI-compatible chat completions over HTTP, with image rows from the encoder service."
    return run_service(
        "prefill-reference",
        about,
        ServiceConfig,
        _serve,
        extra="reference",
        arguments=arguments,
        environment=os.environ,
    )


async def _serve(config: ServiceConfig) -> None:
    require_folder("model", config.model)
    require_files(config.model, language_model=True)
    from prefill_client.http_server import bound

    with bound(config.listen) as listener:
        # torch and transformers take seconds to import: check the flags and bind the port first.
        from prefill_reference.server import serve

        await serve(config, listener)
