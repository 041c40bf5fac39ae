"""The command line of the prefill side: `prefill-client encode`, `timeline`, `serve` and `sglang-gateway`.

`timeline` and `serve` are the reference service's; the functions that need `prefill_reference` import it.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from encoder_contract.command_line import (
    BAD_USAGE,
    FAILED,
    CommandLine,
    begin,
    endpoint,
    install,
    output,
    seconds,
)
from encoder_contract.credentials import Credentials
from encoder_contract.errors import EncoderError
from encoder_contract.settings import require_folder
from encoder_contract.version import __version__
from prefill_client import EncoderClient, FetchedRows, RowRequest, Submitted
from prefill_client.sglang_gateway.config import GatewayConfig
from prefill_client.transport import BY_DEFAULT, INLINE

CONNECT_S = 10.0  # a server that is up answers within this time, even from far away
REQUEST = "prefill-client encode"  # the request id of our calls in the server's log


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 1 an image or call failed, 2 bad usage."""
    if arguments is None:
        begin()
    parser = CommandLine(
        prog="prefill-client", description="Client of the encoder service, for the LLM side."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    said = "encode image files and print the shape of their rows and the time of each stage"
    encode = commands.add_parser("encode", help=said, description=f"{said.capitalize()}.")
    _add_encode_flags(encode)
    said = "draw request traces as a timeline, with a lane per image and per prefill chunk"
    timeline = commands.add_parser("timeline", help=said, description=f"{said.capitalize()}.")
    timeline.add_argument(
        "traces", nargs="+", type=Path, metavar="TRACE", help="trace file written by `serve --trace-folder`"
    )
    timeline.add_argument(
        "--out",
        required=True,
        type=Path,
        help="picture to write: .html, .svg, or .png (needs matplotlib)",
    )
    serve = commands.add_parser(
        "serve",
        help="run the reference prefill service: OpenAI-compatible chat completions over HTTP",
        description="Serve OpenAI-compatible chat completions over HTTP, with rows from the encoder service. Every "
        "flag is also an environment variable (named at the end of its help). Flags override variables.",
    )
    _add_service_flags(serve)
    gateway = commands.add_parser(
        "sglang-gateway",
        help="run the gateway: SGLang's encoder protocol in front, the encoder service behind",
        description="Serve an unmodified SGLang that runs with --language-only. Every flag is also an environment "
        "variable (named at the end of its help). Flags override variables.",
    )
    GatewayConfig.add_flags(gateway)
    given = parser.parse_args(arguments)
    if given.command in ("serve", "sglang-gateway"):
        return _serve(vars(given))
    return _draw(given) if given.command == "timeline" else _encode_files(given)


def _add_encode_flags(encode: argparse.ArgumentParser) -> None:
    encode.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="image file")
    encode.add_argument(
        "--server",
        type=endpoint,
        default="127.0.0.1:50051",
        metavar="HOST:PORT",
        help="address of the server, or unix:/path (default %(default)s)",
    )
    encode.add_argument(
        "--timeout-s", type=seconds, default=120.0, help="seconds before giving up (default %(default)s)"
    )
    Credentials.add_flags(encode)
    encode.add_argument(
        "--inline", action="store_true", help="receive rows by gRPC, not through shared memory"
    )


def _add_service_flags(serve: argparse.ArgumentParser) -> None:
    from prefill_reference.config import ServiceConfig

    ServiceConfig.add_flags(serve)


def _draw(given: argparse.Namespace) -> int:
    from prefill_reference.timeline import draw

    try:
        picture = draw(given.traces, given.out)
    except OSError as error:
        print(f"prefill-client: {error.filename or given.out}: {error.strerror}", file=sys.stderr)
        return BAD_USAGE
    except ValueError as error:
        print(f"prefill-client: {error}", file=sys.stderr)
        return BAD_USAGE
    with output():
        print(picture)
    return 0


