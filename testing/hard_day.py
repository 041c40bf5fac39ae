"""A hard day of a fleet: attackers, restarts, and an index that stops, forgets or dies, one event after the other."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from testing.attackers import attacking
from testing.attacks import ATTACKS, Target
from testing.redis_servers import RedisServer
from testing.replicas import ReplicaProcess

ATTACK_S, CALM_S, PAUSE_S = 8.0, 2.0, 3.0


@dataclass
class Day:
    """The fleet, and what has happened so far. The first replica is never restarted; its memory is what counts."""

    replicas: Sequence[ReplicaProcess]
    redis: RedisServer
    draw: random.Random
    happened: Counter[str] = field(default_factory=Counter)
    # Of the first replica, after each event past the warm-up.
    rss_mib: list[float] = field(default_factory=list)
    hangs: int = 0
    ended: set[int] = field(default_factory=set)  # processes that we ended

    async def happen(self, name: str) -> None:
        """Let one of `EVENTS` happen, and a calm moment follow."""
        self.happened[name] += 1
        if name in FAULTS:
            await FAULTS[name](self)
        else:
            await self.attack(name)
        await asyncio.sleep(CALM_S)

    async def attack(self, name: str) -> None:
        """Let an attacker at one of the replicas for a while; during the warm-up at the first."""
        victim = self.draw.choice(self.replicas) if self.rss_mib else self.replicas[0]
        target = Target(victim.endpoint, victim.process.metrics_url.removeprefix("http://").partition("/")[0])
        with attacking(name, target) as go:
            go()
            await asyncio.sleep(ATTACK_S)

    async def restart(self) -> None:
        """Restart the other replica as an orchestrator does; one that does not drain has hung."""
        other = self.replicas[1]
        self.ended.add(other.process.process.pid)
        if await asyncio.to_thread(other.process.terminate) != 0:
            self.hangs += 1
        await asyncio.to_thread(other.start)

    async def kill(self) -> None:
        """Kill the other replica and start it again."""
        other = self.replicas[1]
        self.ended.add(other.process.process.pid)
        other.kill()
        await asyncio.sleep(CALM_S)
        await asyncio.to_thread(other.start)

    async def pause(self) -> None:
        """Let the index answer nothing for a while."""
        self.redis.pause()
        await asyncio.sleep(PAUSE_S)
        self.redis.resume()

    async def flush(self) -> None:
        """Let the index forget everything."""
        with self.redis.client() as client:
            await asyncio.to_thread(client.flushall)

    async def lose(self) -> None:
        """Let the index die and come back empty."""
        self.redis.kill()
        await asyncio.sleep(PAUSE_S)
        await asyncio.to_thread(self.redis.start)

    def crashes(self) -> int:
        """Return how many replicas ended without having been told to."""
        return sum(not replica.is_alive for replica in self.replicas)


FAULTS: dict[str, Callable[[Day], Awaitable[None]]] = {
    each.__name__: each for each in (Day.restart, Day.kill, Day.pause, Day.flush, Day.lose)
}
EVENTS = (*FAULTS, *ATTACKS)
