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

# A silent peer is noticed within about two seconds: without ping_timeout_ms, keepalive_timeout_ms has no effect
# and it takes a minute.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the longest that an attempt to connect may take: twenty seconds unless told otherwise.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
# What grpc says, as if the server had, when it could not hand an operation to a call that was just ending.
LOCAL_FAILURE = "Internal error from Core"
# How its prose begins when there is no connection; the reason is behind its last colon.
UNCONNECTED = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")


class Channels:
    """Opens channels with the credentials of one client."""

    def __init__(self, credentials: Credentials) -> None:
        """Read the credentials' files. Raises `ValueError`, which names what is wrong."""
        self._certificates = credentials.certificates()
        self._token = credentials.token()
        name = credentials.server_name
        self._name = (("grpc.ssl_target_name_override", name),) if name else ()

    @property
    def version(self) -> int:
        """Differs when certificates have changed, so that channels opened before should be replaced."""
        return self._certificates.pem.version if self._certificates else 0

    def metadata(self, endpoint: str) -> tuple[tuple[str, str], ...]:
        """Return what identifies us in a call to `endpoint`: our token, if we have one.

        Raises `UnauthenticatedError` if it cannot be read, or if others could read it on the way.
        """
        try:
            shown = self._token.metadata()
        except ValueError as error:
            raise UnauthenticatedError(str(error)) from error
        if shown and self._certificates is None and not is_local(endpoint):
            raise UnauthenticatedError(f"{endpoint}: a token is sent only over TLS (ca), or within this host")
        return shown

    def open(self, endpoint: str) -> grpc.aio.Channel:
        """Return a channel to `endpoint`; it connects when it is first used."""
        # No proxy between us and a server on this host: it is trusted with what others are not.
        direct = (("grpc.enable_http_proxy", 0),) if is_local(endpoint) else ()
        if self._certificates is None:
            return grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS + direct)
        options = (*CHANNEL_OPTIONS, *direct, *self._name)
        return grpc.aio.secure_channel(endpoint, _credentials(self._certificates.pem), options=options)


def _credentials(pem: Pem) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.cert or None)


def from_message(error: pb.ImageError) -> EncoderError:
    """Return the error of an image as the server sent it."""
    return from_status(error.code, error.message, retry_after_ms=error.retry_after_ms)


def from_rpc(error: grpc.aio.AioRpcError, endpoint: str) -> EncoderError:
    """Return the error of a whole call, naming the endpoint it came from."""
    if (cut := _cut(error.code(), error.details(), endpoint)) is not None:
        return cut
    metadata = error.trailing_metadata() or ()
    retry_after_ms = next((int(value) for key, value in metadata if key == "retry-after-ms"), 0)
    why = error.details() or ""
    if why.startswith(UNCONNECTED):
        why = f"no server answers ({why_unconnected(why)})"
    return from_status(error.code().value[0], f"{endpoint}: {why}", retry_after_ms=retry_after_ms)


async def ended_early(call: Any, endpoint: str) -> EncoderError:
    """Return why a server ended a call before every image had its outcome."""
    code: grpc.StatusCode = await call.code()
    if code is grpc.StatusCode.OK:
        return InternalError(f"{endpoint}: the server ended the call before every image had its outcome")
    details = await call.details()
    return _cut(code, details, endpoint) or from_status(code.value[0], f"{endpoint}: {details}")


def _cut(code: grpc.StatusCode, details: str | None, endpoint: str) -> UnavailableError | None:
    """Return the error of a call that was cut off, None if it ended otherwise."""
    if details == LOCAL_FAILURE:
        return UnavailableError(f"{endpoint}: the connection failed during a write")
    # Not by us, who then ask for no reason: gRPC cancels the calls that reach a server while it stops.
    if code is grpc.StatusCode.CANCELLED:
        return UnavailableError(f"{endpoint}: the server stopped before it accepted the call")
    return None
