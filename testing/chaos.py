"""Chaos for a fleet: attackers, restarts, and an index that stalls, forgets or dies, one event at a time."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from testing.attacks import ATTACKS, attacking
from testing.redis_servers import RedisServer
from testing.replicas import ReplicaProcess

ATTACK_S, CALM_S, OUTAGE_S = 8.0, 2.0, 3.0


@dataclass
class Chaos:
    """A fleet of two replicas and what has happened to it. The first replica is never restarted: it is measured."""

    replicas: Sequence[ReplicaProcess]
    redis: RedisServer
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    """How often each event has happened."""
    is_warm: bool = False
    """Whether the warm-up is over: until then, all attacks are on the first replica."""
    hangs: int = 0
    """Restarts in which the replica did not drain."""

    async def inject(self, name: str) -> None:
        """Run one of `EVENTS`, then leave the fleet alone for a moment."""
        self.counts[name] += 1
        if name in FAULTS:
            await FAULTS[name](self)
        else:
            await self.attack(name)
        await asyncio.sleep(CALM_S)

    async def attack(self, name: str) -> None:
        """Attack one of the replicas for a while."""
        victim = self.rng.choice(self.replicas) if self.is_warm else self.replicas[0]
        with ExitStack() as stack:
            # In a thread, as an attack may prepare itself for seconds, in which the clients go on.
            go = await asyncio.to_thread(stack.enter_context, attacking(name, victim.process))
            go()
            await asyncio.sleep(ATTACK_S)

    async def restart(self) -> None:
        """Restart the second replica as an orchestrator does, and count a hang if it does not drain."""
        if await asyncio.to_thread(self.replicas[1].process.terminate) != 0:
            self.hangs += 1
        await asyncio.to_thread(self.replicas[1].start)

    async def kill(self) -> None:
        """Kill the second replica and start it again."""
        self.replicas[1].kill()
        await asyncio.sleep(CALM_S)
        await asyncio.to_thread(self.replicas[1].start)

    async def pause(self) -> None:
        """Stop the index from answering for a while."""
        self.redis.pause()
        await asyncio.sleep(OUTAGE_S)
        self.redis.resume()

    async def flush(self) -> None:
        """Delete everything in the index."""
        with self.redis.client() as client:
            await asyncio.to_thread(client.flushall)

    async def lose(self) -> None:
        """Kill the index and start it again, empty."""
        self.redis.kill()
        await asyncio.sleep(OUTAGE_S)
        await asyncio.to_thread(self.redis.start)

    def crashes(self) -> int:
        """Return how many replicas have ended by themselves."""
        return sum(not replica.is_alive for replica in self.replicas)


FAULTS: dict[str, Callable[[Chaos], Awaitable[None]]] = {
    each.__name__: each for each in (Chaos.restart, Chaos.kill, Chaos.pause, Chaos.flush, Chaos.lose)
}
EVENTS = (*FAULTS, *ATTACKS)
