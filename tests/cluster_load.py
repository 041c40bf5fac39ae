"""Load on a fleet of processes, and checks of a healthy fleet."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from encoder_service.metrics import ScrapeError
from testing.replicas import ReplicaProcess
from testing.traffic import Supply, Traffic
from tests.waiting import soon

# Each test sends new images.
seeds = itertools.count(1)


async def joined(replicas: Sequence[ReplicaProcess]) -> None:
    """Wait until all replicas see each other."""

    async def all_seen() -> bool:
        try:
            seen = [(await asyncio.to_thread(r.metrics)).total("index_peers") for r in replicas]
        except ScrapeError:
            return False
        return seen == [len(replicas) - 1] * len(replicas)

    await soon(all_seen)


async def encodes(replicas: Sequence[ReplicaProcess]) -> int:
    return sum([await asyncio.to_thread(replica.encodes) for replica in replicas])


async def alone(replica: ReplicaProcess) -> bool:
    found = await asyncio.to_thread(replica.metrics)
    return found.total("index_state", state="alone") == 1


def traffic(replicas: Sequence[ReplicaProcess], **options: Any) -> Traffic:
    return Traffic([replica.endpoint for replica in replicas], Supply(seed=next(seeds)), **options)  # type: ignore[arg-type]


async def steady(replicas: Sequence[ReplicaProcess], prompts: int = 15) -> None:
    """Check that the fleet is healthy: it encodes each new image once, without errors."""
    before = await encodes(replicas)
    async with traffic(replicas) as load:
        await load.more(prompts)
    assert load.errors == []
    encoded = await encodes(replicas) - before
    assert encoded == load.distinct, f"{encoded} images were encoded, {load.distinct} were sent"
