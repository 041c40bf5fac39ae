"""Which images a gate holds for a request, without an engine: images are held again after a preemption."""

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
from prefill_client.vllm.gate import PrefillGate
from prefill_client.vllm.host_memory import HostMemory
from prefill_client.vllm.image_name import ImageName, NameSigner, RequestInfo, producer_of
from prefill_client.vllm.row_fetcher import RowFetcher
from prefill_client.vllm.row_table import RowTable
from prefill_client.vllm.vllm_settings import VllmSettings
from testing.photos import photo
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

ROWS = 64  # of the smallest image, which all of these are
WINDOW = 2 * ROWS
# One step touches three images at most, and as many again are fetched ahead: host memory has room for no more.
ROOM_ROWS = 6 * ROWS
# Divides neither an image nor a window: steps begin and end anywhere.
STEP = ROWS + 7
# I: an image, t: ten tokens of text, T: more text than two steps prefill.
LAYOUTS = ("IIIIIIIIII", "tIITIIIIIIII", "tIItITIIIIT", "ITITITI")
TEXT = {"t": 10, "T": 6 * ROWS}


@dataclass
class FakePosition:
    """A replacement for vLLM's `PlaceholderRange`."""

    offset: int
    length: int = ROWS

    def get_num_embeds(self) -> int:
        return self.length


@dataclass
class FakeFeature:
    """A replacement for vLLM's `MultiModalFeatureSpec`."""

    identifier: str
    data: Any
    mm_position: FakePosition
    modality: str = "image"


@dataclass
class FakeRequest:
    """A replacement for vLLM's `Request`."""

    request_id: str
    num_prompt_tokens: int = 0
    mm_features: list[FakeFeature] = field(default_factory=list)
    ec_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None


class Prefill:
    """Uses a gate as a scheduler does, with a real table, memory, thread and server."""

    def __init__(self, fetcher: RowFetcher, memory: HostMemory, row_bytes: int) -> None:
        self._fetcher, self._memory = fetcher, memory
        self.counts = Counts()
        self.signer = NameSigner(bytes(32))
        self.table = RowTable(memory, fetcher, row_bytes, self.counts)
        self.gate = PrefillGate(
            self.table,
            self.signer,
            self.counts,
            description=lambda: fetcher.description,
            may_fetch=lambda: fetcher.is_joined,
            tenant_salt="",
            window_tokens=WINDOW,
            capacity_rows=ROOM_ROWS,
            gating="window",
            tower=TowerInput(fetcher.description.geometry.merge_size),
        )

    def request(self, request_id: str, layout: str, images: Sequence[Submitted]) -> tuple[FakeRequest, int]:
        """Return a request of this layout, and its number of tokens."""
        request, tokens, left, names = FakeRequest(request_id), 0, iter(images), []
        producer = producer_of(self._fetcher.description, "")
        for part in layout:
            if part == "I":
                image = next(left)
                assert image.grid
                name = ImageName(image.digest, image.grid, producer)
                names.append(name.hex())
                grid = SimpleNamespace(data=torch.tensor(image.grid))
                request.mm_features.append(
                    FakeFeature(self.signer.identifier(name), {"image_grid_thw": grid}, FakePosition(tokens))
                )
            tokens += TEXT.get(part, ROWS)
        request.ec_transfer_params = {RequestInfo.KEY: {"images": names}}
        request.num_prompt_tokens = tokens
        return request, tokens

    async def run(self, request: FakeRequest, begin: int, end: int) -> None:
        """Prefill from token `begin` to `end`, each step as soon as the gate lets it."""
        for computed in range(begin, end, STEP):
            while not self.gate.may_prefill(request, computed):
                self.table.fetch()  # as each step does
                assert self.table.has_running, f"parked at token {computed}, and no query runs"
                await asyncio.to_thread(self._fetcher.wait, PATIENCE_S)
                assert not self.gate.failed()
            for index, image in enumerate(request.mm_features):
                if image.mm_position.offset + ROWS <= min(computed + STEP, end):
                    self.gate.prefilled(request.request_id, index)

    async def end(self, request: FakeRequest) -> None:
        """End the request, and check that it holds nothing once its queries have ended."""
        self.gate.finished(request.request_id)
        assert not self.gate.failed()
        while self.table.has_running:
            await asyncio.to_thread(self._fetcher.wait, PATIENCE_S)
            assert not self.gate.failed()
        assert len(self.table) == 0
        assert self._memory.free_bytes == self._memory.size_bytes
        assert self.gate._room.held == 0


@pytest.fixture
async def images(client: EncoderClient) -> list[Submitted]:
    """Ten images with the same number of rows."""
    submitted = await client.submit([photo(64, 64, seed) for seed in range(10)])
    assert {image.tokens for image in submitted} == {ROWS}
    return submitted


@pytest.fixture
async def prefill(server: Server, client: EncoderClient) -> AsyncIterator[Prefill]:
    """A gate with just enough host memory for one request."""
    width, dtype = client.description.width, client.description.dtype
    row_bytes = width * element_type(dtype).itemsize
    memory = HostMemory(ROOM_ROWS * row_bytes)
    settings = VllmSettings((server.endpoint,), grace_s=PATIENCE_S)
    fetcher = await asyncio.to_thread(RowFetcher, settings, memory, width=width, dtype=dtype)
    yield Prefill(fetcher, memory, row_bytes)
    await asyncio.to_thread(fetcher.close)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_each_image_is_fetched_once_without_preemption(
    prefill: Prefill, images: list[Submitted], layout: str
) -> None:
    request, tokens = prefill.request("a", layout, images)
    await prefill.run(request, 0, tokens)
    await prefill.end(request)
    assert sum(prefill.counts.take()[IMAGES].values()) == layout.count("I")


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_request_continues_after_any_preemption_and_cached_prefix(
    prefill: Prefill, images: list[Submitted], layout: str
) -> None:
    _, tokens = prefill.request("", layout, images)
    for preempted_at in range(STEP, tokens, STEP):
        for cached in {0, preempted_at // 3, preempted_at // 2}:
            request, _ = prefill.request(f"{preempted_at} {cached}", layout, images)
            await prefill.run(request, 0, preempted_at)
            prefill.gate.may_prefill(request, preempted_at)  # holds what lies ahead
            await prefill.run(request, cached, tokens)
            await prefill.end(request)


async def test_later_images_release_their_memory_to_earlier_ones(
    prefill: Prefill, images: list[Submitted]
) -> None:
    """The server never gets the later images, so only their release frees their memory."""
    known, unknown = images[:2], [Submitted(bytes([n]) * 32, images[0].grid, ROWS) for n in range(8)]
    request, _ = prefill.request("a", "tIITIIIIIIII", [*known, *unknown])
    behind = 10 + 2 * ROWS
    await prefill.run(request, 0, behind)
    assert prefill.gate.may_prefill(request, behind)
    assert len(prefill.table) == ROOM_ROWS // ROWS, "all memory is reserved for later images"
    await prefill.run(request, 0, behind)
    await prefill.end(request)
