"""The layout of the index in Redis: key names, the records in locations, and the list of live replicas."""

import random
import re
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from blake3 import blake3

from encoder_contract.endpoint import Endpoint
from encoder_contract.errors import ModelMismatchError
from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import Location, Locations, Replica
from encoder_service.cluster.redis.connection import RedisConnection, Script

SCHEMA_VERSION = 4

# A token identifies one start of a replica: 64 bits of a hash over its id and epoch. After a restart, no replica has
# the token in the old locations. Two of a thousand replicas collide with probability 3e-14; a collision causes failed
# calls to peers, never wrong rows.
TOKEN_BYTES = 8
# Token, then height and width of the grid; `t` is 1.
_RECORD = struct.Struct(f"<{TOKEN_BYTES}sII")


def namespace(prefix: str, model_fingerprint: bytes) -> str:
    """Return the namespace of a model. Models, and versions of this layout, may share a Redis but never keys."""
    return f"{prefix}:{model_fingerprint.hex()[:12]}:{SCHEMA_VERSION}"


def replica_token(replica_id: str, epoch: int) -> bytes:
    """Return the token of one start of a replica."""
    return blake3(f"{replica_id}\0{epoch}".encode()).digest(TOKEN_BYTES)


def fingerprint(replica: Replica) -> str:
    """Return the fingerprint that all replicas of a namespace must share, shortened: model.processor."""
    return f"{replica.model_fingerprint[:8].hex()}.{replica.processor_fingerprint[:8].hex()}"


class Keys:
    """The keys of a namespace. The hash tag is the address, so all keys of an address are in one slot."""

    def __init__(self, namespace: str) -> None:
        self._prefix = namespace.encode() + b":{"
        self.replicas = self._prefix + b"replicas}"
        self.membership = (self.replicas, self.replicas + b":deadlines", self.replicas + b":version")
        """The keys of the list of live replicas: see `heartbeat.lua`."""

    def location(self, address: bytes) -> bytes:
        """Return the key of the address's location records. It is also the channel for changes of the address."""
        return self._tagged(address) + b":loc"

    def address(self, channel: bytes) -> bytes | None:
        """Return the address of a channel, None if the name is invalid."""
        tagged = channel.removeprefix(self._prefix).removesuffix(b"}:loc")
        try:
            return urlsafe_b64decode(tagged + b"=" * (-len(tagged) % 4))
        except ValueError:
            return None

    def lease(self, address: bytes) -> bytes:
        """Return the key of the lease: its value is the token of the replica that encodes the address."""
        return self._tagged(address) + b":lease"

    def _tagged(self, key: bytes) -> bytes:
        # Encoded, as a brace among the raw bytes would end the hash tag early.
        return self._prefix + urlsafe_b64encode(key).rstrip(b"=") + b"}"


class Record(NamedTuple):
    """One replica in a location: its token, and the grid that it published."""

    token: bytes
    grid: Grid


def packed(grid: Grid) -> bytes:
    """Return the grid as in a record: the part after the token."""
    return _RECORD.pack(b"", grid.h, grid.w)[TOKEN_BYTES:]


