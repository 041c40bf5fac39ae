"""The settings that the HTTP services in front of the encoder service have in common."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from encoder_contract.command_line import CommandLine, reported
from encoder_contract.credentials import AccessSettings
from encoder_contract.endpoint import check_server
from encoder_contract.settings import ConfigError, Settings, flag, group, knob
from encoder_contract.version import __version__
from prefill_client.media.destinations import Destinations

# Each is in memory as a whole, for each request that is running.
MAX_BODY_BYTES, MAX_FILE_BYTES = 4 << 30, 1 << 30


@dataclass(frozen=True, kw_only=True)
class HttpSettings(Settings):
    """How to reach the encoder service, where to listen, and what to accept from callers."""

    encoder: str = knob(
        "127.0.0.1:50051",
        help="address of the encoder service: host:port or unix:/path, or dns:host:port for every replica behind that "
        "name",
    )
    access: AccessSettings = group(AccessSettings, prefix="encoder_")
    listen: str = knob("127.0.0.1:8000", help="host:port to serve HTTP on; port 0 picks a free port")
    max_body_bytes: int = knob(256 << 20, most=MAX_BODY_BYTES, help="largest request body, bytes")
    max_image_bytes: int = knob(32 << 20, most=MAX_FILE_BYTES, help="largest image file, bytes")
    image_hosts: str = knob(
        "",
        help="hosts from which images and videos may be downloaded, comma-separated: host names, addresses, networks, "
        "`public` for every public host, `proxy` to use the environment's proxies; empty: only files "
        "sent in the request are accepted",
    )
    image_s: float = knob(10.0, help="seconds that the download of one image or video may take")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_endpoint("listen", tcp=True)
        for server in self.endpoints:
            try:
                check_server(server)
            except ValueError as error:
                raise ConfigError(f"{flag('encoder')} {error}") from error
        try:
            self.image_destinations  # noqa: B018 - raises for an invalid rule
        except ValueError as error:
            self._require(False, "image_hosts", f"must be hosts, addresses and networks: {error}")

    @property
    def endpoints(self) -> list[str]:
        """The addresses in `encoder`."""
        return [self.encoder]

    @property
    def image_destinations(self) -> Destinations:
        """The hosts that `image_hosts` allows."""
        return Destinations(listed(self.image_hosts))


def listed(text: str) -> list[str]:
    """Return the items of a comma-separated list."""
    return [item.strip() for item in text.split(",") if item.strip()]


Config = TypeVar("Config", bound=HttpSettings)


def run_service(
    program: str,
    description: str,
    settings: type[Config],
    serve: Callable[[Config], Coroutine[Any, Any, None]],
    *,
    extra: str,
    arguments: Sequence[str] | None,
    environment: Mapping[str, str],
) -> int:
    """Run the command of a service; return the exit code: 0 done, 1 the encoder cannot be used, 2 bad usage."""
    about = "Each flag has an environment variable, named at the end of its help. Flags override variables."
    parser = CommandLine(prog=program, description=f"{description} {about}")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    settings.add_flags(parser)
    given = vars(parser.parse_args(arguments))

    def run() -> int:
        asyncio.run(serve(settings.read(given, environment)))
        return 0

    return reported(program, run, extra=extra)
