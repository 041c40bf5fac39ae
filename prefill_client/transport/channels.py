"""gRPC: channels to servers, plain or over TLS, and what the errors of its calls mean."""

from typing import Any

import grpc

from encoder_contract.certificates import Pem
from encoder_contract.credentials import Credentials
from encoder_contract.endpoint import is_local, why_unconnected
from encoder_contract.errors import (
    EncoderError,
    InternalError,
    UnauthenticatedError,
    UnavailableError,
    from_status,
)
from encoder_contract.v1 import encoder_pb2 as pb

# With these, a silent peer is noticed within about two seconds. Without ping_timeout_ms, keepalive_timeout_ms has no
# effect, and it takes a minute.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also bounds an attempt to connect, which may take twenty seconds by default.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
# The status that grpc makes up itself, as if from the server, if a call ends during an operation.
LOCAL_FAILURE = "Internal error from Core"
# How grpc's text begins if there is no connection; the reason follows its last colon.
UNCONNECTED = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")


class Channels:
    """Opens channels with one client's credentials: plain, or over TLS with certificates that are reread on change."""

    def __init__(self, credentials: Credentials) -> None:
        """Read the credentials' files. Raises `ValueError` if one is invalid."""
        self._certificates = credentials.certificates()
        self._token = credentials.token()
        name = credentials.server_name
        self._name = (("grpc.ssl_target_name_override", name),) if name else ()

    @property
    def version(self) -> int:
        """A number that changes with the certificates: channels opened with another one should be replaced."""
        return self._certificates.pem.version if self._certificates else 0

    def metadata(self, endpoint: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata with the client's token, if it has one, for a call to `endpoint`.

        Raises `UnauthenticatedError` if the token cannot be read, or would be sent over the network without TLS.
        """
        try:
            shown = self._token.metadata()
        except ValueError as error:
            raise UnauthenticatedError(str(error)) from error
        if shown and self._certificates is None and not is_local(endpoint):
            raise UnauthenticatedError(f"{endpoint}: a token is sent only over TLS (ca), or within this host")
        return shown

    def open(self, endpoint: str) -> grpc.aio.Channel:
        """Return a channel to `endpoint`, which connects on first use."""
        # No proxy to a server on this host: a proxy must not see the token or the proof of shared memory.
        direct = (("grpc.enable_http_proxy", 0),) if is_local(endpoint) else ()
        if self._certificates is None:
            return grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS + direct)
        options = (*CHANNEL_OPTIONS, *direct, *self._name)
        return grpc.aio.secure_channel(endpoint, _credentials(self._certificates.pem), options=options)


def _credentials(pem: Pem) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.cert or None)


def from_message(error: pb.ImageError) -> EncoderError:
    """Return the error that the server sent for one image."""
    return from_status(error.code, error.message, retry_after_ms=error.retry_after_ms)


def from_rpc(error: grpc.aio.AioRpcError, endpoint: str) -> EncoderError:
    """Return the error of a whole call, with the endpoint in its message."""
    if (cut := _cut(error.code(), error.details(), endpoint)) is not None:
        return cut
    metadata = error.trailing_metadata() or ()
    retry_after_ms = next((int(value) for key, value in metadata if key == "retry-after-ms"), 0)
    why = error.details() or ""
    if why.startswith(UNCONNECTED):
        why = f"no server answers ({why_unconnected(why)})"
    return from_status(error.code().value[0], f"{endpoint}: {why}", retry_after_ms=retry_after_ms)


async def ended_early(call: Any, endpoint: str) -> EncoderError:
    """Return the error of a call that the server ended before every image had an outcome."""
    code: grpc.StatusCode = await call.code()
    if code is grpc.StatusCode.OK:
        return InternalError(f"{endpoint}: the server ended the call before every image had its outcome")
    details = await call.details()
    return _cut(code, details, endpoint) or from_status(code.value[0], f"{endpoint}: {details}")


def _cut(code: grpc.StatusCode, details: str | None, endpoint: str) -> UnavailableError | None:
    """Return the error of a call that was cut off; None if it ended in another way."""
    if details == LOCAL_FAILURE:
        return UnavailableError(f"{endpoint}: the connection failed during a write")
    # Not cancelled by this client, which would not ask for the reason. A server that stops cancels calls that reach it.
    if code is grpc.StatusCode.CANCELLED:
        return UnavailableError(f"{endpoint}: the server stopped before it accepted the call")
    return None
