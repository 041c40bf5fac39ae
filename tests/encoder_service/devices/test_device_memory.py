"""Device memory: the plan at start, and what happens when memory runs out anyway."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from encoder_contract.errors import OverloadedError
from encoder_contract.geometry import Grid
from encoder_service.config import GIB, Config, ConfigError
from encoder_service.devices import tower_credit, workers
from encoder_service.devices.memory_plan import CONTEXT_BYTES, MemoryUse
from encoder_service.devices.model import BATCHES_UNDER_WAY, NCCL_BYTES, Model, decode_threads, plan_memory
from encoder_service.devices.torch_device import Device
from encoder_service.image.device_decoder import Decoder
from encoder_service.scheduler import State
from encoder_service.store import Pin
from encoder_service.store.tensors import copy_tensors
from encoder_service.vision import Tower
from encoder_service.vision.tower import MAX_TABLE_PATCHES, activation_values
from testing.photos import photo
from tests.device_bench import Changed, Gate, demanded, running
from tests.servers import server_of
from tests.towers import load
from tests.waiting import PATIENCE_S, soon


class SmallDevice(Device):
    """The CPU, posing as a device with `free` bytes of memory; counts how often torch's cache is emptied."""

    def __init__(self, free_gib: float = 0.0) -> None:
        super().__init__("cpu")
        self.free_gib = free_gib
        self.emptied = 0

    def memory(self) -> MemoryUse:
        return MemoryUse(total=8 * GIB, free=int(self.free_gib * GIB), reserved=GIB, allocated=GIB // 2)

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.mark.cuda
async def test_a_batch_without_memory_is_halved_until_single_images_are_refused(model: Model) -> None:
    """Every batch of more than two images fails, and so does every batch with one certain image."""
    gate, device = Gate(model), SmallDevice()
    hungry = model.tower.geometry.grid(384, 256)
    sizes: list[int] = []

    def encode(patches: Sequence[Tensor], grids: Sequence[Grid], *_: object) -> list[Tensor]:
        rows = gate.encode(patches, grids)
        sizes.append(len(grids))
        if len(grids) > 2 or hungry in grids:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return rows

    images = [photo(256, 320, n) for n in range(7)] + [photo(384, 256, 9)]
    async with running(replace(model, device=device), encode) as bench:
        first = asyncio.create_task(bench.rows(photo(64, 64, 99), demanded("first")))
        await gate.reached(1)
        waiting = [asyncio.create_task(bench.rows(image, demanded())) for image in images]
        await soon(lambda: bench.jobs.scheduler.snapshot().images[State.PREPARED, True] == len(images))
        gate.open.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        (await first).release()
        assert max(sizes) > 2, "no batch was too large"
        assert all(isinstance(result, Pin) for result in results[:-1])
        assert isinstance(results[-1], OverloadedError)
        assert results[-1].retry_after_ms > 0
        assert device.emptied >= 2
        (await bench.rows(photo(256, 352, 50), demanded("later"))).release()


@pytest.mark.cuda
async def test_activations_of_a_failed_batch_are_freed_before_the_retry(model: Model) -> None:
    """An exception keeps the frames of its traceback alive, with all their local tensors."""
    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    class Watched(SmallDevice):
        def empty_cache(self) -> None:
            alive.append(held[-1]() is not None)

    def encode(*_: object) -> list[Tensor]:
        activations = torch.empty(16)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with running(replace(model, device=Watched()), encode) as bench:
        with pytest.raises(OverloadedError):
            await bench.rows(photo(64, 64, 1), demanded())
    assert alive
    assert not any(alive)


def test_the_cpu_has_no_memory_of_its_own_to_plan(config: Config, model: Model) -> None:
    plan = plan_memory(model, Device("cpu").memory(), replace(config, store_device_gib=1000.0))
    plan.check()
    assert plan.total == 0


@pytest.mark.cuda
async def test_a_too_large_device_store_is_refused_with_the_size_that_fits(
    config: Config, model: Model
) -> None:
    small = replace(model, device=SmallDevice(free_gib=6.0))
    with pytest.raises(ConfigError, match=r"--store-device-gib 6: .* at most ([\d.]+) GiB fit") as refused:
        plan_memory(small, small.device.memory(), replace(config, store_device_gib=6.0)).check()
    fits = float(str(refused.value).rpartition(" at most ")[2].split()[0])
    assert 0 < fits < 6
    plan_memory(small, small.device.memory(), replace(config, store_device_gib=fits)).check()
    with pytest.raises(ConfigError):
        plan_memory(small, small.device.memory(), replace(config, store_device_gib=fits + 0.02)).check()


@pytest.mark.cuda
def test_the_plan_counts_what_grows_after_the_start(config: Config, model: Model) -> None:
    memory = MemoryUse(total=80 * GIB, free=78 * GIB)
    plan = plan_memory(model, memory, config)
    dali = cast(Decoder, Changed(model.decoder, device_bytes=GIB))
    assert plan_memory(replace(model, decoder=dali), memory, config).left == plan.left - GIB
    assert plan.left == 78 * GIB - plan.forward - plan.under_way - plan.decode - plan.tables - plan.store
    in_group = plan_memory(model, memory, config, devices=2)
    assert in_group.left == plan.left - NCCL_BYTES
    with_tier = plan_memory(model, memory, replace(config, store_device_gib=1.0))
    assert with_tier.left == plan.left - GIB - CONTEXT_BYTES, "the server's process has memory on the device"


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.cuda
def test_tables_fit_their_plan(
    kind: str, kept_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_TABLE_PATCHES, "cpu", 2048)
    tower = load(kept_checkpoint(kind, depth=1), "bfloat16")
    for side in range(2, 82, 2):
        tower.prepare(Grid(1, side, 8))
    held = sum(tables.size_bytes for tables in cast(Any, tower._tables).cache.values())
    assert 0.8 * tower.table_bytes < held <= tower.table_bytes


@pytest.mark.cuda
async def test_no_more_batches_have_rows_than_planned(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch is not copied out: the device runs ahead until it has to wait."""
    stored, rows = threading.Event(), []

    def encode(*given: Any) -> list[Tensor]:
        made = model.tower.encode(*given[:2])
        rows.extend(weakref.ref(each) for each in made)
        return made

    async with running(model, encode, batch_patches=64) as bench:
        # Once the rate is known, several batches are sent ahead, here as many as the server ever sends.
        monkeypatch.setattr(tower_credit, "CREDIT_S", 1e9)
        monkeypatch.setattr(tower_credit, "LONG_S", 1e9)
        (await bench.rows(photo(128, 128, 99), demanded())).release()
        rows.clear()

        def copy_later(*given: Any) -> None:
            assert stored.wait(PATIENCE_S)
            copy_tensors(*given)

        monkeypatch.setattr(workers, "copy_tensors", copy_later)
        waiting = [asyncio.create_task(bench.rows(photo(128, 128, n), demanded())) for n in range(6)]
        await soon(lambda: len(rows) == BATCHES_UNDER_WAY)
        await asyncio.sleep(0.2)  # for one more, if there were room
        assert sum(each() is not None for each in rows) == BATCHES_UNDER_WAY
        stored.set()
        for pin in await asyncio.gather(*waiting):
            pin.release()


@pytest.mark.cuda
async def test_a_too_small_device_is_warned_about(
    config: Config, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    for free, warned in ((6.0, False), (0.1, True)):
        caplog.clear()
        small = replace(model, device=SmallDevice(free_gib=free))
        plan_memory(small, small.device.memory(), config).check()
        assert ("memory may run out" in caplog.text) == warned


@pytest.mark.cuda
async def test_the_plan_is_printed_at_start_and_the_state_is_in_the_metrics(
    config: Config, model: Model
) -> None:
    async with server_of(config, replace(model, device=SmallDevice(free_gib=5.0))) as server:
        assert "device memory  of 8.0 GiB: 3.00 loaded" in server.banner()
        await soon(lambda: all(link.device.state is not None for link in server.dispatcher.links))
        (memory,) = (reading for reading in server.readings() if "memory" in reading.name)
        found = {sample.labels["state"]: sample.value for sample in memory.samples}
        assert found["free"] == 5 * GIB
        assert found["allocated"] == GIB // 2


@pytest.mark.cuda
def test_the_plan_matches_the_estimate_for_the_largest_forward(model: Model) -> None:
    """An image of 65 536 patches through Qwen3-VL's tower in bfloat16: about 2 GB."""
    real = replace(
        cast(Tower, model.tower).spec,
        embed=1152,
        intermediate=4304,
        heads=16,
        hidden=4096,
        deepstack=(8, 16, 24),
        merge_size=2,
    )
    assert 1.8e9 < 65536 * activation_values(real) * 2 < 3e9


@pytest.mark.cuda
def test_decode_threads_follow_the_setting_or_the_device(config: Config) -> None:
    assert decode_threads(config, Device("cpu")) == 2
    assert decode_threads(config, Device("cuda:1")) == 8
    assert decode_threads(replace(config, decode_threads=3), Device("cuda:1")) == 3
    with pytest.raises(ConfigError, match="--decode-threads"):
        replace(config, decode_threads=-1)


@pytest.mark.gpu
def test_the_state_of_gpu_memory_is_reported() -> None:
    device = Device("cuda")
    before = device.memory()
    kept = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    after = device.memory()
    assert after.allocated - before.allocated >= 1 << 28
    assert after.free < after.total
    del kept
    device.empty_cache()
    assert device.memory().reserved <= after.reserved - (1 << 28)
