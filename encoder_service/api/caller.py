"""The caller: who makes a call, what it may do and see, and whose share it uses.

`caller_of` reads a call's connection and metadata, which nothing else does. `Identity` knows tenants and the replicas
of the fleet. `ClientNames` bounds the names that get a share of their own.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from time import monotonic, time
from urllib.parse import unquote

from cachetools import LRUCache

from encoder_contract.errors import ForbiddenError, UnauthenticatedError
from encoder_contract.fleet_key import SIGNATURE_METADATA, FleetKey
from encoder_contract.traceparent import TRACEPARENT, trace_id
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.messages import Context
from encoder_service.api.tenants import Right, Tenant, Tenants
from encoder_service.limits import Caller

log = logging.getLogger(__name__)

# How far the clocks of two replicas may differ, and how long a call that was overheard can be played back.
MAX_SKEW_S = 60.0
_BEARER = "Bearer "
# Where gRPC puts the names of a client's certificate.
_CERTIFICATE_NAMES = ("x509_common_name", "x509_subject_alternative_name")
_LOCAL = ("unix:", "ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")
# What the shares of other replicas count against. Those of callers begin with another word: see `Identity.admit`.
_PEER = ("peer",)


def caller_of(context: Context) -> Caller:
    """Return the caller that connection and metadata show; until `admit`, its shares count against its host."""
    metadata = dict(context.invocation_metadata() or ())
    connection = context.peer()
    host = host_of(connection)
    authorization, signature = metadata.get("authorization"), metadata.get(SIGNATURE_METADATA)
    certificate = context.auth_context() or {}
    return Caller(
        host,
        (_of_host(host),),
        connection=connection,
        is_local=connection.startswith(_LOCAL),
        name=host,
        proxy_request_id=str(metadata.get("x-request-id", "")),
        trace_id=trace_id(str(metadata.get(TRACEPARENT, ""))),
        authorization=authorization if isinstance(authorization, str | None) else "",
        certificate_names=tuple(
            name.decode(errors="replace") for kind in _CERTIFICATE_NAMES for name in certificate.get(kind, ())
        ),
        signature=signature if isinstance(signature, bytes) else b"",
    )


@lru_cache(4096)
def host_of(peer: str) -> str:
    """Return the host of a peer as gRPC writes it: an IPv4 address, or the /64 network of an IPv6 address.

    A host has all addresses of its /64 network. An IPv4 address that is mapped into IPv6 is that IPv4 address. All Unix
    sockets are one host.
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    try:
        address = ip_address(unquote(rest.rpartition(":")[0]).strip("[]"))
    except ValueError:
        return peer.rpartition(":")[0]
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            return f"ipv6:{ip_network((int(address), 64), strict=False)}"
        address = address.ipv4_mapped
    return f"ipv4:{address}"


