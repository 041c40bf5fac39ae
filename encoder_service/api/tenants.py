"""Tenants: their tokens, certificates and rights, from a file that is reloaded when it changes."""

import hashlib
import logging
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Literal, get_args

from encoder_contract.trusted import read_trusted
from encoder_service.config import Config, ConfigError, flag
from encoder_service.scheduler.policy import MAX_PRIORITY, MIN_PRIORITY

log = logging.getLogger(__name__)

Right = Literal["submit", "fetch", "operate", "metrics"]
RIGHTS: tuple[Right, ...] = get_args(Right)
# Each call is compared with every token: this many take a fifth of a millisecond.
MAX_TOKENS = 1024
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
RESERVED = "peer"  # the client name of other replicas
_KEYS = ("tokens", "certificates", "rights", "max_priority", "shares_by_salt")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """The unit of shares, addresses and rights."""

    name: str
    rights: frozenset[str]
    max_priority: int = 0
    shares_by_salt: bool = False
    """Whether each `tenant_salt` of its callers has shares of its own, as a tenant has."""


@dataclass(frozen=True, slots=True)
class _Entries:
    """The parsed file."""

    by_token: Mapping[bytes, Tenant]  # by the SHA-256 of the token
    by_certificate: Mapping[str, Tenant]


class Tenants:
    """The tenants of a TOML file, one table each, named as the tenant.

    For example:

        [chat]
        tokens = ["6b86b273…"]          # SHA-256 of each token, 64 hexadecimal digits
        certificates = ["chat.example"]  # names in client certificates
        rights = ["submit", "fetch"]     # of submit, fetch, operate, metrics
        max_priority = 0                 # -8 to 8; a caller's higher priority is lowered to this
        shares_by_salt = false           # true: each `tenant_salt` has shares as a tenant has

    The file holds hashes of tokens, so reading it does not let anyone call. It must name at least one tenant, and each
    tenant needs a token or a certificate. If a changed file is invalid or cannot be read, an error is logged and the
    previous tenants stay in force.
    """

    def __init__(self, path: str) -> None:
        """Read the file. Raises `ValueError`, which names the file and its error."""
        self._path = path
        self._loaded_stamp = self._stamp()
        self._entries = self._read()

    def by_token(self, token: str) -> Tenant | None:
        """Return the tenant that has the token. Takes the same time for every token, known or not."""
        digest = hashlib.sha256(token.encode()).digest()
        found = None
        for known, tenant in self._current().by_token.items():
            if compare_digest(known, digest):
                found = tenant
        return found

    def is_hash(self, token: str) -> bool:
        """Whether a wrong token is an entry of the file: somebody sends the hash of a token in its place."""
        return _SHA256.fullmatch(token) is not None and bytes.fromhex(token) in self._current().by_token

    def by_certificate(self, names: Collection[str]) -> Tenant | None:
        """Return the tenant of a certificate with these names."""
        known = self._current().by_certificate
        return next((known[name] for name in names if name in known), None)

    def reload(self) -> None:
        """Read the file now if it has changed."""
        self._current()

    def _current(self) -> _Entries:
        if (stamp := self._stamp()) != self._loaded_stamp:
            self._loaded_stamp = stamp
            try:
                self._entries = self._read()
                log.info("tenants: %s reloaded", self._path)
            except ValueError as error:
                log.warning(
                    "tenants: the changed file is not used, the previous tenants stay in force: %s", error
                )
        return self._entries

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        # The change time (ctime) also changes with the permissions to read the file.
        return found.st_ino, found.st_mtime_ns, found.st_size, found.st_ctime_ns

    def _read(self) -> _Entries:
        try:
            tables = tomllib.loads(read_trusted(self._path).decode())
            entries = _entries(tables)
        except OSError as error:
            raise ValueError(f"{self._path}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from error
        if len(entries.by_token) > MAX_TOKENS:
            raise ValueError(f"{self._path}: more than {MAX_TOKENS} tokens: {len(entries.by_token)}")
        return entries


def read_tenants(config: Config) -> Tenants | None:
    """Return the configured tenants, None if there are none. Raises `ConfigError`."""
    try:
        return Tenants(config.tenants_file) if config.tenants_file else None
    except ValueError as error:
        raise ConfigError(f"{flag('tenants_file')}: {error}") from error


def _entries(tables: Mapping[str, Any]) -> _Entries:
    if not tables:
        raise ValueError("it names no tenant, so every caller would be refused: add a [NAME] table")
    by_token: dict[bytes, Tenant] = {}
    by_certificate: dict[str, Tenant] = {}
    for name, table in tables.items():
        if not _NAME.fullmatch(name) or name == RESERVED or not isinstance(table, dict):
            raise ValueError(
                f"[{name}] must be a table whose name has 1 to 64 letters, digits and any of _ . @ -, and is not "
                f"{RESERVED}"
            )
        if unknown := table.keys() - {*_KEYS}:
            raise ValueError(
                f"[{name}] has unknown keys: {', '.join(sorted(unknown))} (known: {', '.join(_KEYS)})"
            )
        lists = {key: _strings(name, key, table.get(key, [])) for key in ("tokens", "certificates", "rights")}
        if unknown := {*lists["rights"]} - {*RIGHTS}:
            raise ValueError(
                f"[{name}] has unknown rights: {', '.join(sorted(unknown))} (known: {', '.join(RIGHTS)})"
            )
        if not lists["tokens"] and not lists["certificates"]:
            raise ValueError(f"[{name}] needs a token or a certificate")
        tenant = Tenant(
            name,
            frozenset(lists["rights"]),
            _priority(name, table.get("max_priority", 0)),
            _is_true(name, "shares_by_salt", table.get("shares_by_salt", False)),
        )
        for token in lists["tokens"]:
            if not _SHA256.fullmatch(token):
                raise ValueError(
                    f"[{name}] tokens must be SHA-256 hashes of tokens, 64 lower-case hexadecimal digits each; one has "
                    f"{len(token)} characters"
                )
            _add(by_token, bytes.fromhex(token), tenant)
        for certificate in lists["certificates"]:
            _add(by_certificate, certificate, tenant)
    return _Entries(by_token, by_certificate)


def _priority(tenant: str, value: object) -> int:
    if type(value) is not int or not MIN_PRIORITY <= value <= MAX_PRIORITY:
        raise ValueError(
            f"[{tenant}] max_priority must be an integer from {MIN_PRIORITY} to {MAX_PRIORITY}, got {value!r}"
        )
    return value


def _is_true(tenant: str, key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"[{tenant}] {key} must be true or false, got {value!r}")
    return value


def _strings(tenant: str, key: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise ValueError(f"[{tenant}] {key} must be a list of strings, none of them empty")
    return value


def _add(known: dict[Any, Tenant], key: object, tenant: Tenant) -> None:
    if known.setdefault(key, tenant) is not tenant:
        raise ValueError(f"[{known[key].name}] and [{tenant.name}] have the same token or certificate")
