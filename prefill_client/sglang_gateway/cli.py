"""The command `encoder-sglang-gateway`, which runs the gateway for SGLang."""

import asyncio
import os
from collections.abc import Sequence

from encoder_contract.command_line import CommandLine, begin, reported
from encoder_contract.version import __version__
from prefill_client.sglang_gateway.config import GatewayConfig

PROGRAM = "encoder-sglang-gateway"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 1 the encoder cannot be used, 2 bad usage."""
    if arguments is None:
        begin()
    parser = CommandLine(
        prog=PROGRAM,
        description="Serve images to an unmodified SGLang that runs with --language-only. Each flag has an environment "
        "variable, named at the end of its help. Flags override variables.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    GatewayConfig.add_flags(parser)
    options = vars(parser.parse_args(arguments))
    return reported(PROGRAM, lambda: _serve(GatewayConfig.read(options, os.environ)), extra="sglang-gateway")


def _serve(config: GatewayConfig) -> int:
    from prefill_client.sglang_gateway.server import serve

    asyncio.run(serve(config))
    return 0
