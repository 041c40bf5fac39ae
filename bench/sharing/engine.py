"""An engine as a process: its requests one after the other in several lanes, its tower simulated; prints what it did.

python -m bench.sharing.engine ENDPOINT ENGINE ENGINES IMAGES SEED    deals itself its part of the requests
"""

import asyncio
import json
import random
import sys
from collections import OrderedDict

import numpy as np

from bench.sharing.towers import PRODUCER, image_of, request_of, rows_of
from encoder_contract.errors import UnknownImageError
from prefill_client import EncoderClient, PutSession

# What a tower takes for one image: long enough for others to ask meanwhile.
TOWER_S = 0.05
LANES = 4
# Of the requests of an image, so many come at once, to as many engines; the others come later, at random.
BURST, LATER = 3, 2


def requests(images: int, seed: int) -> list[int]:
    """Return the images of all requests, in their order: four in five are of an image that was asked for before."""
    draw = random.Random(seed)
    order = [number for number in range(images) for _ in range(BURST)]
    for number in range(images):
        for _ in range(LATER):
            order.insert(draw.randint(order.index(number) + BURST, len(order)), number)
    return order


def encodes_alone(order: list[int], engines: int, kept: int) -> int:
    """Return how often the towers run when each engine has a cache of its own, `kept` images in all together."""
    caches = [OrderedDict[int, None]() for _ in range(engines)]
    runs = 0
    for place, number in enumerate(order):
        cache = caches[place % engines]
        runs += number not in cache
        cache.pop(number, None)
        cache[number] = None
        if len(cache) > kept // engines:
            cache.popitem(last=False)
    return runs


class Engine:
    """Asks the store for rows, runs its tower where nobody else does, and counts."""

    def __init__(self, client: EncoderClient, session: PutSession) -> None:
        self._client = client
        self._session = session
        self.encodes = 0
        self.wrong = 0
        self.failed = 0

    async def serve(self, number: int) -> None:
        """Get the rows of one image, whoever computes them."""
        while True:
            (answer,) = await self._session.name([image_of(number)])
            if answer.state == "failed":
                self.failed += 1
                return
            if answer.state == "yours":
                self.encodes += 1
                await asyncio.sleep(TOWER_S)
                kept = await self._session.put(answer, rows_of(number, self._client.description.width))
                self.failed += kept.state != "held"
                return
            if await self._fetched(number, answer.lease_s):
                return

    async def _fetched(self, number: int, wait_s: float) -> bool:
        grace_ms = round(wait_s * 1000)
        async with self._client.fetch(
            [request_of(number)], producer=PRODUCER, grace_ms=grace_ms, timeout_s=60
        ) as stream:
            outcome = await anext(aiter(stream))
            if outcome.error is not None:
                self.failed += not isinstance(outcome.error, UnknownImageError)
                return not isinstance(outcome.error, UnknownImageError)
            right = rows_of(number, self._client.description.width)
            self.wrong += not np.array_equal(outcome.array, right)
            return True


async def run(endpoint: str, engine: int, engines: int, images: int, seed: int) -> dict[str, int]:
    """Serve every `engines`-th request; return what was counted."""
    mine = iter(requests(images, seed)[engine::engines])
    async with (
        await EncoderClient.connect(endpoint, client_id=f"engine {engine}") as client,
        client.put(PRODUCER) as session,
    ):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)  # all begin together
        serving = Engine(client, session)

        async def lane() -> None:
            for number in mine:
                await serving.serve(number)

        await asyncio.gather(*(lane() for _ in range(LANES)))
        return {"encodes": serving.encodes, "wrong": serving.wrong, "failed": serving.failed}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1], *map(int, sys.argv[2:])))), flush=True)
