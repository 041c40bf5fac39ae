"""Channels to servers: plain, or over TLS with certificates that are read again when they change."""

import grpc

from encoder_contract.certificates import Pem
from encoder_contract.credentials import Credentials
from encoder_contract.endpoint import is_local
from encoder_contract.errors import UnauthenticatedError

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
