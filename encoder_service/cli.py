"""The command line of the server: `encoder-service serve` and `encoder-service top`."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from encoder_contract.version import __version__
from encoder_service.config import ConfigError, add_flags, read_config
from encoder_service.logs import set_up_logging

BAD_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 2 bad usage or a model that cannot be served."""
    parser = argparse.ArgumentParser(
        prog="encoder-service",
        description="Encodes images for multimodal LLM servers: each image by itself, each image once.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model's vision tower over gRPC",
        description="Serve the vision tower of a Hugging Face checkpoint. Every flag is also an environment variable "
        "(in brackets behind its help); flags win.",
    )
    add_flags(serve)
    _add_top(commands)
    given = vars(parser.parse_args(arguments))
    command = given.pop("command")
    try:
        return _top(given) if command == "top" else _serve(given)
    except ConfigError as error:
        print(f"encoder-service: {error}", file=sys.stderr)
        return BAD_USAGE


def _add_top(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    top = commands.add_parser(
        "top",
        help="watch running servers",
        description="A live view of one or more replicas, from their metrics: queue, rates, waits, tiers.",
    )
    top.add_argument(
        "endpoints",
        nargs="*",
        metavar="HOST:PORT",
        help="--metrics-listen of the servers (default 127.0.0.1:9464)",
    )
    top.add_argument("--interval-s", type=float, default=2.0, help="seconds between frames (default 2)")
    top.add_argument("--once", action="store_true", help="print one frame, over each server's life, and end")


def _top(given: dict[str, Any]) -> int:
    from rich.console import Console

    from encoder_service.top import run

    endpoints = given.pop("endpoints") or ["127.0.0.1:9464"]
    try:
        return asyncio.run(run(endpoints, console=Console(), **given))
    except KeyboardInterrupt:
        return 0


def _serve(given: dict[str, object]) -> int:
    config = read_config(given, os.environ)
    set_up_logging(config.log_level, config.log_format)
    # torch takes seconds to import: not before the flags are known to be good.
    from encoder_service.model import load_model
    from encoder_service.server import Server

    model = load_model(config)

    async def serve() -> int:
        return await Server(config, model).serve()

    return asyncio.run(serve())
