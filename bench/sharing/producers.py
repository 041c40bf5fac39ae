"""Producers that are killed at random moments: one process forks them, so that a thousand cost no thousand starts.

python -m bench.sharing.producers ENDPOINT COUNT AT_A_TIME SEED    prints how many it killed
"""

import asyncio
import os
import random
import signal
import sys
import time

from bench.sharing.towers import PRODUCER, image_of, request_of, rows_of
from prefill_client import EncoderClient, PutAnswer, PutSession

# Images that producers have before them at a time, and how many of them come anew with each that is killed.
IMAGES_AHEAD = 8
NEW_EACH = 0.25
# When a producer is killed: from before it is connected until it has put several images.
LEAST_S, MOST_S = 0.02, 0.6


def newest(killed: int) -> int:
    """Return the number of the newest image once so many producers were killed."""
    return int(killed * NEW_EACH) + IMAGES_AHEAD


async def produce(endpoint: str, killed: int, seed: int) -> None:
    """Name images, compute, put, wait; until this process is killed."""
    draw = random.Random(seed)
    transports = draw.choice([["shm"], ["inline"]])
    async with (
        await EncoderClient.connect(endpoint, client_id=f"producer {seed % 16}") as client,
        client.put(PRODUCER, transports=transports) as session,
    ):
        width = client.description.width
        while True:
            number = newest(killed) - draw.randrange(IMAGES_AHEAD)
            (answer,) = await session.name([image_of(number)])
            await _go_on(client, session, answer, number, width, draw)


async def _go_on(
    client: EncoderClient,
    session: PutSession,
    answer: PutAnswer,
    number: int,
    width: int,
    draw: random.Random,
) -> None:
    if answer.state == "yours":
        await asyncio.sleep(draw.uniform(0, 0.05))
        await session.put(answer, rows_of(number, width))
    else:
        async with client.fetch([request_of(number)], producer=PRODUCER, grace_ms=100) as stream:
            await anext(aiter(stream))


def run(endpoint: str, count: int, at_a_time: int, seed: int) -> int:
    """Fork `count` producers, some at a time, and kill each; return how many were killed while they ran."""
    draw = random.Random(seed)
    alive: dict[int, float] = {}
    begun = killed = 0
    while begun < count or alive:
        while begun < count and len(alive) < at_a_time:
            child = os.fork()
            if not child:
                try:
                    asyncio.run(produce(endpoint, begun, seed + begun))
                finally:
                    os._exit(1)
            alive[child] = time.monotonic() + draw.uniform(LEAST_S, MOST_S)
            begun += 1
        now = time.monotonic()
        for child in [child for child, until in alive.items() if until <= now]:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            killed += os.WIFSIGNALED(status)
            del alive[child]
            print("killed", killed, flush=True)
        time.sleep(0.002)
    return killed


if __name__ == "__main__":
    print("done", run(sys.argv[1], *map(int, sys.argv[2:])), flush=True)
