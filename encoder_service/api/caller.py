"""The caller: who makes a call, what it may do and see, and whose share it uses.

`Identity` reads tokens, certificates and signatures. `ClientNames` bounds the names that get a share of their own.
"""

import logging
from collections.abc import Callable
from time import monotonic, time

from cachetools import LRUCache

from encoder_contract.errors import ForbiddenError, UnauthenticatedError
from encoder_contract.fleet_key import SIGNATURE_METADATA, FleetKey
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.messages import Context
from encoder_service.api.tenants import Right, Tenant, Tenants

log = logging.getLogger(__name__)

# How far the clocks of two replicas may differ, and how long a call that was overheard can be played back.
MAX_SKEW_S = 60.0
_BEARER = "Bearer "
# Where gRPC puts the names of a client's certificate.
_CERTIFICATE_NAMES = ("x509_common_name", "x509_subject_alternative_name")


class Identity:
    """Identifies tenants and the replicas of this fleet. Without tenants, every caller has every right."""

    def __init__(self, tenants: Tenants | None, fleet_key: FleetKey | None) -> None:
        self._tenants = tenants
        self._fleet_key = fleet_key
        self._names = ClientNames()
        self.advertised = ""
        """The endpoint at which other replicas reach us, once it is known."""

    @property
    def has_tenants(self) -> bool:
        """Whether callers are identified by more than their host and what they say themselves."""
        return self._tenants is not None

    def is_peer(self, request: bytes, context: Context) -> bool:
        """Whether another replica of the fleet makes this call, by the signature of its request as it came."""
        signature = dict(context.invocation_metadata() or ()).get(SIGNATURE_METADATA)
        if self._fleet_key is None or not isinstance(signature, bytes) or not self.advertised:
            return False
        signed_at = self._fleet_key.request_signed_at(signature, self.advertised, request)
        if signed_at is None:
            return False
        away_s = time() - signed_at
        if abs(away_s) > MAX_SKEW_S:
            log.warning(
                "a replica's call was signed %.0f s ago by our clock, over %g s away: played back, or clocks differ",
                away_s,
                MAX_SKEW_S,
            )
            return False
        return True

    def admit(self, right: Right, caller: pb.Caller, context: Context) -> pb.Caller:
        """Return the caller with its counted name, the salt of its addresses, and the priority that it may use.

        With tenants, all are its tenant's; the salt that the caller sent is mixed in, so a tenant can keep its own
        users apart. Without, the name is what it calls itself, unless its host uses many names, the salt is the one
        it sent, and a priority above 0 counts as 0. Raises `UnauthenticatedError`, `ForbiddenError`, and
        `InvalidRequestError` for a field over its limit.
        """
        messages.check_caller(caller)
        tenant = self.require(right, context)
        counted = pb.Caller()
        counted.CopyFrom(caller)
        if tenant is None:
            counted.client_id = self._names.counted(caller.client_id, messages.host(context))
            counted.priority = min(caller.priority, 0)
            return counted
        assert self._fleet_key is not None
        counted.client_id = tenant.name
        counted.priority = min(caller.priority, tenant.max_priority)
        counted.tenant_salt = self._fleet_key.salt(tenant.name, caller.tenant_salt)
        return counted

    def check_again(self, right: Right, admitted: pb.Caller, context: Context) -> None:
        """Check that a caller still is the tenant that it was admitted as, with the right; in a call that stays open.

        Raises `UnauthenticatedError`, `ForbiddenError`.
        """
        tenant = self.require(right, context)
        if tenant is not None and tenant.name != admitted.client_id:
            raise UnauthenticatedError(
                f"this token or certificate is no longer that of tenant {admitted.client_id}: call again"
            )

    def holders(self, caller: pb.Caller, context: Context) -> tuple[str, ...]:
        """Return what the shares of an admitted caller count against: its holder first, then what that belongs to.

        The holder is the tenant. Without tenants it is the client's name at its host, or the host itself; names are
        free to invent, so some shares count against the host, too.
        """
        if self.has_tenants:
            return (f"tenant {caller.client_id}",)
        host = messages.host(context)
        if caller.client_id == host:
            return (f"host {host}",)
        return f"client {caller.client_id} of {host}", f"host {host}"

    def require(self, right: Right | None, context: Context) -> Tenant | None:
        """Return the tenant that calls, if there are tenants. Raises `UnauthenticatedError`, `ForbiddenError`."""
        if self._tenants is None:
            return None
        tenant = self._tenant(self._tenants, context)
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

    @staticmethod
    def _tenant(tenants: Tenants, context: Context) -> Tenant:
        said = dict(context.invocation_metadata() or ()).get("authorization")
        if said is not None:
            return _bearer(tenants, said if isinstance(said, str) else "")
        known = context.auth_context() or {}
        names = [name.decode(errors="replace") for kind in _CERTIFICATE_NAMES for name in known.get(kind, ())]
        if (tenant := tenants.by_certificate(names)) is None:
            raise UnauthenticatedError("this server requires a tenant's token or certificate")
        return tenant


def _bearer(tenants: Tenants, authorization: str) -> Tenant:
    """Return whose token it is that an authorization carries. Raises `UnauthenticatedError`."""
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
