"""gRPC channels to servers, plain or over TLS, and the translation of gRPC errors."""

import ssl
from collections.abc import Callable

import grpc

from encoder_contract.certificates import Pem
from encoder_contract.credentials import Credentials, why_unconnected
from encoder_contract.direct import channel_options
from encoder_contract.endpoint import is_local
from encoder_contract.errors import (
    EncoderError,
    ImageLimitError,
    InternalError,
    UnauthenticatedError,
    UnavailableError,
    from_status,
)
from encoder_contract.v1 import encoder_pb2 as pb

# These options detect a silent peer within about two seconds. Without ping_timeout_ms, keepalive_timeout_ms has no
# effect, and detection takes a minute.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also bounds an attempt to connect, which may take 20 s by default.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Otherwise a new channel to an endpoint waits as long as one that is retired, and was refused, would have.
    ("grpc.use_local_subchannel_pool", 1),
)
# The status message that gRPC itself makes up, as if from the server, if a call ends during an operation.
LOCAL_FAILURE = "Internal error from Core"
# What gRPC says of an answer that is not from a gRPC server, and of a stream that a proxy reset (INTERNAL_ERROR).
TOO_LARGE = "Received http2 header with status: 413"
RESET = "Received RST_STREAM with error code 2"
BODY_LIMIT = "raise its limit on request bodies (nginx: client_max_body_size 0)"
# How gRPC's messages about a missing connection begin. The reason follows the last colon.
UNCONNECTED = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")
# gRPC's message if the other side closes a connection that was just opened, as a TLS port does with a plain client.
CLOSED = ("Socket closed",)


class Channels:
    """Opens channels with one client's credentials, plain or over TLS. Reads certificates again when they change."""

    def __init__(self, credentials: Credentials) -> None:
        """Read the credentials' files. Raises `ValueError` if one is invalid."""
        self.credentials = credentials
        self._certificates = credentials.certificates()
        self._token = credentials.token()
        self.server_name = name = credentials.server_name
        """The name to expect in the servers' certificates; empty: the host of each endpoint."""
        self._name = (("grpc.ssl_target_name_override", name),) if name else ()

    @property
    def version(self) -> int:
        """A number that changes with the certificates. Channels opened with another version should be replaced."""
        return self._certificates.pem.version if self._certificates else 0

    @property
    def context(self) -> Callable[[], ssl.SSLContext] | None:
        """Returns the TLS context for a connection beside gRPC; None without TLS."""
        return self._certificates.client_context if self._certificates else None

    def metadata(self, endpoint: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call to `endpoint`: the client's token, if it has one.

        Raises `UnauthenticatedError` if the token cannot be read, or would be sent over the network without TLS.
        """
        try:
            metadata = self._token.metadata()
        except ValueError as error:
            raise UnauthenticatedError(str(error)) from error
        if metadata and self._certificates is None and not is_local(endpoint):
            raise UnauthenticatedError(f"{endpoint}: a token is sent only over TLS (ca), or within this host")
        return metadata

    def open(self, endpoint: str) -> grpc.aio.Channel:
        """Return a channel to `endpoint`, which connects on first use."""
        options = CHANNEL_OPTIONS + channel_options(endpoint)
        if self._certificates is None:
            return grpc.aio.insecure_channel(endpoint, options=options)
        options = (*options, *self._name)
        return grpc.aio.secure_channel(endpoint, _credentials(self._certificates.pem), options=options)


def _credentials(pem: Pem) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.cert or None)


def from_message(error: pb.ImageError, endpoint: str = "") -> EncoderError:
    """Return the error of one image, from the server's message; with `endpoint`, the error of a whole call."""
    message = f"{endpoint}: {error.message}" if endpoint else error.message
    return from_status(error.code, message, retry_after_ms=error.retry_after_ms)


def from_rpc(
    error: grpc.aio.AioRpcError, endpoint: str, credentials: Credentials | None = None
) -> EncoderError:
    """Return the error of a whole call, with the endpoint in its message.

    `credentials` are those of a client that has never connected to this server.
    """
    if (known := _of_connection(error.code(), error.details(), endpoint)) is not None:
        return known
    metadata = error.trailing_metadata() or ()
    retry_after_ms = next((int(value) for key, value in metadata if key == "retry-after-ms"), 0)
    details = error.details() or ""
    if details.startswith(UNCONNECTED) or details in CLOSED:
        details = f"no server answers ({why_unconnected(details, credentials)})"
    return from_status(error.code().value[0], f"{endpoint}: {details}", retry_after_ms=retry_after_ms)


def ended_early(code: grpc.StatusCode, details: str | None, endpoint: str) -> EncoderError:
    """Return the error of a call that ended with this status before every image had an outcome."""
    if code is grpc.StatusCode.OK:
        return InternalError(f"{endpoint}: the server ended the call before every image had its outcome")
    return _of_connection(code, details, endpoint) or from_status(code.value[0], f"{endpoint}: {details}")


def _of_connection(code: grpc.StatusCode, details: str | None, endpoint: str) -> EncoderError | None:
    """Return the error of a call that was cut off, or ended by a proxy; None if the server ended it."""
    if details == TOO_LARGE:
        return ImageLimitError(f"{endpoint}: a proxy refuses uploads of this size (HTTP 413): {BODY_LIMIT}")
    if details is not None and RESET in details:
        return InternalError(
            f"{endpoint}: a proxy ended the call ({details}). If only large files fail, {BODY_LIMIT}"
        )
    if details == LOCAL_FAILURE:
        return UnavailableError(f"{endpoint}: the connection failed during a write")
    # The server cancelled the call, as it does with new calls while it stops: if this client cancels a call, it does
    # not ask for the reason.
    if code is grpc.StatusCode.CANCELLED:
        return UnavailableError(f"{endpoint}: the server stopped before it accepted the call")
    return None
