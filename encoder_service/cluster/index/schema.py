"""The layout of the index in Redis: names of keys, and the records in them."""

import re
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3

from encoder_contract.endpoint import Endpoint
from encoder_contract.geometry import Grid
from encoder_service.cluster.contract import Replica

SCHEMA_VERSION = 3

# A replica in a location: 64 bits of a hash over its id and epoch, so that a restarted replica's old locations
# name nobody. Among a thousand replicas two collide once in 4e13; it would cost failed peer calls, not wrong rows.
TOKEN_BYTES = 8
# Token, then height and width of the grid; `t` is 1.
_RECORD = struct.Struct(f"<{TOKEN_BYTES}sII")


def namespace(prefix: str, model_fingerprint: bytes) -> str:
    """Return the namespace of a model: models, and versions of this layout, share a Redis without meeting."""
    return f"{prefix}:{model_fingerprint.hex()[:12]}:{SCHEMA_VERSION}"


def token(replica_id: str, epoch: int) -> bytes:
    """Return what stands for one life of a replica in locations and leases."""
    return blake3(f"{replica_id}\0{epoch}".encode()).digest(TOKEN_BYTES)


def fingerprint(replica: Replica) -> str:
    """Return what two replicas of a namespace must have in common, short and readable: model.processor."""
    return f"{replica.model_fingerprint[:8].hex()}.{replica.processor_fingerprint[:8].hex()}"


class Keys:
    """The keys of a namespace. The address is the hash tag, so that all keys of an address are in one slot."""

    def __init__(self, namespace: str) -> None:
        self._prefix = namespace.encode() + b":{"
        self.roll = self._prefix + b"replicas}"

    def location(self, address: bytes) -> bytes:
        """Records of who holds the address; also the name of the channel that tells of a change."""
        return self._tagged(address) + b":loc"

    def address(self, channel: bytes) -> bytes | None:
        """Return the address that a channel is about, or None for a channel of somebody else."""
        tagged = channel.removeprefix(self._prefix).removesuffix(b"}:loc")
        try:
            return urlsafe_b64decode(tagged + b"=" * (-len(tagged) % 4))
        except ValueError:
            return None

    def lease(self, address: bytes) -> bytes:
        """Token of who encodes the address."""
        return self._tagged(address) + b":lease"

    def source(self, key: bytes) -> bytes:
        """Bytes of an image."""
        return self._tagged(key) + b":src"

    def _tagged(self, key: bytes) -> bytes:
        # Not the raw bytes: a brace among them would end the hash tag early.
        return self._prefix + urlsafe_b64encode(key).rstrip(b"=") + b"}"


class Record(NamedTuple):
    """What a location says of one replica: its token, and the grid of the image."""

    token: bytes
    grid: Grid


def packed(grid: Grid) -> bytes:
    """Return what follows the token in a record."""
    return _RECORD.pack(b"", grid.h, grid.w)[TOKEN_BYTES:]


def records(value: bytes | None) -> Iterator[Record]:
    """Yield each record of a location; an incomplete one at the end is skipped."""
    value = value or b""
    for token, h, w in _RECORD.iter_unpack(value[: len(value) // _RECORD.size * _RECORD.size]):
        yield Record(token, Grid(1, h, w))


@dataclass(frozen=True, slots=True)
class Peer:
    """Another live replica, as of the last heartbeat. `load` is its own measure; compare, do not interpret."""

    replica_id: str
    epoch: int
    endpoint: str
    load: float


# What a replica may be called: as in the log and on the status page, where it must not look like anything else.
_NAME = re.compile(rb"[!-~]{1,128}")


def readable(name: bytes) -> str:
    """Return what anyone may have written into Redis, for a message."""
    return name.decode() if _NAME.fullmatch(name) else repr(name[:128])


def _peer(replica_id: bytes, record: bytes) -> Peer:
    """Read an entry of the roll. Raises `ValueError` for an invalid one."""
    _, epoch, _, load, endpoint = record.decode("ascii").split(" ")
    if not _NAME.fullmatch(replica_id) or not endpoint.isprintable():
        raise ValueError("not a name")
    Endpoint.parse(endpoint)
    return Peer(replica_id.decode(), int(epoch), endpoint, float(load))


@dataclass(frozen=True, slots=True)
class Roll:
    """The answer to a heartbeat: the other live replicas by token, and whether we were on the roll already."""

    peers: dict[bytes, Peer]
    was_present: bool

    @classmethod
    def parse(cls, was_present: int, entries: list[bytes]) -> "Roll":
        """Read the flat list [id, record, ...] that the script returned; invalid records are skipped."""
        peers: dict[bytes, Peer] = {}
        for replica_id, record in zip(entries[::2], entries[1::2], strict=False):
            try:
                peer = _peer(replica_id, record)
            except ValueError:
                continue
            peers[token(peer.replica_id, peer.epoch)] = peer
        return cls(peers, was_present == 1)
