"""An open load: images offered at random moments, whether or not the server keeps up."""

import asyncio
import random
import time
from collections import Counter

from encoder_contract.errors import EncoderError, OverloadedError
from prefill_client import EncoderClient, RowRequest

# A refusal whose hint lies beyond this is an outcome: the client would otherwise wait and ask again.
REFUSED_S = 2.0


class Offered:
    """What became of the images of an open load."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.refused = 0
        self.others: Counter[str] = Counter()

    def note(self, error: EncoderError | None, seconds: float = 0.0) -> None:
        """Count an image: its rows came after `seconds`, or it failed."""
        if error is None:
            self.seconds.append(seconds)
        elif isinstance(error, OverloadedError):
            self.refused += 1
        else:
            self.others[str(error)[-60:]] += 1


async def offer(endpoint: str, images_per_s: float, seconds: float, base: bytes) -> Offered:
    """Offer variations of a JPEG at random moments, each once and without the client's patience."""
    outcome = Offered()
    spread = random.Random(0)
    count = int(images_per_s * seconds)
    # Files that differ in their last bytes only: making a photo takes longer than refusing it.
    files = [base[:-2] + n.to_bytes(4, "big") + base[-2:] for n in range(count)]
    async with await EncoderClient.connect(endpoint) as client:

        async def one(file: bytes) -> None:
            (submitted,) = await client.submit([file], timeout_s=REFUSED_S)
            began = time.perf_counter()
            if submitted.error is not None:
                outcome.note(submitted.error)
                return
            async with client.fetch([RowRequest(submitted.digest)], timeout_s=60) as stream:
                async for rows in stream:
                    outcome.note(rows.error, time.perf_counter() - began)

        tasks = []
        for file in files:
            tasks.append(asyncio.create_task(one(file)))
            await asyncio.sleep(spread.expovariate(images_per_s))
        await asyncio.gather(*tasks)
    return outcome
