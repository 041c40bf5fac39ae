"""The command line of the server: `encoder-service serve`, `top`, `evict`, `flush` and `reload`."""

import argparse
import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from encoder_contract import spans
from encoder_contract.command_line import (
    BAD_USAGE,
    FAILED,
    CommandLine,
    command,
    endpoint,
    install,
    output,
    say,
    seconds,
)
from encoder_contract.credentials import AccessSettings
from encoder_contract.endpoint import Endpoint, why_unbound
from encoder_contract.version import __version__
from encoder_service.api.tenants import read_tenants
from encoder_service.config import GIB, Config, ConfigError, flag
from encoder_service.devices import EXIT_LOST
from encoder_service.devices.allocator import keep_freed_memory, out_of_collections, without_collections
from encoder_service.devices.device_process import start_devices
from encoder_service.families.choice import check_model
from encoder_service.logs import set_up_logging
from encoder_service.signals import ignore_until_serving
from encoder_service.store import Disk, DiskError, StoreSizeError, require_room

log = logging.getLogger(__name__)

DEFAULT_SERVER, DEFAULT_METRICS = "127.0.0.1:50051", "127.0.0.1:9464"
PIPE_COLUMNS = 1000  # more than any line has
MAX_FILES = 65_536  # many times what a server opens
# How long another thread may hold the GIL while the event loop waits for it. Python's default of 5 ms would delay every
# answer to Submit by as much. Below this value, the switching itself becomes expensive.
GIL_SWITCH_S = 0.0005


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 success, 1 failure, 2 bad usage or an unservable model."""
    parser = CommandLine(
        prog="encoder-service",
        description="Encode images for multimodal LLM servers, each image once, and share the embeddings.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model's vision tower over gRPC",
        description="Serve the vision tower of a Hugging Face checkpoint. Every flag can also be set by the "
        "environment variable at the end of its help. Flags override variables.",
        usage="%(prog)s --model FOLDER [--SETTING VALUE ...]",
    )
    Config.add_flags(serve)
    _add_top(commands)
    _add_operator(commands)
    given = vars(parser.parse_args(arguments))
    name = given.pop("command")
    try:
        if name == "serve":
            return _serve(given)
        return _top(given) if name == "top" else _operate(name, given)
    except ConfigError as error:
        print(f"encoder-service: {error}", file=sys.stderr)
        return BAD_USAGE
    except ModuleNotFoundError as error:
        print(f"encoder-service: {_absent(error)}", file=sys.stderr)
        return BAD_USAGE


def _absent(error: ModuleNotFoundError) -> str:
    """Return the message for a package that only the extra `server` installs."""
    return f"{error}; {install('server')}"


def _add_top(commands: "argparse._SubParsersAction[CommandLine]") -> None:
    top = commands.add_parser(
        "top",
        help="watch running servers",
        description="Show a live view of one or more servers, read from their metrics: queue, rates, waits and store "
        "tiers.",
    )
    top.add_argument(
        "endpoints",
        nargs="*",
        type=_metrics_address,
        metavar="HOST:PORT",
        help=f"a server's --metrics-listen address; https://HOST:PORT if it uses TLS (default {DEFAULT_METRICS})",
    )
    top.add_argument("--interval-s", type=seconds, default=2.0, help="seconds between frames (default 2)")
    top.add_argument(
        "--tls-ca",
        default="",
        metavar="FILE",
        help="PEM file of the authorities that issue the servers' certificates, for https:// addresses; empty: the "
        "public ones",
    )
    top.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help="file with the token of a tenant that has the right `metrics`; empty: no token",
    )
    top.add_argument(
        "--once", action="store_true", help="print one frame that covers each server's lifetime, and exit"
    )


def _metrics_address(text: str) -> str:
    """Check that an argument is host:port, or a URL, and return it."""
    if not text.startswith(("http://", "https://")) and Endpoint.parse(endpoint(text)).path:
        raise argparse.ArgumentTypeError(f"{text} must be host:port")
    return text


def _add_operator(commands: "argparse._SubParsersAction[CommandLine]") -> None:
    for name, text in (
        ("evict", "remove one embedding from a server's store, unless it is in use"),
        ("flush", "remove all embeddings that are not in use, and all cached image and video files"),
        ("reload", "have a server serve other weights of its architecture from now on, without a restart"),
    ):
        parser = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. Run it on the server's host as the server's user.",
        )
        if name == "evict":
            parser.add_argument(
                "address",
                metavar="ADDRESS",
                help="address of the embedding: the 64 hexadecimal digits that `prefill-client encode` prints",
            )
        if name == "reload":
            parser.add_argument(
                "folder",
                metavar="FOLDER",
                help="complete Hugging Face checkpoint on the server's host; the server's memory must hold its vision "
                "tower beside the one that it serves",
            )
        parser.add_argument(
            "--server",
            type=endpoint,
            default=DEFAULT_SERVER,
            metavar="HOST:PORT",
            help="address of the server, or unix:/path (default %(default)s)",
        )
        AccessSettings.add_flags(parser)


def _operate(name: str, given: dict[str, Any]) -> int:
    from encoder_service.api.admin_client import OperatorError, run

    try:
        with output():
            for text in run(
                name,
                given["server"],
                address=given.get("address", ""),
                folder=given.get("folder", ""),
                credentials=AccessSettings.from_flags(given).credentials,
            ):
                print(text, flush=True)
    except OperatorError as error:
        print(f"encoder-service: {error}", file=sys.stderr)
        return FAILED
    return 0


def _top(given: dict[str, Any]) -> int:
    from rich.console import Console

    from encoder_service.top import run

    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C must restore the terminal's screen
    endpoints = given.pop("endpoints") or [DEFAULT_METRICS]
    try:
        with output():
            # In a pipe, rich would cut lines at 80 characters.
            console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
            return asyncio.run(run(endpoints, console=console, **given))
    except KeyboardInterrupt:
        return 0
    except ValueError as error:
        raise ConfigError(str(error)) from error


def raise_file_limit() -> None:
    """Raise the soft limit on file descriptors (often 1024) to the hard limit, but not above `MAX_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _serve(given: dict[str, object]) -> int:
    config = Config.read(given, os.environ)
    set_up_logging(config.log_level, config.log_format)
    try:
        return _serve_with(config)
    except (ConfigError, ModuleNotFoundError) as error:
        if config.log_format != "json":
            raise
        log.error("%s", _absent(error) if isinstance(error, ModuleNotFoundError) else error)
        return BAD_USAGE


def _serve_with(config: Config) -> int:
    ignore_until_serving()
    keep_freed_memory()
    raise_file_limit()
    sys.setswitchinterval(GIL_SWITCH_S)
    require_free("listen", config.listen)
    for name in ("metrics_listen", "rows_listen"):
        if address := getattr(config, name):
            require_free(name, address)
    config.certificates()
    config.peer_certificates()
    config.fleet_key()
    read_tenants(config)
    check_model(config.model)
    require_store(config)
    _announce_loading(config)
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'")
    devices = start_devices(config)  # they load during the imports
    with without_collections():
        from encoder_service.app import Server
        from encoder_service.devices.served_model import load_devices

        if config.store_device_gib or len(devices) > 1:
            import encoder_service.vision.ulysses  # noqa: F401 - imports torch, before `out_of_collections`
    files = load_devices(config, devices)

    async def serve() -> int:
        server = Server(config, devices, files)
        spans.export("encoder-service", server.replica_id, os.environ)
        return await server.serve()

    with out_of_collections():
        code = asyncio.run(serve())
    if code == EXIT_LOST:  # a lost device may hang or crash an interpreter that shuts down in order
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    files.close()
    return code


def require_store(config: Config) -> None:
    """Raise `ConfigError` if there is too little memory for the store, or its disk folder cannot be used."""
    try:
        require_room(config.store_segment_dir, int(config.store_host_gib * GIB))
        if config.store_disk:
            Disk.check(Path(config.store_disk))
    except (StoreSizeError, DiskError) as error:
        raise ConfigError(str(error)) from error


def _announce_loading(config: Config) -> None:
    if config.log_format == "json":
        log.info("loading", extra={"fields": {"model": str(config.model)}})
        return
    say(f"encoder-service {__version__}: loading {config.model} ...")


# Errors for addresses of `localhost` that this machine does not have. gRPC skips those, too.
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def require_free(name: str, address: str) -> None:
    """Raise `ConfigError` if the server cannot listen on `address`, the value of the setting `name`.

    Releases the address again. If another process takes it before the server listens, listening fails.
    """
    endpoint = Endpoint.parse(address)
    try:
        if endpoint.path:
            _bind_path(Path(endpoint.path))
        else:
            _bind(endpoint)
    except OSError as error:
        raise ConfigError(f"{flag(name)} {address}: {why_unbound(error)}") from error


def _bind(endpoint: Endpoint) -> None:
    absent: OSError | None = None
    bound = False
    for family, kind, protocol, _, address in socket.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM
    ):
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC does: ignore closed connections of an earlier server.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                bound = True
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            absent = error
    if absent is not None and not bound:
        raise absent


def _bind_path(path: Path) -> None:
    """Raise `OSError` if the path is in use. gRPC would replace any file there, even a running server's socket."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    elif path.exists():
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    if not path.parent.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
