"""The settings that the plug-ins of all engines have in common."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from encoder_contract.credentials import AccessSettings
from encoder_contract.endpoint import check_server

ANY_MODEL = "any"
_FINGERPRINT = re.compile("[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class ServiceSettings(AccessSettings):
    """Each field is a key of the user's configuration. Unknown keys are errors."""

    location: ClassVar[str]
    """Where the user writes the keys, for error messages."""

    may_be_zero: ClassVar[tuple[str, ...]] = ()
    """Keys in seconds or GiB that may be 0."""

    endpoints: tuple[str, ...]
    """host:port or unix:/path of each server; a string for a single one."""
    submit_timeout_s: float = 10.0
    """How long the service may take to answer for the images of a request before it counts as down, and the hosts of
    image URLs to send them."""
    start_timeout_s: float = 300.0
    """How long a starting engine waits for the service."""
    shared_memory: bool = True
    """Whether rows may come through the shared memory of a service on this host."""
    model_fingerprint: str = ""
    """A service whose vision weights or configuration differ from the engine's checkpoint is refused. 64 hexadecimal
    digits: the service must also have this fingerprint. "any": nothing is compared."""
    tenant_salt: str = ""
    """Part of the address of every image: this engine shares embeddings only with engines of the same salt."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Read the keys. Raises `ValueError`, which names the wrong key."""
        known = sorted(field.name for field in fields(cls))
        if unknown := sorted(values.keys() - {*known}):
            raise ValueError(f"{cls.location}: unknown keys {unknown} (known: {known})")
        endpoints = values.get("endpoints", ())
        endpoints = (endpoints,) if isinstance(endpoints, str) else endpoints
        if not isinstance(endpoints, list | tuple) or not all(isinstance(each, str) for each in endpoints):
            raise ValueError(
                f"{cls.location}: endpoints must be host:port, or a list of those, got {endpoints!r}"
            )
        if not endpoints:
            raise ValueError(f"{cls.location}: endpoints is missing: host:port of the encoder service")
        settings = cls(**{**values, "endpoints": tuple(endpoints)})
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

    def _check(self) -> None:
        for server in self.endpoints:
            try:
                check_server(server)
            except ValueError as error:
                raise ValueError(f"{self.location}: endpoints: {error}") from error
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not name.endswith(("_s", "_gib")):
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or value < 0 or (value == 0 and name not in self.may_be_zero):
                least = "of 0 or more" if name in self.may_be_zero else "above 0"
                raise ValueError(f"{self.location}: {name} must be a number {least}, got {value!r}")
        if not isinstance(self.shared_memory, bool):
            raise ValueError(f"{self.location}: shared_memory must be true or false")
        self.credentials.certificates()
        self.credentials.token()
        if self.model_fingerprint not in ("", ANY_MODEL) and not _FINGERPRINT.fullmatch(
            self.model_fingerprint
        ):
            raise ValueError(
                f"{self.location}: model_fingerprint must be 64 hexadecimal digits, "
                f'"{ANY_MODEL}" or empty, got {self.model_fingerprint!r}'
            )
