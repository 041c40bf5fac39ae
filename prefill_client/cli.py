"""The command line of the client: `prefill-client encode`, `timeline`, `serve` and `sglang-gateway`.

`timeline` and `serve` belong to the reference service: the functions that need `prefill_reference` import it.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

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

CONNECT_S = 10.0  # a running server answers within this time, even from far away
REQUEST = "prefill-client encode"  # the request id of these calls in the server's log


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 1 an image or call failed, 2 bad usage."""
    if arguments is None:
        begin()
    parser = CommandLine(
        prog="prefill-client",
        description="Client of the encoder service: encode images, draw traces, and run services for LLM servers.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    encode = commands.add_parser(
        "encode",
        help="encode image files; print the shape of their rows and timings",
        description="Encode image files. Print the shape of each image's rows and the time that each stage took.",
    )
    _add_encode_flags(encode)
    timeline = commands.add_parser(
        "timeline",
        help="draw traces of requests as a timeline",
        description="Draw traces of requests as a timeline, with one lane per image and one per prefill chunk.",
    )
    timeline.add_argument(
        "traces", nargs="+", type=Path, metavar="TRACE", help="trace file, written by `serve --trace-folder`"
    )
    timeline.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FILE",
        help="picture to write: .html, .svg, or .png (needs matplotlib)",
    )
    timeline.set_defaults(run=_draw)
    serve = commands.add_parser(
        "serve",
        help="run the reference prefill service: OpenAI-compatible chat completions",
        description="Serve OpenAI-compatible chat completions over HTTP, with image rows from the encoder service. "
        "Each flag has an environment variable, named at the end of its help. Flags override variables.",
    )
    _add_service_flags(serve)
    gateway = commands.add_parser(
        "sglang-gateway",
        help="run the gateway that serves SGLang's encoder protocol from the encoder service",
        description="Serve images to an unmodified SGLang that runs with --language-only. Each flag has an environment "
        "variable, named at the end of its help. Flags override variables.",
    )
    GatewayConfig.add_flags(gateway)
    gateway.set_defaults(run=_serve_sglang, extra="sglang-gateway")
    return _run(**vars(parser.parse_args(arguments)))


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
        "--timeout-s",
        type=seconds,
        default=120.0,
        metavar="SECONDS",
        help="seconds before the command gives up (default %(default)s)",
    )
    Credentials.add_flags(encode)
    encode.add_argument(
        "--inline", action="store_true", help="receive rows over gRPC instead of shared memory"
    )
    encode.set_defaults(run=_encode_files)


def _add_service_flags(serve: argparse.ArgumentParser) -> None:
    from prefill_reference.config import ServiceConfig

    ServiceConfig.add_flags(serve)
    serve.set_defaults(run=_serve_reference, extra="reference")


def _run(run: Callable[[dict[str, Any]], int], command: str, extra: str = "", **options: Any) -> int:  # noqa: ARG001
    """Run a command; print its error, if any, and return the exit code."""
    try:
        return run(options)
    except ImportError as error:
        if not extra:
            raise
        print(f"prefill-client: {error}; {install(extra)}", file=sys.stderr)
        return BAD_USAGE
    except EncoderError as error:
        print(f"prefill-client: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error
        print(f"prefill-client: {reason}", file=sys.stderr)
        return BAD_USAGE
    except ValueError as error:
        print(f"prefill-client: {error}", file=sys.stderr)
        return BAD_USAGE


def _draw(options: dict[str, Any]) -> int:
    from prefill_reference.timeline import draw

    picture = draw(options["traces"], options["out"])
    with output():
        print(picture)
    return 0


def _serve_reference(options: dict[str, Any]) -> int:
    from prefill_reference.config import ServiceConfig

    config = ServiceConfig.read(options, os.environ)
    require_folder("model", config.model)
    from prefill_client.http_server import bound

    with bound(config.listen) as listener:
        # torch and transformers take seconds to import: check the flags and bind the port first.
        from prefill_reference.server import serve

        asyncio.run(serve(config, listener))
    return 0


def _serve_sglang(options: dict[str, Any]) -> int:
    config = GatewayConfig.read(options, os.environ)
    from prefill_client.sglang_gateway.server import serve

    asyncio.run(serve(config))
    return 0


def _encode_files(options: dict[str, Any]) -> int:
    files = [path.read_bytes() for path in options["images"]]
    with output():
        return asyncio.run(_encode(options, files))


async def _encode(options: dict[str, Any], files: list[bytes]) -> int:
    timeout_s = min(options["timeout_s"], CONNECT_S)
    async with await EncoderClient.connect(
        options["server"], credentials=Credentials.from_flags(options), timeout_s=timeout_s, wait=False
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
                print(f"{path}\n  {type(image.error).__name__}: {image.error}")
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


def _print(path: Path, image: Submitted, rows: FetchedRows, fetch_ms: float) -> None:
    print(path)
    if rows.error is not None:
        print(f"  {type(rows.error).__name__}: {rows.error}")
        return
    assert image.grid is not None
    stages = (
        ", ".join(f"{name} {ms:.1f}" for name, ms in rows.stage_ms.items())
        or "none, the rows were in the store"
    )
    print(f"  address  {image.address.hex()}")
    print(f"  grid     {image.grid.t} x {image.grid.h} x {image.grid.w} patches, {image.tokens} tokens")
    print(f"  rows     {rows.shape[0]} x {rows.shape[1]} {rows.dtype}, {rows.source}, by {rows.transport}")
    print(f"  ms       fetch {fetch_ms:.1f}; stages: {stages}")
