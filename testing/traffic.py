"""Traffic: clients that submit and fetch prompts of images until they are stopped, and the outcome of every image."""

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Self

import numpy as np
from numpy.typing import NDArray

from prefill_client import EncoderClient, FetchedRows, RowRequest
from testing.photos import photo, with_comment

BASES = 6  # distinct photos; every image is one of them with another digest
TOLERANCE = 1e-3  # between float32 rows of one image from different batches


@dataclass(frozen=True, slots=True)
class Served:
    """The outcome of one image of one prompt, and the seconds from its Submit to its rows or its error."""

    digest: bytes
    began_s: float
    seconds: float
    source: str
    error: str


@dataclass
class Supply:
    """An endless supply of images: a share of each prompt was sent before, the rest is new. Seeded."""

    width: int = 300
    height: int = 280
    shared: float = 0.5
    seed: int = 0
    hot: int = 64
    """How many of the latest images the shared ones are drawn from."""
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._numbers = itertools.count(self.seed << 32)
        self.bases = [photo(self.width, self.height, self.seed * BASES + n) for n in range(BASES)]

    def prompt(self, images: int) -> list[int]:
        """Return the numbers of the images of a prompt, all different."""
        again = self.sent[-self.hot :]
        shared = self._random.sample(again, min(int(images * self.shared), len(again)))
        new = list(itertools.islice(self._numbers, images - len(shared)))
        self.sent += new
        prompt = shared + new
        self._random.shuffle(prompt)
        return prompt

    def file(self, number: int) -> bytes:
        """Return the file of an image."""
        return with_comment(self.bases[number % BASES], number)


class Traffic:
    """Prompts from `workers` tasks, which share `clients` clients and submit and fetch one prompt at a time.

    Traffic flows for the length of an `async with` block. Every image must end in its rows or one error: the end of
    the block raises for anything else (a missing outcome, rows of another image, a call that outlasts its deadline).
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        supply: Supply,
        *,
        workers: int = 4,
        clients: int = 2,
        images: int = 4,
        timeout_s: float = 60.0,
        pause_s: float = 0.0,
    ) -> None:
        self._endpoints = endpoints
        self._supply = supply
        self._workers = workers
        self._clients = clients
        self._images = images
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._stopping = False
        self._stack = AsyncExitStack()
        self._expected: dict[int, NDArray[np.float32]] = {}  # base -> its rows
        self.served: list[Served] = []
        self.prompts = 0

    async def __aenter__(self) -> Self:
        clients = [
            await self._stack.enter_async_context(await EncoderClient.connect(self._endpoints, timeout_s=30))
            for _ in range(self._clients)
        ]
        self._tasks = [
            asyncio.create_task(self._work(client))
            for client, _ in zip(itertools.cycle(clients), range(self._workers), strict=False)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        try:
            # A prompt under way has two deadlines: its Submit's and its Fetch's.
            async with asyncio.timeout(2 * self._timeout_s + 10):
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._stack.aclose()

    async def more(self, prompts: int, within_s: float = 90.0) -> None:
        """Wait until `prompts` more prompts have ended."""
        target = self.prompts + prompts
        async with asyncio.timeout(within_s):
            while self.prompts < target:
                await asyncio.sleep(0.02)
                for task in self._tasks:
                    if task.done():
                        await task  # raises its error

    @property
    def errors(self) -> list[str]:
        """The errors of the images that failed."""
        return [served.error for served in self.served if served.error]

    @property
    def distinct(self) -> int:
        """The number of distinct images among those that ended."""
        return len({served.digest for served in self.served})

    def since(self, moment_s: float) -> Iterator[Served]:
        """Yield the outcomes that came after a moment of the monotonic clock."""
        return (served for served in self.served if served.began_s + served.seconds > moment_s)

    async def _work(self, client: EncoderClient) -> None:
        while not self._stopping:
            await self._serve(client, self._supply.prompt(self._images))
            self.prompts += 1
            await asyncio.sleep(self._pause_s)

    async def _serve(self, client: EncoderClient, numbers: list[int]) -> None:
        began = monotonic()

        def end(digest: bytes, source: str, error: Exception | None) -> None:
            text = "" if error is None else f"{type(error).__name__}: {error}"
            self.served.append(Served(digest, began, monotonic() - began, source, text))

        submitted = await client.submit(
            [self._supply.file(number) for number in numbers], timeout_s=self._timeout_s
        )
        good = []
        for number, image in zip(numbers, submitted, strict=True):
            if image.error is None:
                good.append((number, image.digest))
            else:
                end(image.digest, "", image.error)
        left = set(range(len(good)))
        requests = [RowRequest(digest) for _, digest in good]
        async with client.fetch(requests, timeout_s=self._timeout_s, transports=["tcp"]) as stream:
            async for outcome in stream:
                left.remove(outcome.index)
                number, digest = good[outcome.index]
                if outcome.error is None:
                    self._check(number, outcome)
                end(digest, outcome.source, outcome.error)
        assert not left, "images without an outcome"
        assert monotonic() - began < 2 * self._timeout_s + 1, "a call outlasted its deadline"

    def _check(self, number: int, outcome: FetchedRows) -> None:
        rows = outcome.array.astype(np.float32)
        expected = self._expected.setdefault(number % BASES, rows.copy())
        assert np.allclose(rows, expected, atol=TOLERANCE), "the rows of another image"
