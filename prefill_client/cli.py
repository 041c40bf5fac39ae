"""The command line of the client: `prefill-client encode`."""

import argparse
import asyncio
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from encoder_contract.command_line import (
    FAILED,
    CommandLine,
    command,
    endpoint,
    output,
    reported,
    seconds,
)
from encoder_contract.credentials import AccessSettings
from encoder_contract.errors import EncoderError
from encoder_contract.version import __version__
from prefill_client.transport import BY_DEFAULT, INLINE

if TYPE_CHECKING:
    from prefill_client import FetchedRows, Submitted

CONNECT_S = 10.0  # a running server answers within this time, even from far away
REQUEST = "prefill-client encode"  # the request id of these calls in the server's log


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 1 an image or call failed, 2 bad usage."""
    parser = CommandLine(
        prog="prefill-client",
        description="Client of the encoder service: encode images.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    encode = commands.add_parser(
        "encode",
        help="encode image files; print the shape of their rows and timings",
        description="Encode image files. Print the shape of each image's rows and the time that each stage took.",
    )
    _add_encode_flags(encode)
    options = vars(parser.parse_args(arguments))
    return reported("prefill-client", partial(options.pop("run"), options))


def _add_encode_flags(encode: argparse.ArgumentParser) -> None:
    encode.add_argument("images", nargs="+", type=_file, metavar="IMAGE", help="image file")
    encode.add_argument(
        "--server",
        type=endpoint,
        default="127.0.0.1:50051",
        metavar="HOST:PORT",
        help="address of the server, or unix:/path (default %(default)s)",
    )
    encode.add_argument(
        "--timeout-s",
        type=seconds,
        default=120.0,
        metavar="SECONDS",
        help="seconds before the command gives up (default %(default)s)",
    )
    AccessSettings.add_flags(encode)
    encode.add_argument(
        "--inline", action="store_true", help="receive rows over gRPC instead of shared memory"
    )
    encode.set_defaults(run=_encode_files)


def _file(text: str) -> Path:
    """Check that an argument is no URL, and return the path."""
    if re.match(r"(https?|file|data):", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(
            f"{text[:100]} is a URL: this command reads files, so download it first"
        )
    return Path(text)


def _encode_files(options: dict[str, Any]) -> int:
    files = [path.read_bytes() for path in options["images"]]
    with output():
        return asyncio.run(_encode(options, files))


async def _encode(options: dict[str, Any], files: list[bytes]) -> int:
    from prefill_client import EncoderClient, RowRequest  # gRPC is imported only now: see `command`

    timeout_s = min(options["timeout_s"], CONNECT_S)
    async with await EncoderClient.connect(
        options["server"],
        credentials=AccessSettings.from_flags(options).credentials,
        timeout_s=timeout_s,
        wait=False,
    ) as client:
        began = perf_counter()
        submitted = await client.submit(files, request_id=REQUEST, timeout_s=options["timeout_s"])
        submit_ms = (perf_counter() - began) * 1000
        plural = "" if len(files) == 1 else "s"
        print(
            f"{len(files)} image{plural} submitted in {submit_ms:.1f} ms to {client.description.model_name}"
        )
        failed = 0
        good = []
        for path, image in zip(options["images"], submitted, strict=True):
            if image.error is None:
                good.append((path, image))
            else:
                failed += 1
                _print_error(path, image.error)
        if not good:
            return FAILED
        requests = [RowRequest(image.digest) for _, image in good]
        began = perf_counter()
        transports = [INLINE] if options["inline"] else BY_DEFAULT
        fetch = client.fetch(
            requests, request_id=REQUEST, timeout_s=options["timeout_s"], transports=transports
        )
        async with fetch as stream:
            async for rows in stream:
                failed += rows.error is not None
                _print(*good[rows.index], rows, (perf_counter() - began) * 1000)
        return FAILED if failed else 0


def _print_error(path: Path, error: EncoderError) -> None:
    print(f"prefill-client: {path}: {type(error).__name__}: {error}", file=sys.stderr)


def _print(path: Path, image: "Submitted", rows: "FetchedRows", fetch_ms: float) -> None:
    if rows.error is not None:
        _print_error(path, rows.error)
        return
    print(path)
    assert image.grid is not None
    stages = (
        ", ".join(f"{name} {ms:.1f}" for name, ms in rows.stage_ms.items())
        or "none, the rows were in the store"
    )
    print(f"  address  {image.address.hex()}")
    print(f"  grid     {image.grid.t} x {image.grid.h} x {image.grid.w} patches, {image.tokens} tokens")
    print(f"  rows     {rows.shape[0]} x {rows.shape[1]} {rows.dtype}, {rows.source}, by {rows.transport}")
    print(f"  ms       fetch {fetch_ms:.1f}; stages: {stages}")