class Identity:
    """Identifies tenants and the replicas of this fleet. Without tenants, every caller has every right."""

    def __init__(self, tenants: Tenants | None, fleet_key: FleetKey | None) -> None:
        self._tenants = tenants
        self._fleet_key = fleet_key
        self._names = ClientNames()
        self.advertised = ""
        """The endpoint at which other replicas reach us, once it is known."""

    def is_peer(self, request: bytes, caller: Caller) -> bool:
        """Whether another replica of the fleet makes this call, by the signature of its request as it came."""
        if self._fleet_key is None or not caller.signature or not self.advertised:
            return False
        signed_at = self._fleet_key.request_signed_at(caller.signature, self.advertised, request)
        if signed_at is None:
            return False
        away_s = time() - signed_at
        if abs(away_s) > MAX_SKEW_S:
            log.warning(
                "a replica's call was signed %.0f s ago by this host's clock, more than %g s off: it was played "
                "back, or the clocks differ (NTP)",
                away_s,
                MAX_SKEW_S,
            )
            return False
        return True

    def admit(self, right: Right, caller: Caller, said: pb.Caller) -> Caller:
        """Return the caller, completed by what it `said` about itself, as far as that counts, and by its holders.

        With tenants, name, salt and shares are its tenant's; the salt that it sent is mixed in, so a tenant can keep
        its own users apart. Without, the name is what it calls itself, unless its host uses many names; names are free
        to invent, so some shares count against the host, too. The salt is the one it sent. A priority counts up to the
        tenant's `max_priority`, or up to 0. Raises `UnauthenticatedError`, `ForbiddenError`, and `InvalidRequestError`
        for a field over its limit.
        """
        messages.check_caller(said)
        tenant = self.require(right, caller)
        if tenant is not None:
            assert self._fleet_key is not None
            return replace(
                caller,
                name=tenant.name,
                holders=(f"tenant {tenant.name}",),
                request_id=said.request_id,
                priority=min(said.priority, tenant.max_priority),
                salt=self._fleet_key.salt(tenant.name, said.tenant_salt),
            )
        name, own = self._names.counted(said.client_id, caller.host), _of_host(caller.host)
        return replace(
            caller,
            name=name,
            holders=(own,) if name == caller.host else (f"client {name} of {caller.host}", own),
            request_id=said.request_id,
            priority=min(said.priority, 0),
            salt=said.tenant_salt,
        )

    def admit_peer(self, caller: Caller, said: pb.Caller) -> Caller:
        """Return the caller as another replica, which speaks for its own callers."""
        messages.check_caller(said)
        return replace(
            caller,
            name=said.client_id or caller.host,
            is_peer=True,
            holders=_PEER,
            request_id=said.request_id,
            priority=said.priority,
            salt=said.tenant_salt,
        )

    def check_again(self, right: Right, admitted: Caller) -> None:
        """Check, during a call that stays open, that its caller still is the same tenant and has the right.

        Raises `UnauthenticatedError`, `ForbiddenError`.
        """
        tenant = self.require(right, admitted)
        if tenant is not None and tenant.name != admitted.name:
            raise UnauthenticatedError(
                f"tenant {admitted.name} no longer has this token or certificate: call again with a new one"
            )

    def require(self, right: Right | None, caller: Caller) -> Tenant | None:
        """Return the tenant that calls, if there are tenants. Raises `UnauthenticatedError`, `ForbiddenError`."""
        if self._tenants is None:
            return None
        if caller.authorization is not None:
            tenant = _bearer(self._tenants, caller.authorization)
        elif (found := self._tenants.by_certificate(caller.certificate_names)) is not None:
            tenant = found
        else:
            raise UnauthenticatedError("this server requires a tenant's token or certificate")
        if right is not None and right not in tenant.rights:
            raise ForbiddenError(f"tenant {tenant.name} lacks the right `{right}`")
        return tenant

    def check_reader(self, authorization: str) -> None:
        """Check that an HTTP client with this header may read metrics. For any thread.

        Raises `UnauthenticatedError`, `ForbiddenError`.
        """
        if self._tenants is None:
            return
        tenant = _bearer(self._tenants, authorization)
        if "metrics" not in tenant.rights:
            raise ForbiddenError(f"tenant {tenant.name} lacks the right `metrics`")


def _of_host(host: str) -> str:
    return f"host {host}"


def _bearer(tenants: Tenants, authorization: str) -> Tenant:
    """Return the tenant of the token in an authorization. Raises `UnauthenticatedError`."""
    is_bearer = authorization.startswith(_BEARER)
    tenant = tenants.by_token(authorization.removeprefix(_BEARER)) if is_bearer else None
    if tenant is None:
        raise UnauthenticatedError("unknown token: it belongs to no tenant of this server")
    return tenant


# A share leaves room for three others of its size: with a host's own, five of them leave a sixteenth to other hosts.
MAX_NAMES_OF_A_HOST = 4
# A name holds its place for so long after it was last used: what was queued under it has left by then.
KEPT_S = 600.0
MAX_HOSTS = 4096


class ClientNames:
    """Client names of each host: the first few have their own share, all others share the host's."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._hosts: LRUCache[str, dict[str, float]] = LRUCache(MAX_HOSTS)

    def counted(self, client_id: str, host: str) -> str:
        """Return the name that the shares of a caller count against; `client_id` is what it says, empty for nothing."""
        if not client_id:
            return host
        now = self._clock()
        used = self._hosts.setdefault(host, {})
        if client_id not in used and len(used) >= MAX_NAMES_OF_A_HOST:
            for name in [name for name, at in used.items() if now - at > KEPT_S]:
                del used[name]
            if len(used) >= MAX_NAMES_OF_A_HOST:
                return host
        used[client_id] = now
        return client_id
