"""Settings of middleware and connector: the `ec_connector_extra_config` in vLLM's `--ec-transfer-config`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from encoder_contract.credentials import Credentials

Gating = Literal["window", "request"]
WithoutService = Literal["refuse", "own_tower"]
ANY_MODEL = "any"
_FINGERPRINT = re.compile("[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is a key. Unknown keys are errors."""

    endpoints: tuple[str, ...]
    """host:port or unix:/path of each server; a string for one."""
    timeout_s: float = 60.0
    """How long the rows of one image may take; then its request ends with an error."""
    grace_s: float = 1.0
    """How long an image may be unknown to the service before it counts as lost. The middleware submits an image before
    the engine sees it, but one replica may learn of it later than another."""
    submit_timeout_s: float = 10.0
    """How long the service may take to answer for the images of a request before it counts as down."""
    start_timeout_s: float = 300.0
    """How long a starting engine waits for the service."""
    host_gib: float = 2.0
    """Limit of host memory for arriving rows; when it is full, new requests wait.

    It is allocated as it is used, but on a GPU all at once: workers register it with CUDA.
    """
    shared_memory: bool = True
    """Whether rows may come through the shared memory of a service on this host."""
    gating: Gating = "window"
    """The images that a request waits for: those of its next prefill step, or all of them."""
    without_service: WithoutService = "refuse"
    """While the service is down: answer 503, or let the engine's own tower encode, if it is loaded."""
    model_fingerprint: str = ""
    """A service whose vision weights or configuration differ from the engine's checkpoint is refused. 64 hexadecimal
    digits: the service must also have this fingerprint. "any": nothing is compared."""
    tls_ca: str = ""
    """PEM file of authorities of the service's certificate, or `public`; empty: no TLS."""
    tls_cert: str = ""
    """PEM file with this engine's certificate, if the service requires one; read again when it changes."""
    tls_key: str = ""
    """PEM file with the key of `tls_cert`."""
    tls_name: str = ""
    """The name in the service's certificate, if endpoints are addresses."""
    token_file: str = ""
    """File with the token of this engine's tenant; sent by TLS or within this host only, read again when it changes."""
    tenant_salt: str = ""
    """Part of the address of every image, so that this engine shares embeddings only with those of the same salt."""

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Self:
        """Read vLLM's `ec_connector_extra_config`; raises `ValueError` naming the key that is wrong."""
        kinds = {field.name: field.type for field in fields(cls)}
        if unknown := sorted(extra.keys() - kinds.keys()):
            raise ValueError(f"ec_connector_extra_config: unknown keys {unknown} (known: {sorted(kinds)})")
        given = dict(extra)
        endpoints = given.pop("endpoints", ())
        given["endpoints"] = (endpoints,) if isinstance(endpoints, str) else tuple(endpoints)
        if not given["endpoints"]:
            raise ValueError(
                "ec_connector_extra_config: endpoints is missing: host:port of the encoder service"
            )
        settings = cls(**given)
        settings._check()
        return settings

    @property
    def demanded_fingerprint(self) -> bytes:
        """The fingerprint that the service must have, 32 bytes; empty if none is demanded."""
        return b"" if self.takes_any_model else bytes.fromhex(self.model_fingerprint)

    @property
    def takes_any_model(self) -> bool:
        """Whether a service of any model is accepted, if its rows have the right shape."""
        return self.model_fingerprint == ANY_MODEL

    @property
    def credentials(self) -> Credentials:
        """The credentials for the service."""
        return Credentials(self.tls_ca, self.tls_cert, self.tls_key, self.tls_name, self.token_file)

    def _check(self) -> None:
        for name, choices in (("gating", get_args(Gating)), ("without_service", get_args(WithoutService))):
            if getattr(self, name) not in choices:
                raise ValueError(f"ec_connector_extra_config: {name} must be one of {choices}")
        for name in ("timeout_s", "grace_s", "submit_timeout_s", "start_timeout_s", "host_gib"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"ec_connector_extra_config: {name} must be a number above 0, got {value!r}")
        if not isinstance(self.shared_memory, bool):
            raise ValueError("ec_connector_extra_config: shared_memory must be true or false")
        self.credentials.certificates()
        self.credentials.token()
        if self.model_fingerprint not in ("", ANY_MODEL) and not _FINGERPRINT.fullmatch(
            self.model_fingerprint
        ):
            raise ValueError(
                "ec_connector_extra_config: model_fingerprint must be 64 hexadecimal digits, "
                f'"{ANY_MODEL}" or empty, got {self.model_fingerprint!r}'
            )
