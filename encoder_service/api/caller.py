"""The caller of a call: who it is, what it may do and see, and whose share it uses.

`caller_of` is the only reader of a call's connection and metadata. `Identity` knows the tenants and the replicas of the
fleet.
"""

import logging
from dataclasses import replace
from time import time

from blake3 import blake3

from encoder_contract.endpoint import host_of
from encoder_contract.errors import ForbiddenError, UnauthenticatedError
from encoder_contract.fleet_key import SIGNATURE_METADATA, FleetKey
from encoder_contract.traceparent import TRACEPARENT
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.messages import Context
from encoder_service.api.tenants import Right, Tenant, Tenants
from encoder_service.limits import Caller

log = logging.getLogger(__name__)

# How far the clocks of two replicas may differ, and for how long an intercepted call can be replayed.
MAX_SKEW_S = 60.0
_BEARER = "Bearer "
# The keys under which gRPC has the names in a client's certificate.
_CERTIFICATE_NAMES = ("x509_common_name", "x509_subject_alternative_name")
_LOCAL = ("unix:", "ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")
# The holder of other replicas. Those of other callers begin with another word: see `Identity.admit`.
_PEER_HOLDER = "peer"


def caller_of(context: Context) -> Caller:
    """Return the caller that connection and metadata identify. Its shares count against its host, until `admit`."""
    metadata = dict(context.invocation_metadata() or ())
    connection = context.peer()
    host = host_of(connection)
    authorization, signature = metadata.get("authorization"), metadata.get(SIGNATURE_METADATA)
    certificate = context.auth_context() or {}
    return Caller(
        host,
        f"host {host}",
        connection=connection,
        is_local=connection.startswith(_LOCAL),
        name=host,
        proxy_request_id=str(metadata.get("x-request-id", "")),
        traceparent=str(metadata.get(TRACEPARENT, "")),
        authorization=authorization if isinstance(authorization, str | None) else "",
        certificate_names=tuple(
            name.decode(errors="replace") for kind in _CERTIFICATE_NAMES for name in certificate.get(kind, ())
        ),
        signature=signature if isinstance(signature, bytes) else b"",
    )


class Identity:
    """Identifies tenants and the replicas of this fleet. Without tenants, every caller has every right."""

    def __init__(self, tenants: Tenants | None, fleet_key: FleetKey | None) -> None:
        self._tenants = tenants
        self.fleet_key = fleet_key
        self.advertised = ""
        """The endpoint at which other replicas reach this one, once it is known."""

    def is_peer(self, request: bytes, caller: Caller) -> bool:
        """Whether another replica of the fleet makes this call: `request`, as received, has its signature."""
        if self.fleet_key is None or not caller.signature or not self.advertised:
            return False
        signed_at = self.fleet_key.request_signed_at(caller.signature, self.advertised, request)
        if signed_at is None:
            return False
        away_s = time() - signed_at
        if abs(away_s) > MAX_SKEW_S:
            log.warning(
                "a replica's signature was rejected: by this host's clock the call was signed %.0f s ago (limit %g s); "
                "it was replayed, or the clocks differ (check NTP)",
                away_s,
                MAX_SKEW_S,
            )
            return False
        return True

    def admit(self, tenant: Tenant | None, caller: Caller, message: pb.Caller) -> Caller:
        """Return the caller, whose tenant `require` has returned, completed from its `message`.

        With tenants, name and shares are the tenant's. The salt is derived from the tenant and the salt in the message,
        so that a tenant can separate its own users. With `shares_by_salt`, each salt has shares of its own. A priority
        above the tenant's `max_priority` is lowered to it.

        Without tenants, shares are the host's, since a client can invent names. The salt is the one in the message. A
        priority above 0 is lowered to 0.

        Raises `InvalidRequestError` for a field over its limit.
        """
        messages.check_caller(message)
        if tenant is not None:
            assert self.fleet_key is not None
            salt = self.fleet_key.salt(tenant.name, message.tenant_salt)
            return replace(
                caller,
                name=tenant.name,
                holder=_holder(tenant, message.tenant_salt and salt),
                request_id=message.request_id,
                priority=min(message.priority, tenant.max_priority),
                salt=salt,
            )
        return replace(
            caller,
            name=message.client_id or caller.host,
            request_id=message.request_id,
            priority=min(message.priority, 0),
            salt=message.tenant_salt,
        )

    def admit_peer(self, caller: Caller, message: pb.Caller) -> Caller:
        """Return the caller as another replica, which calls on behalf of its own callers."""
        messages.check_caller(message)
        return replace(
            caller,
            name=message.client_id or caller.host,
            is_peer=True,
            holder=_PEER_HOLDER,
            request_id=message.request_id,
            priority=message.priority,
            salt=message.tenant_salt,
        )

    def check_again(self, right: Right, admitted: Caller) -> None:
        """Check, during a call that stays open, that its caller is still the same tenant and still has the right.

        Raises `UnauthenticatedError`, `ForbiddenError`.
        """
        tenant = self.require(right, admitted)
        if tenant is not None and tenant.name != admitted.name:
            raise UnauthenticatedError(
                f"this token or certificate no longer belongs to tenant {admitted.name}: call again with a current one"
            )

    def require(self, right: Right | None, caller: Caller) -> Tenant | None:
        """Return the caller's tenant, None without tenants. Raises `UnauthenticatedError`, `ForbiddenError`."""
        if self._tenants is None:
            return None
        if caller.authorization is not None:
            tenant = _bearer(self._tenants, caller.authorization)
        elif (found := self._tenants.by_certificate(caller.certificate_names)) is not None:
            tenant = found
        else:
            raise UnauthenticatedError(
                "this server requires a tenant's token or certificate, and the call has neither: set the client's "
                "credentials"
            )
        if right is not None:
            _require_right(tenant, right)
        return tenant

    def check_reader(self, authorization: str) -> None:
        """Check that an HTTP client with this header may read metrics. For any thread.

        Raises `UnauthenticatedError`, `ForbiddenError`.
        """
        if self._tenants is None:
            return
        _require_right(_bearer(self._tenants, authorization), "metrics")


def _holder(tenant: Tenant, salt: bytes) -> str:
    """Return the holder of a tenant's caller, whose own salt is derived from the tenant's; empty if it has none.

    The holder is a hash of it, because holders are shown and salts are not. A tenant's name has no space.
    """
    user = f" {blake3(salt).hexdigest(length=8)}" if tenant.shares_by_salt and salt else ""
    return f"tenant {tenant.name}{user}"


def _require_right(tenant: Tenant, right: Right) -> None:
    if right not in tenant.rights:
        raise ForbiddenError(
            f"tenant {tenant.name} lacks the right `{right}`: ask the server's operator for it"
        )


def _bearer(tenants: Tenants, authorization: str) -> Tenant:
    """Return the tenant whose token an `authorization` header has. Raises `UnauthenticatedError`."""
    token = authorization.removeprefix(_BEARER)
    if token == authorization:
        what = "an authorization that is not `Bearer TOKEN`" if authorization else "no token"
        raise UnauthenticatedError(f"{what} was sent: send a tenant's token as `authorization: Bearer TOKEN`")
    tenant = tenants.by_token(token)
    if tenant is None:
        if tenants.is_hash(token):
            raise UnauthenticatedError(
                "unknown token: it is the hash in the tenants file; send the token of which it is the SHA-256"
            )
        raise UnauthenticatedError("unknown token: it belongs to no tenant of this server")
    return tenant