def records(value: bytes | None) -> Iterator[Record]:
    """Yield each record of a location; skip an incomplete record at the end."""
    value = value or b""
    for token, h, w in _RECORD.iter_unpack(value[: len(value) // _RECORD.size * _RECORD.size]):
        yield Record(token, Grid(1, h, w))


@dataclass(frozen=True, slots=True)
class Peer:
    """Another live replica, as of the last heartbeat."""

    replica_id: str
    epoch: int
    endpoint: str


# A replica's name appears in logs and on the status page, so it must not contain control characters or spaces.
_NAME = re.compile(rb"[!-~]{1,128}")


def readable(name: bytes) -> str:
    """Return a name from Redis as printable text for a message; it may be invalid."""
    return name.decode() if _NAME.fullmatch(name) else repr(name[:128])


def _peer(replica_id: bytes, record: bytes) -> Peer:
    """Parse an entry of the replica list. Raises `ValueError` for an invalid one."""
    epoch, _, endpoint = record.decode("ascii").split(" ")
    if not _NAME.fullmatch(replica_id) or not endpoint.isprintable():
        raise ValueError("invalid name")
    Endpoint.of_server(endpoint)
    return Peer(replica_id.decode(), int(epoch), endpoint)


def parse_peers(entries: Sequence[bytes]) -> dict[bytes, Peer]:
    """Return the peers by token, from the flat list [id, record, ...] of the script; skip invalid records."""
    peers: dict[bytes, Peer] = {}
    for replica_id, record in zip(entries[::2], entries[1::2], strict=False):
        with suppress(ValueError):
            peer = _peer(replica_id, record)
            peers[replica_token(peer.replica_id, peer.epoch)] = peer
    return peers


HEARTBEAT = Script("heartbeat")

# About so many of the heartbeats that a large fleet sends in one period look for expired replicas: that is half of what
# one of them costs Redis.
LOOKS = 16

# The number of dead replicas to remember, so that they are not looked up again. Each call of `acquire` sends their
# tokens (8 bytes each). If there are more, all are forgotten, which costs one heartbeat.
MAX_DEAD = 256


class Membership:
    """One start of this replica, and its peers as of the last heartbeat."""

    def __init__(self, replica: Replica, keys: Sequence[bytes], ttl_ms: int) -> None:
        """`keys` are those of the list of live replicas: see `Keys.membership`."""
        self.token = replica_token(replica.replica_id, replica.epoch)
        self._replica = replica
        self._keys = keys
        self._ttl_ms = ttl_ms
        self._version = b""
        self.dead: set[bytes] = set()
        self.peers: dict[bytes, Peer] = {}

    async def heartbeat(self, connection: RedisConnection, verb: Literal["join", "beat", "leave"]) -> bool:
        """Join, renew or leave; update the live peers; return whether this replica was listed already.

        Raises `ModelMismatchError` if a live replica serves another model, or if a later start of this replica has
        joined.
        """
        ours = self._replica
        looks = verb != "beat" or random.random() * len(self.peers) < LOOKS  # noqa: S311 - a sample, no secret
        reply = await connection.run_once(
            HEARTBEAT,
            self._keys,
            verb if looks else "renew",
            ours.replica_id,
            ours.epoch,
            fingerprint(ours),
            ours.endpoint,
            self._ttl_ms,
            self._version,
        )
        if reply[0] == b"mismatch":
            theirs = f"{readable(reply[1])} serves {readable(reply[2])}"
            raise ModelMismatchError(
                f"the namespace of the index is taken by another model or processor: {theirs}, "
                f"{ours.replica_id} serves {fingerprint(ours)}: use another --index-prefix"
            )
        if reply[0] == b"superseded":
            raise ModelMismatchError(f"a later start of replica {ours.replica_id} has taken its place")
        version, *listed = reply[2:]
        for entries in listed:  # none if the version is the one that we sent
            self._version, self.peers = version, parse_peers(entries)
            self.peers.pop(self.token, None)
            self.dead -= self.peers.keys()
        return bool(reply[1] == 1)

    def forget_peers(self) -> None:
        """Forget the peers until the next heartbeat."""
        self.peers.clear()
        self._version = b""

    def unknown(self, tokens: Iterable[bytes]) -> set[bytes]:
        """Return the tokens whose replicas may have joined since the last heartbeat."""
        return set(tokens) - self.peers.keys() - self.dead - {self.token}

    def mark_dead(self, tokens: Iterable[bytes]) -> None:
        """Mark replicas as dead that are still unknown. Call after the heartbeat that looked for them."""
        if len(self.dead) > MAX_DEAD:
            self.dead.clear()
        self.dead |= self.unknown(tokens)

    def locations(self, value: bytes | None, excluding: Collection[str] = ()) -> Locations:
        """Return the live peers in the value of a location key, except those in `excluding`."""
        found = []
        for record in records(value):
            peer = self.peers.get(record.token)
            if peer is not None and peer.replica_id not in excluding:
                found.append(Location(peer.replica_id, peer.endpoint, record.grid))
        return tuple(found)

    def tokens_of(self, replica_ids: Collection[str]) -> bytes:
        """Return the tokens of live peers, concatenated."""
        return b"".join(token for token, peer in self.peers.items() if peer.replica_id in replica_ids)
