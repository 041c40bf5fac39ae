"""Which images a gate holds for a request, without an engine: what a preemption needs again comes again."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from encoder_service.app import Server
from prefill_client import EncoderClient, Submitted
from prefill_client.transport.rows import element_type
from prefill_client.vllm.counts import IMAGES, Counts
from prefill_client.vllm.features import TowerInput
from prefill_client.vllm.gate import NamedGate
from prefill_client.vllm.host_memory import HostMemory
from prefill_client.vllm.image_name import ImageName, NameSigner, producer_of
from prefill_client.vllm.row_fetcher import RowFetcher
from prefill_client.vllm.row_table import FetchTable
from prefill_client.vllm.settings import Settings
from testing.photos import photo
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

ROWS = 64  # of the smallest image, which all of these are
WINDOW = 2 * ROWS
# One step touches three images at most, and as many again are fetched ahead: host memory has room for no more.
ROOM_ROWS = 6 * ROWS
# Not a part of an image, nor of a window: steps begin and end anywhere.
STEP = ROWS + 7
# I: an image, t: ten tokens of text, T: more text than two steps prefill.
LAYOUTS = ("IIIIIIIIII", "tIITIIIIIIII", "tIItITIIIIT", "ITITITI")
TEXT = {"t": 10, "T": 6 * ROWS}


@dataclass
class Place:
    """Where an image lies, as vLLM says it."""

    offset: int
    length: int = ROWS

    def get_num_embeds(self) -> int:
        return self.length


@dataclass
class Named:
    """An image of a request, as vLLM says it."""

    identifier: str
    data: Any
    mm_position: Place
    modality: str = "image"


@dataclass
class Asking:
    """A request, as vLLM says it."""

    request_id: str
    mm_features: list[Named] = field(default_factory=list)
    ec_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None


class Prefill:
    """A gate, and what a scheduler does with it; the table, the memory, the thread and the server are real."""

    def __init__(self, fetcher: RowFetcher, memory: HostMemory, row_bytes: int) -> None:
        self._fetcher, self._memory = fetcher, memory
        self.counts = Counts()
        self.signer = NameSigner("an engine")
        self.table = FetchTable(memory, fetcher, row_bytes, self.counts)
        self.gate = NamedGate(
            self.table,
            self.signer,
            self.counts,
            description=lambda: fetcher.description,
            tenant_salt="",
            window_tokens=WINDOW,
            capacity_rows=ROOM_ROWS,
            gating="window",
            tower=TowerInput(fetcher.description.geometry.merge_size),
        )

    def request(self, request_id: str, layout: str, images: Sequence[Submitted]) -> tuple[Asking, int]:
        """Return a request of this layout, and how many tokens it has."""
        asking, tokens, left = Asking(request_id), 0, iter(images)
        producer = producer_of(self._fetcher.description, "")
        for part in layout:
            if part == "I":
                image = next(left)
                assert image.grid
                name = self.signer.identifier(ImageName(image.digest, image.grid, producer))
                grid = SimpleNamespace(data=torch.tensor(image.grid))
                asking.mm_features.append(Named(name, {"image_grid_thw": grid}, Place(tokens)))
            tokens += TEXT.get(part, ROWS)
        return asking, tokens

    async def run(self, asking: Asking, begin: int, end: int) -> None:
        """Prefill from token `begin` to `end`, each step as soon as the gate lets it."""
        for computed in range(begin, end, STEP):
            while not self.gate.may_prefill(asking, computed):
                assert not self.gate.failed()
                assert self.table.has_running, f"parked at token {computed}, and nothing is on its way"
                await asyncio.to_thread(self._fetcher.wait, PATIENCE_S)
            for index, image in enumerate(asking.mm_features):
                if image.mm_position.offset + ROWS <= min(computed + STEP, end):
                    self.gate.prefilled(asking.request_id, index)

    async def end(self, asking: Asking) -> None:
        """End the request; whatever it held is free once what was under way has an outcome."""
        self.gate.finished(asking.request_id)
        assert not self.gate.failed()
        while self.table.has_running:
            await asyncio.to_thread(self._fetcher.wait, PATIENCE_S)
            assert not self.gate.failed()
        assert len(self.table) == 0
        assert self._memory.free_bytes == self._memory.size_bytes
        assert self.gate._free_rows == ROOM_ROWS


@pytest.fixture
async def images(client: EncoderClient) -> list[Submitted]:
    """Ten images of as many rows."""
    submitted = await client.submit([photo(64, 64, seed) for seed in range(10)])
    assert {image.tokens for image in submitted} == {ROWS}
    return submitted


@pytest.fixture
async def prefill(server: Server, client: EncoderClient) -> AsyncIterator[Prefill]:
    """A gate whose host memory is full with what a request may hold."""
    width, dtype = client.description.width, client.description.dtype
    row_bytes = width * element_type(dtype).itemsize
    memory = HostMemory(ROOM_ROWS * row_bytes)
    settings = Settings((server.endpoint,), grace_s=PATIENCE_S)
    fetcher = await asyncio.to_thread(RowFetcher, settings, memory, width=width, dtype=dtype)
    yield Prefill(fetcher, memory, row_bytes)
    await asyncio.to_thread(fetcher.close)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_each_image_is_fetched_once_without_preemption(
    prefill: Prefill, images: list[Submitted], layout: str
) -> None:
    asking, tokens = prefill.request("a", layout, images)
    await prefill.run(asking, 0, tokens)
    await prefill.end(asking)
    assert sum(prefill.counts.take()[IMAGES].values()) == layout.count("I")


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_request_continues_after_any_preemption_and_cached_prefix(
    prefill: Prefill, images: list[Submitted], layout: str
) -> None:
    _, tokens = prefill.request("", layout, images)
    for preempted_at in range(STEP, tokens, STEP):
        for cached in {0, preempted_at // 3, preempted_at // 2}:
            asking, _ = prefill.request(f"{preempted_at} {cached}", layout, images)
            await prefill.run(asking, 0, preempted_at)
            prefill.gate.may_prefill(asking, preempted_at)  # holds what lies ahead
            await prefill.run(asking, cached, tokens)
            await prefill.end(asking)


async def test_later_images_release_their_memory_to_earlier_ones(
    prefill: Prefill, images: list[Submitted]
) -> None:
    """The server never has the images behind: only letting go of them frees their memory."""
    known, unknown = images[:2], [Submitted(bytes([n]) * 32, images[0].grid, ROWS) for n in range(8)]
    asking, _ = prefill.request("a", "tIITIIIIIIII", [*known, *unknown])
    behind = 10 + 2 * ROWS
    await prefill.run(asking, 0, behind)
    assert prefill.gate.may_prefill(asking, behind)
    assert len(prefill.table) == ROOM_ROWS // ROWS, "all the memory is set apart for images behind"
    await prefill.run(asking, 0, behind)
    await prefill.end(asking)
