"""Membership: this replica's entry on the roll of its namespace, and which other replicas are alive."""

from collections.abc import Collection, Iterable, Sized

from encoder_contract.errors import ModelMismatchError
from encoder_service.cluster.contract import Location, Locations, Replica
from encoder_service.cluster.index import schema
from encoder_service.cluster.index.connection import Connection, Script

ROLL = Script("roll")

# Tokens of dead replicas to remember, so that they are not looked up on the roll again; each call of `acquire` sends
# them (8 bytes each). When there are more, all are forgotten, which costs one heartbeat.
MAX_DEAD = 256


class SupersededError(ModelMismatchError):
    """A later start of the same replica id is on the roll."""


class Membership:
    """One start of a replica among its peers; what it knows about them is as old as the last heartbeat."""

    def __init__(self, replica: Replica, roll_key: bytes, ttl_ms: int, jobs: Sized) -> None:
        """Peers see the number of `jobs` as this replica's load."""
        self.token = schema.token(replica.replica_id, replica.epoch)
        self._replica = replica
        self._roll_key = roll_key
        self._ttl_ms = ttl_ms
        self._jobs = jobs
        self.dead: set[bytes] = set()
        self.peers: dict[bytes, schema.Peer] = {}

    async def heartbeat(self, connection: Connection, verb: str) -> bool:
        """Join, beat or leave; learn who is alive; return whether we were on the roll already.

        Raises `ModelMismatchError` when a live replica serves another model, `SupersededError` when a later start of
        this replica has taken its place.
        """
        ours = self._replica
        reply = await connection.run_once(
            ROLL,
            self._roll_key,
            verb,
            ours.replica_id,
            ours.epoch,
            schema.fingerprint(ours),
            len(self._jobs),
            ours.endpoint,
            self._ttl_ms,
        )
        if reply[0] == b"mismatch":
            theirs = f"{schema.readable(reply[1])} serves {schema.readable(reply[2])}"
            raise ModelMismatchError(
                f"the namespace of the index is taken by another model or processor: {theirs}, "
                f"{ours.replica_id} serves {schema.fingerprint(ours)}"
            )
        if reply[0] == b"superseded":
            raise SupersededError(f"a later start of replica {ours.replica_id} has taken its place")
        roll = schema.Roll.parse(reply[1], reply[2])
        self.peers = roll.peers
        self.dead -= roll.peers.keys()
        return roll.was_present

    def unknown(self, tokens: Iterable[bytes]) -> set[bytes]:
        """Return those that may have joined since the last heartbeat."""
        return set(tokens) - self.peers.keys() - self.dead - {self.token}

    def mark_dead(self, tokens: Iterable[bytes]) -> None:
        """Call after a heartbeat: replicas unknown before it that are still not on the roll are dead."""
        if len(self.dead) > MAX_DEAD:
            self.dead.clear()
        self.dead |= self.unknown(tokens)

    def locations(self, value: bytes | None, without: Collection[str] = ()) -> Locations:
        """Return the live peers in the value of a location key, except those in `without`."""
        found = []
        for record in schema.records(value):
            peer = self.peers.get(record.token)
            if peer is not None and peer.replica_id not in without:
                found.append(Location(peer.replica_id, peer.endpoint, record.grid))
        return tuple(found)

    def tokens_of(self, replica_ids: Collection[str]) -> bytes:
        """Return the tokens of live peers, concatenated."""
        return b"".join(token for token, peer in self.peers.items() if peer.replica_id in replica_ids)
