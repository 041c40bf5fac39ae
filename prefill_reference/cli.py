"""The command `prefill-reference`, which runs the reference prefill service."""

import asyncio
import os
from collections.abc import Sequence

from encoder_contract.command_line import CommandLine, begin, reported
from encoder_contract.settings import require_folder
from encoder_contract.version import __version__
from prefill_reference.config import ServiceConfig

PROGRAM = "prefill-reference"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 1 the encoder cannot be used, 2 bad usage."""
    if arguments is None:
        begin()
    parser = CommandLine(
        prog=PROGRAM,
        description="Serve OpenAI-compatible chat completions over HTTP, with image rows from the encoder service. "
        "Each flag has an environment variable, named at the end of its help. Flags override variables.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    ServiceConfig.add_flags(parser)
    options = vars(parser.parse_args(arguments))
    return reported(PROGRAM, lambda: _serve(ServiceConfig.read(options, os.environ)), extra="reference")


def _serve(config: ServiceConfig) -> int:
    require_folder("model", config.model)
    from prefill_client.http_server import bound

    with bound(config.listen) as listener:
        # torch and transformers take seconds to import: check the flags and bind the port first.
        from prefill_reference.server import serve

        asyncio.run(serve(config, listener))
    return 0