def _serve(given: dict[str, object]) -> int:
    if given.pop("command") == "serve":
        run, extra = _serve_reference, "reference"
    else:
        run, extra = _serve_sglang, "sglang-gateway"
    try:
        run(given)
    except ImportError as error:
        print(f"prefill-client: {error}; {install(extra)}", file=sys.stderr)
        return BAD_USAGE
    except EncoderError as error:
        print(f"prefill-client: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except (OSError, ValueError) as error:
        print(f"prefill-client: {error}", file=sys.stderr)
        return BAD_USAGE
    return 0


def _serve_reference(given: dict[str, object]) -> None:
    from prefill_reference.config import ServiceConfig

    config = ServiceConfig.read(given, os.environ)
    require_folder("model", config.model)
    from prefill_client.http_server import bound

    with bound(config.listen) as listener:
        # torch and transformers take seconds to import: first the flags must be good and the port free.
        from prefill_reference.server import serve

        asyncio.run(serve(config, listener))


def _serve_sglang(given: dict[str, object]) -> None:
    config = GatewayConfig.read(given, os.environ)
    from prefill_client.sglang_gateway.server import serve

    asyncio.run(serve(config))


def _encode_files(given: argparse.Namespace) -> int:
    try:
        files = [path.read_bytes() for path in given.images]
    except OSError as error:
        print(f"prefill-client: {error.filename}: {error.strerror}", file=sys.stderr)
        return BAD_USAGE
    try:
        with output():
            return asyncio.run(_encode(given, files))
    except EncoderError as error:
        print(f"prefill-client: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except ValueError as error:
        print(f"prefill-client: {error}", file=sys.stderr)
        return BAD_USAGE


async def _encode(given: argparse.Namespace, files: list[bytes]) -> int:
    timeout_s = min(given.timeout_s, CONNECT_S)
    async with await EncoderClient.connect(
        given.server, credentials=Credentials.from_flags(vars(given)), timeout_s=timeout_s, wait=False
    ) as client:
        began = perf_counter()
        submitted = await client.submit(files, request_id=REQUEST, timeout_s=given.timeout_s)
        submit_ms = (perf_counter() - began) * 1000
        plural = "" if len(files) == 1 else "s"
        print(
            f"{len(files)} image{plural} submitted in {submit_ms:.1f} ms to {client.description.model_name}"
        )
        failed = 0
        for path, image in zip(given.images, submitted, strict=True):
            if image.error is not None:
                failed += 1
                print(f"{path}\n  {type(image.error).__name__}: {image.error}")
        good = [
            (path, image) for path, image in zip(given.images, submitted, strict=True) if image.error is None
        ]
        if not good:
            return FAILED
        requests = [RowRequest(image.digest) for _, image in good]
        began = perf_counter()
        transports = [INLINE] if given.inline else BY_DEFAULT
        fetch = client.fetch(requests, request_id=REQUEST, timeout_s=given.timeout_s, transports=transports)
        async with fetch as stream:
            async for rows in stream:
                failed += rows.error is not None
                _print(*good[rows.index], rows, (perf_counter() - began) * 1000)
        return FAILED if failed else 0


def _print(path: Path, image: Submitted, rows: FetchedRows, fetch_ms: float) -> None:
    print(path)
    if rows.error is not None:
        print(f"  {type(rows.error).__name__}: {rows.error}")
        return
    assert image.grid is not None
    stages = ", ".join(f"{name} {ms:.1f}" for name, ms in rows.stage_ms.items()) or "none: it was held"
    print(f"  address  {image.address.hex()}")
    print(f"  grid     {image.grid.t} x {image.grid.h} x {image.grid.w} patches, {image.tokens} tokens")
    print(f"  rows     {rows.shape[0]} x {rows.shape[1]} {rows.dtype}, {rows.source}, by {rows.transport}")
    print(f"  ms       fetch {fetch_ms:.1f}; stages: {stages}")
