"""What the server pushes to its devices, and when: credit, overtaking, groups, space in the store, lost devices."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from encoder_contract.errors import InternalError, OverloadedError
from encoder_contract.geometry import Grid
from encoder_service.config import Config
from encoder_service.devices import device_link as linking
from encoder_service.devices import dispatcher, messages, tower_credit
from encoder_service.devices.job_queue import Job
from encoder_service.devices.memory_plan import MemoryUse
from encoder_service.devices.model import Model, facts_of
from encoder_service.devices.torch_device import Device
from encoder_service.scheduler import Claim
from encoder_service.store import Pin, Store
from encoder_service.store.tier import Entry
from tests.device_bench import demanded
from tests.scripted_device import FILE, GRID, Floor, floor
from tests.virtual_time import VirtualTimeLoop
from tests.waiting import PATIENCE_S, soon

LARGE = Grid(1, 64, 64)  # 4096 patches
WINDOW_PIXELS = 10_000


def nothing_sent(at: Floor, device: int = 0) -> Callable[[], bool]:
    return at.devices[device].sent.empty


async def a_batch(
    at: Floor, name: bytes, grid: Grid = GRID, device: int = 0, claim: Claim | None = None
) -> tuple[Job, messages.Encode]:
    """Queue an image that a waiting caller wants; return its job, and its batch once the device has it."""
    job = at.submit(name, claim or demanded(name.decode()), grid=grid)
    await at.prepare(job, device)
    return job, await at.devices[device].next(messages.Encode)


async def held_back(at: Floor, name: bytes, grid: Grid = GRID, claim: Claim | None = None) -> Job:
    """Queue an image; return its job once it is decoded, while the device gets nothing."""
    job = at.submit(name, claim or demanded(name.decode()), grid=grid)
    await at.prepare(job)
    await at.waits(job)
    assert nothing_sent(at)()
    return job


async def measured(at: Floor, seconds: float, grid: Grid = GRID) -> None:
    """Let the server measure that an image of this grid takes so long."""
    job, batch = await a_batch(at, b"measured", grid)
    at.devices[0].encoded(batch, seconds)
    await soon(lambda: job not in at.jobs._jobs.values())


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Have the server's end of the devices read the time from `clock`."""
    for module in (linking, tower_credit):
        monkeypatch.setattr(module, "monotonic", clock)


# Credit


async def test_a_device_gets_one_batch_while_the_rate_is_unknown_and_then_a_few_milliseconds_of_work(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, lambda: 100.0)  # however busy the machine is
    async with floor(model, batch_patches=GRID.patches) as at:
        [device], [link] = at.devices, at.links
        await measured(at, 0.010)
        for n in range(6):
            at.submit(bytes([n]), demanded(str(n)))
        batches: list[messages.Encode] = []
        while len(batches) < 3:  # of 10 ms each
            _, message = await asyncio.to_thread(device.sent.get, timeout=PATIENCE_S)
            if isinstance(message, messages.Decode):
                device.prepared(*(image.number for image in message.images))
            else:
                batches.append(message)
        assert len(link.tower.batches) == 3
        for batch in batches:
            device.encoded(batch, 1000.0)  # now a batch takes long
        await soon(lambda: len(at.ended) == 4)
        assert all(isinstance(outcome, bytes) for _, outcome in at.ended)


@pytest.mark.attack("an image with more pixels than the server decodes at a time, beside other images")
async def test_a_large_single_decode_does_not_block_small_ones(model: Model) -> None:
    async with floor(model, decode_pixels=WINDOW_PIXELS, decode_threads=8) as at:
        [device] = at.devices
        size = {b"large": 1000, b"large too": 1000, b"small": 100, b"small too": 60}
        named = {
            at.submit(name, Claim(str(number), "a", demanded=True), width=width): name
            for number, (name, width) in enumerate(size.items())
        }

        async def decoded_next() -> Job:
            sent = await device.next(messages.Decode)
            assert sent.single
            [job] = [job for job in named if job.number == sent.images[0].number]
            return job

        large, small = await decoded_next(), await decoded_next()
        assert [named[large], named[small]] == [b"large", b"small"], "the other large image waits"
        device.prepared(large.number)
        await device.next(messages.Encode)
        assert named[await decoded_next()] == b"large too"
        device.prepared(small.number)
        assert named[await decoded_next()] == b"small too", "it did not fit beside the first small one"


async def test_a_withdrawn_single_decode_holds_its_pixels_until_it_is_reported(model: Model) -> None:
    async with floor(model, decode_pixels=WINDOW_PIXELS, decode_threads=8) as at:
        [device], claim = at.devices, demanded("1")
        small = at.submit(b"small", claim, width=100)
        await device.next(messages.Decode)
        at.jobs.withdraw(claim)
        again = at.submit(b"small", demanded("2"), width=100)
        assert (await device.next(messages.Gone)).images == [small.number]
        await asyncio.sleep(0.05)
        assert nothing_sent(at)(), "the pixels of both exceed the window"
        device.prepared(small.number)
        [sent] = (await device.next(messages.Decode)).images
        assert sent.number == again.number
        assert not at.links[0]._prepared, "the patches of the first were freed by the device"


async def test_single_decodes_of_a_device_that_ended_hold_no_pixels(model: Model) -> None:
    async with floor(model, decode_pixels=WINDOW_PIXELS, decode_threads=8) as at:
        [device] = at.devices
        jobs = [at.submit(b"small", demanded(), width=100), at.submit(b"large", demanded(), width=1000)]
        begun = {(await device.next(messages.Decode)).images[0].number for _ in jobs}
        device.kill()
        for _ in jobs:
            [again] = (await device.next(messages.Decode)).images
            assert again.number in {job.number for job in jobs}
            assert again.number not in begun, "numbers are not used again"
            device.tell(messages.Dropped(again.number, InternalError("it fails"), 0.0, 0.1))
        await soon(lambda: len(at.ended) == 2)


async def test_an_image_that_the_batch_decoder_refuses_is_decoded_by_itself(model: Model) -> None:
    async with floor(model) as at:
        [device] = at.devices
        jobs = [at.submit(bytes([n]), demanded(), batch=True) for n in range(2)]
        sent = await device.next(messages.Decode)
        assert not sent.single
        assert [image.number for image in sent.images] == [job.number for job in jobs]
        device.tell(messages.Retry([jobs[0].number], 0.1))
        again = await device.next(messages.Decode)
        assert again.single
        assert again.images[0].number == jobs[0].number


async def test_an_idle_device_first_gets_half_up_to_two_megapixels_or_a_large_image(model: Model) -> None:
    async with floor(model) as at:
        [device] = at.devices
        jobs = [at.submit(bytes([n]), demanded(str(n)), width=256, batch=True) for n in range(40)]  # 256 x 64
        first = await device.next(messages.Decode)
        assert len(first.images) == 20, "half of what waits: together below two megapixels"
        second = await device.next(messages.Decode)
        assert len(first.images) + len(second.images) == len(jobs)
    async with floor(model) as at:
        [device] = at.devices
        for n in range(3):
            at.submit(bytes([n]), demanded(str(n)), width=40_000, batch=True)  # 2.56 megapixels each
        assert len((await device.next(messages.Decode)).images) == 1
        assert len((await device.next(messages.Decode)).images) == 2


async def test_images_are_shared_out_to_the_device_with_least_work(model: Model) -> None:
    async with floor(model, devices=2, decode_threads=8) as at:
        jobs = [at.submit(bytes([n]), demanded(str(n))) for n in range(4)]
        for _ in range(2):
            for device in at.devices:
                await device.next(messages.Decode)
        assert sorted(job.device for job in jobs) == [0, 0, 1, 1]


async def test_a_device_that_reads_nothing_blocks_neither_the_loop_nor_memory(model: Model) -> None:
    data = FILE + bytes(4 << 20)
    async with floor(model, decode_threads=1000) as at:
        link = at.links[0]
        at.devices[0]._stopped.set()
        for n in range(50):
            job = at.submit(bytes([n]), demanded(str(n)))
            job.source = replace(job.source, data=data)

        def is_behind() -> bool:
            at.jobs.poke()  # the device may have been reading one more message
            return link._transport.get_write_buffer_size() > 0

        await soon(is_behind)
        for _ in range(100):
            at.jobs.poke()
            await asyncio.sleep(0)
        held = link._transport.get_write_buffer_size()
        assert held < linking.UNSENT_BYTES + 2 * len(data)


# Withdrawals


async def test_a_device_forgets_the_patches_of_withdrawn_images(model: Model) -> None:
    async with floor(model) as at:
        [device] = at.devices
        _, batch = await a_batch(at, b"a")
        claim = Claim("b", "b")
        waiting = await held_back(at, b"b", claim=claim)
        at.jobs.withdraw(claim)
        assert (await device.next(messages.Gone)).images == [waiting.number]
        device.encoded(batch)
        await soon(lambda: not at.links[0]._jobs)
        assert at.links[0].patches == 0


# Overtaking


async def test_a_demanded_image_overtakes_all_batches_that_it_is_smaller_than(model: Model) -> None:
    async with floor(model) as at:
        [device] = at.devices
        await measured(at, 0.001)
        large, first = await a_batch(at, b"large", LARGE)
        assert not first.urgent
        small, urgent = await a_batch(at, b"small", Grid(1, 16, 16))
        assert urgent.urgent
        guess = await held_back(at, b"guess", claim=Claim("guess", "test"))
        device.encoded(urgent)
        await soon(lambda: [job for job, _ in at.ended][-1] is small)
        assert nothing_sent(at)(), "a speculative image overtakes nothing"
        device.encoded(first)
        assert (await device.next(messages.Encode)).images == [guess.number]
        assert [job for job, _ in at.ended][-1] is large


async def test_overtakers_are_together_less_work_than_the_batch(model: Model) -> None:
    quarter = Grid(1, 32, 32)  # 1024 patches: half of it at a time, and then of what is left
    async with floor(model) as at:
        [device] = at.devices

        def of_one(name: bytes) -> Claim:
            return Claim(name.decode(), "one holder", demanded=True)

        _, first = await a_batch(at, b"large", LARGE, claim=of_one(b"large"))
        for name in (b"1", b"2", b"3"):
            grid = quarter if name != b"3" else Grid(1, 16, 32)
            _, batch = await a_batch(at, name, grid, claim=of_one(name))
            assert batch.urgent
        fourth = await held_back(at, b"4", quarter, of_one(b"4"))  # half of the room left is too small
        device.encoded(first)
        assert (await device.next(messages.Encode)).images == [fourth.number]


async def test_a_later_image_of_a_request_does_not_overtake_that_of_its_first_chunk(model: Model) -> None:
    async with floor(model) as at:
        [device] = at.devices

        def of(request: str, chunk: int) -> Claim:
            return Claim(request, "one holder", chunk=chunk, demanded=True)

        _, first = await a_batch(at, b"large", LARGE, claim=of("r", 1))
        _, earlier = await a_batch(at, b"earlier", claim=of("r", 0))
        assert earlier.urgent
        later = await held_back(at, b"later", claim=of("r", 2))
        _, other = await a_batch(at, b"other", claim=of("s", 2))
        assert other.urgent, "an image of another request"
        device.encoded(first)
        assert (await device.next(messages.Encode)).images == [later.number]


async def test_other_holders_and_a_large_batch_take_turns_of_equal_time(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image of another holder waits as long as that holder's last one took, not for the rest of the batch."""
    now = [100.0]
    set_clock(monkeypatch, lambda: now[0])
    eighth = Grid(1, 16, 32)  # 512 patches
    async with floor(model) as at:
        [device] = at.devices
        large, small, other = (
            lambda holder=holder: Claim(holder, holder, demanded=True)
            for holder in ("large", "small", "other")
        )
        await measured(at, 0.5, eighth)
        _, first = await a_batch(at, b"large", LARGE, claim=large())
        for number in range(7):
            for name, claim in ((b"small", small()), (b"other", other())):
                job = at.submit(b"%b %d" % (name, number), claim, grid=eighth)
                await at.prepare(job)
                if number and name == b"small":
                    await at.waits(job)
                    assert nothing_sent(at)(), "the batch has had less"
                    now[0] += 0.5
                    at.jobs.poke()
                batch = await device.next(messages.Encode)
                assert batch.urgent
                now[0] += 0.5
                device.encoded(batch, 0.5)
                await soon(lambda job=job: job in [ended for ended, _ in at.ended])
        device.encoded(first)
        await soon(lambda: len(at.ended) == 16)


@pytest.mark.parametrize("predicted_s", [0.09, 0.5])
async def test_nothing_is_sent_behind_a_long_batch_that_can_be_overtaken(
    model: Model, monkeypatch: pytest.MonkeyPatch, predicted_s: float
) -> None:
    """A small image that had been sent behind it would wait for all of it, however wrong the predicted time is."""
    now = [100.0]
    set_clock(monkeypatch, lambda: now[0])
    async with floor(model, batch_patches=LARGE.patches) as at:
        [device] = at.devices
        await measured(at, predicted_s, LARGE)
        _, first = await a_batch(at, b"large", LARGE)
        now[0] += max(predicted_s, tower_credit.LONG_S) + tower_credit.CREDIT_S  # it should have ended
        job = await held_back(at, b"another", LARGE)
        _, small = await a_batch(at, b"small")
        assert small.urgent
        device.encoded(small, 0.01)
        device.encoded(first, 2.0)
        assert (await device.next(messages.Encode)).images == [job.number]


async def test_a_tower_that_cannot_be_interrupted_gets_demanded_images_before_long_waiting_batches(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tower_credit, "CREDIT_S", 1e9)
    monkeypatch.setattr(tower_credit, "MOST_GPU_BATCHES", 2)
    async with floor(model, overtakes=False, batch_patches=LARGE.patches) as at:
        [device] = at.devices
        await measured(at, 0.03, LARGE)
        _, first = await a_batch(at, b"a", LARGE)
        _, second = await a_batch(at, b"b", LARGE)
        assert not first.urgent
        assert not second.urgent
        _, third = await a_batch(at, b"c")
        assert third.urgent, "it does not wait for two batches"
        device.encoded(first)
        device.encoded(third)
        device.encoded(second)
        await soon(lambda: len(at.ended) == 4)


@pytest.mark.cuda
async def test_short_waiting_batches_of_a_tower_that_cannot_be_interrupted_are_not_overtaken(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that overtakes has a forward of its own, which takes a GPU as long as several images in a batch."""
    monkeypatch.setattr(tower_credit, "CREDIT_S", 1e9)
    monkeypatch.setattr(tower_credit, "MOST_GPU_BATCHES", 2)
    async with floor(model, overtakes=False, batch_patches=LARGE.patches) as at:
        [device] = at.devices
        await measured(at, 0.015, LARGE)
        _, first = await a_batch(at, b"a", LARGE)
        _, second = await a_batch(at, b"b", LARGE)
        jobs = [at.submit(name, demanded(name.decode())) for name in (b"c", b"d")]
        for job in jobs:
            await at.prepare(job)
        await at.waits(*jobs)
        assert nothing_sent(at)()
        device.encoded(first)
        third = await device.next(messages.Encode)
        assert (third.images, third.urgent) == ([job.number for job in jobs], False), "they share a batch"
        device.encoded(second)
        device.encoded(third)
        await soon(lambda: len(at.ended) == 5)


# Groups


async def test_an_image_waits_until_the_devices_have_formed_their_group(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with floor(model, devices=2, forms_group=False, group_patches=3072) as at:
        first, second = at.devices
        formed = asyncio.create_task(at.engine.formed())
        large = at.submit(b"large", demanded("large"), grid=LARGE)
        assert await second.forms_group() == 0
        await soon(lambda: at.links[1].tower.forming is None)
        assert await first.next(messages.FormGroup) == messages.FormGroup(0)
        await at.prepare(large)
        assert not at.links[0].tower.batches
        assert not formed.done()
        first.tell(messages.LeftGroup(0, failed=False))
        assert (await first.next(messages.Encode)).group == messages.Group(0, 0, 2, LARGE)
        await formed
        assert "the devices formed a group in" in caplog.text


@pytest.mark.cuda
async def test_a_group_that_does_not_form_is_formed_later_and_no_image_waits_for_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL that cannot work on a machine takes seconds to say so: not before each large image."""
    pauses: list[float] = []
    held: list[Callable[[], None]] = []
    called = asyncio.get_running_loop().call_later

    def call_later(pause_s: float, call: Any, *args: Any, **options: Any) -> asyncio.TimerHandle:
        if call == at.engine._want_group:
            pauses.append(pause_s)
            held.append(call)
            pause_s = PATIENCE_S
        return called(pause_s, call, *args, **options)

    async with floor(model, devices=2, forms_group=False, group_patches=3072) as at:
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
        first, second = at.devices
        for number in range(2):
            assert await first.forms_group(failed=True) == number
            await second.next(messages.FormGroup)
            assert (await second.next(messages.LeaveGroup)).number == number
            second.tell(messages.LeftGroup(number, failed=True))
            await at.engine.formed()
            _, batch = await a_batch(at, b"large %d" % number, LARGE)
            assert batch.group is None
            first.encoded(batch)
            await soon(lambda count=number: len(at.ended) > count)  # type: ignore[misc]
            held.pop()()
        assert pauses == [dispatcher.FIRST_GROUP_PAUSE_S, 2 * dispatcher.FIRST_GROUP_PAUSE_S]
        assert await first.forms_group() == await second.forms_group() == 2
        await at.engine.formed()
        _, batch = await a_batch(at, b"large", LARGE)
        assert batch.group == messages.Group(2, 0, 2, LARGE)
        await second.next(messages.JoinGroup)
        second.tell(messages.LeftGroup(2, failed=False))
        first.encoded(batch)
        second.kill()
        numbers = {await first.forms_group(), await second.forms_group()}
        assert numbers == {at.engine._group_number}
        assert min(numbers) > 2


def test_pauses_before_another_group_begin_again_once_one_has_encoded_an_image(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "TICK_S", 3600.0)  # scripted devices report nothing

    async def fail_again_and_again() -> None:
        async with floor(model, devices=2, forms_group=False, group_patches=3072) as at:
            first, second = at.devices

            async def form_after(pause_s: float) -> None:
                """Wait for the next group, which the server is to form after this pause."""
                began = asyncio.get_running_loop().time()
                while at.links[0].tower.forming is None:
                    await asyncio.sleep(pause_s / 20)
                assert asyncio.get_running_loop().time() - began == pytest.approx(pause_s, rel=0.2)

            for failures in range(10):
                number = await first.forms_group(failed=True)
                await second.next(messages.FormGroup)
                second.tell(messages.LeftGroup(number, failed=True))
                await at.engine.formed()
                await form_after(
                    min(dispatcher.FIRST_GROUP_PAUSE_S * 2**failures, dispatcher.LAST_GROUP_PAUSE_S)
                )
            await first.forms_group()
            await second.forms_group()
            await at.engine.formed()
            for name in (b"encoded", b"failed"):
                large = at.submit(name, demanded(name.decode()), grid=LARGE)
                await at.prepare(large)
                batch = await first.next(messages.Encode)
                assert batch.group is not None
                await second.next(messages.JoinGroup)
                second.tell(messages.LeftGroup(batch.group.number, failed=name == b"failed"))
                if name == b"encoded":
                    first.encoded(batch)
                    await soon(lambda: len(at.ended) == 1)
            await soon(lambda: at.engine._group is None)
            first.encoded(replace(batch, group=None))  # alone
            await form_after(dispatcher.FIRST_GROUP_PAUSE_S)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(fail_again_and_again())


@pytest.mark.parametrize("is_stuck", [True, False])
@pytest.mark.cuda
async def test_devices_form_no_other_group_once_forming_one_has_ended_a_process(
    model: Model, caplog: pytest.LogCaptureFixture, is_stuck: bool
) -> None:
    """Where NCCL hangs, it would hang again after each restart, and no image would ever be encoded."""
    async with floor(model, devices=2, forms_group=False, group_patches=3072) as at:
        first, second = at.devices
        assert await first.forms_group() == 0
        await second.next(messages.FormGroup)
        second.is_stuck = is_stuck  # else another process has killed it
        second.kill()
        assert (await first.next(messages.LeaveGroup)).number == 0
        await second.next(messages.Begin)
        await soon(lambda: all(link.is_up for link in at.links))
        if not is_stuck:
            assert await first.forms_group() == await second.forms_group()
            return
        await at.engine.formed()
        at.submit(b"large", demanded("large"), grid=LARGE)
        _, sent = await asyncio.to_thread(first.sent.get, timeout=PATIENCE_S)
        assert isinstance(sent, messages.Decode), "no group forms"
        first.prepared(sent.images[0].number)
        assert (await first.next(messages.Encode)).group is None
        assert "from now on, one device encodes a large image" in caplog.text


async def test_a_device_that_was_restarted_works_until_the_others_are_idle_too(model: Model) -> None:
    """Forming a group with one that is busy, it would only wait."""
    async with floor(model, devices=2, group_patches=3072) as at:
        first, second = at.devices
        _, busy = await a_batch(at, b"busy")
        second.kill()
        assert (await first.next(messages.LeaveGroup)).number == 0
        await second.next(messages.Begin)
        _, meanwhile = await a_batch(at, b"meanwhile", device=1)
        assert at.links[0].tower.forming is None
        second.encoded(meanwhile)
        first.encoded(busy)
        assert await first.forms_group() == await second.forms_group() == at.engine._group_number


async def test_a_large_image_has_a_group_only_while_all_devices_are_idle(model: Model) -> None:
    async with floor(model, devices=2, group_patches=3072) as at:
        first, second = at.devices
        _, busy = await a_batch(at, b"small")
        _, batch = await a_batch(at, b"alone", LARGE, 1)
        assert batch.group is None, "device 0 is busy"
        first.encoded(busy)
        second.encoded(batch)
        await soon(lambda: len(at.ended) == 2)
        _, batch = await a_batch(at, b"together", LARGE)
        assert batch.group == messages.Group(0, 0, 2, LARGE)
        assert (await second.next(messages.JoinGroup)).group == batch.group
        _, between = await a_batch(at, b"own", device=1)
        assert between.urgent, "a device in a group may encode its own images in between"
        second.encoded(between)
        second.tell(messages.LeftGroup(0, failed=False))
        first.encoded(batch)
        await soon(lambda: all(link.tower.is_idle for link in at.links))


@pytest.mark.parametrize(("kind", "least"), [("cuda:0", 4096), ("cpu", 3072)])
@pytest.mark.cuda
async def test_the_least_image_of_a_group_depends_on_the_kind_of_device(
    model: Model, config: Config, kind: str, least: int
) -> None:
    """On a GPU a group runs without graphs: below 4096 patches one GPU is as fast."""
    device = SimpleNamespace(name=kind, kind=kind.partition(":")[0], memory=MemoryUse)
    facts = facts_of(replace(model, device=cast(Device, device)), config, 2)
    assert facts.group_patches == least
    below, enough = (Grid(1, 2, patches // 2) for patches in (least - 4, least))
    async with floor(model, devices=2, group_patches=facts.group_patches) as at:
        for name, grid in {b"below": below, b"enough": enough}.items():
            job, batch = await a_batch(at, name, grid)
            assert (batch.group is not None) == (grid is enough)
            at.devices[0].encoded(batch)
            await soon(lambda job=job: (job, job.key.address) in at.ended)  # type: ignore[misc]


@pytest.mark.parametrize("how", ["fails", "ends"])
async def test_all_devices_leave_a_group_that_one_of_them_has_left(
    model: Model, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(dispatcher, "FIRST_GROUP_PAUSE_S", 0.0)
    async with floor(model, devices=2, group_patches=3072) as at:
        first, second = at.devices
        _, batch = await a_batch(at, b"large", LARGE)
        await second.next(messages.JoinGroup)
        if how == "fails":
            second.tell(messages.LeftGroup(0, failed=True))
        else:
            second.kill()
        assert (await first.next(messages.LeaveGroup)).number == 0
        first.tell(messages.LeftGroup(0, failed=True))
        first.encoded(batch)  # alone
        if how == "fails":
            await second.next(messages.LeaveGroup)
        assert await first.forms_group() == await second.forms_group()
        await soon(lambda: len(at.ended) == 1 and all(link.is_up and link.tower.is_idle for link in at.links))
        number = at.engine._group_number
        assert number > 0
        _, batch = await a_batch(at, b"another", LARGE)
        assert batch.group == messages.Group(number, 0, 2, LARGE)


async def test_an_interrupted_image_forms_no_group(model: Model) -> None:
    async with floor(model, devices=2, group_patches=3072) as at:
        first, second = at.devices
        large, batch = await a_batch(at, b"large", LARGE)
        assert batch.group is not None
        await second.next(messages.JoinGroup)
        first.kill()
        second.tell(messages.LeftGroup(0, failed=True))
        await second.next(messages.LeaveGroup)
        await at.prepare(large, 1)
        assert (await second.next(messages.Encode)).group is None


# The store


def rows_bytes(model: Model, images: int) -> int:
    """Return the size of a store for this many images of `GRID`, in whole pages."""
    tower = model.tower
    page = max(1, (64 << 10) // (tower.width * tower.dtype.itemsize)) * tower.width * tower.dtype.itemsize
    return page * images


async def test_a_full_store_is_noticed_without_asking_again(model: Model) -> None:
    async with floor(model, store_bytes=rows_bytes(model, 1)) as at:
        [device] = at.devices
        at.store.wait_s = PATIENCE_S
        first = at.submit(b"first", demanded("first"))
        rows = at.jobs.wait(first, demanded("reader"))
        await at.prepare(first)
        device.encoded(await device.next(messages.Encode))
        held = await rows
        second = at.submit(b"second", demanded("second"))
        await device.next(messages.Decode)
        device.prepared(second.number)
        await soon(lambda: at.store.stats().waits > 0)
        assert nothing_sent(at)()
        held.release()
        assert (await device.next(messages.Encode)).images == [second.number]


async def test_an_image_without_space_fails_in_time_and_later_ones_at_once(model: Model) -> None:
    async with floor(model, store_bytes=rows_bytes(model, 1)) as at:
        [device] = at.devices
        taken = at.store.reserve(b"rows of a peer", 1, Grid(1, 2, 2))
        assert isinstance(taken, Entry)
        jobs = [at.submit(bytes([n]), demanded(str(n))) for n in range(2)]
        numbers = [(await device.next(messages.Decode)).images[0].number for _ in jobs]
        for number in numbers:  # at one moment: the first waits for space
            device.prepared(number)
        await soon(lambda: len(at.ended) == 2)
        assert all(isinstance(outcome, OverloadedError) for _, outcome in at.ended)
        assert sorted((await device.next(messages.Gone)).images) == sorted(job.number for job in jobs)
        assert at.links[0].patches == 0
        at.store.abandon(taken)
        await soon(lambda: at.engine._shared.store_wait.since is None)
        assert (await a_batch(at, b"again"))[1].places


async def test_rows_that_arrive_otherwise_end_the_job_without_encoding(model: Model) -> None:
    async with floor(model) as at:
        [device] = at.devices
        _, batch = await a_batch(at, b"first")
        job = at.submit(b"from a peer", Claim("guess", "test"))
        reader = at.jobs.wait(job, demanded("reader"))
        [image] = (await device.next(messages.Decode)).images
        written(at.store, job.key.address).release()
        device.prepared(image.number)
        await soon(lambda: bool(at.links[0]._prepared))
        device.encoded(batch)
        (await reader).release()
        assert (await device.next(messages.Gone)).images == [job.number]


async def test_rows_that_arrive_while_they_are_encoded_are_the_ones_held(model: Model) -> None:
    async with floor(model) as at:
        [device] = at.devices
        job, batch = await a_batch(at, b"from a peer")
        reader = at.jobs.wait(job, demanded("reader"))
        arrived = written(at.store, job.key.address)
        used = at.store.stats().tiers[0].used_bytes
        device.encoded(batch)
        encoded = await reader
        assert encoded.entry is arrived.entry
        assert at.store.stats().tiers[0].used_bytes < used, "the device's pages are free"
        for pin in (encoded, arrived):
            pin.release()


def written(store: Store, address: bytes) -> Pin:
    """Write rows as a peer's are written."""
    entry = store.reserve(address, 4, GRID)
    assert isinstance(entry, Entry)
    [pin] = store.commit([entry])
    return pin


# Devices that fail


async def test_the_rate_and_the_number_of_failures_follow_the_reports(model: Model) -> None:
    async with floor(model) as at:
        [device] = at.devices
        await measured(at, 2.0)
        assert at.jobs.encode_s(GRID.patches) == pytest.approx(2.0)
        for n in range(3):
            device.kill()
            await soon(lambda n=n: device.restarts["killed"] == n + 1 and at.links[0].is_up)
        assert device.failures == 3
        _, batch = await a_batch(at, b"good")
        device.encoded(batch)
        await soon(lambda: device.failures == 0)


@pytest.mark.parametrize("stage", ["decode", "batch decode", "encode"])
async def test_an_image_fails_when_three_processes_have_ended_on_it(model: Model, stage: str) -> None:
    async with floor(model) as at:
        [device] = at.devices
        claims = [demanded("bad"), demanded("other")]
        bad, other = (
            at.submit(claim.request_id.encode(), claim, batch=stage == "batch decode") for claim in claims
        )
        decoding: set[int] = set()
        while len(decoding) < 2:
            decoding.update(image.number for image in (await device.next(messages.Decode)).images)
        if stage == "encode":
            device.prepared(bad.number)
            await device.next(messages.Encode)
        device.kill()
        deaths = 1
        while len(at.ended) < 2:
            [image] = (await device.next(messages.Decode)).images
            at.jobs.poke()
            assert nothing_sent(at)(), "it is alone"
            if image.number != bad.number or stage == "encode":
                device.prepared(image.number)
                batch = await device.next(messages.Encode)
                assert batch.images == [image.number]
            if image.number == bad.number:
                device.kill()
                deaths += 1
            else:
                device.encoded(batch)
            seen = len(at.ended) + (image.number != bad.number or deaths == 3)
            await soon(lambda seen=seen: len(at.ended) == seen)
        outcomes = dict(at.ended)
        assert deaths == 3
        assert outcomes[other] == other.key.address
        assert isinstance(outcomes[bad], InternalError)
        with pytest.raises(InternalError, match="ended 3 times on this image"):
            at.jobs.join(bad.key, demanded("again"))
        assert at.jobs._failures.interruptions(other.key) == 0


async def test_three_processes_that_end_on_one_image_are_two_failures_of_the_device(model: Model) -> None:
    async with floor(model) as at:
        [device] = at.devices
        for name in (b"one", b"two"):
            at.submit(name, demanded(name.decode()))
            for _ in range(3):
                await device.next(messages.Decode)
                device.kill()
        await soon(lambda: len(at.ended) == 2 and at.links[0].is_up)
        assert device.failures == 4, "each counts as a suspect, and when it is found to be the cause"


async def test_callers_who_leave_do_not_make_a_dangerous_image_new(model: Model) -> None:
    async with floor(model) as at:
        [device] = at.devices
        for deaths in range(1, 4):
            claim = demanded()
            bad = at.submit(b"bad", claim)
            [sent] = (await device.next(messages.Decode)).images
            assert sent.number == bad.number
            at.jobs.withdraw(claim)
            await device.next(messages.Gone)
            device.kill()
            await soon(lambda deaths=deaths: device.restarts["killed"] == deaths and at.links[0].is_up)
        with pytest.raises(InternalError, match="ended 3 times on this image"):
            at.jobs.join(bad.key, demanded())


async def test_pages_of_a_lost_process_are_used_again_only_after_its_end(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with floor(model, devices=2, store_bytes=rows_bytes(model, 1)) as at:
        first, second = at.devices
        at.store.wait_s = PATIENCE_S
        ended = asyncio.Event()
        loop, wait = asyncio.get_running_loop(), first.wait

        def wait_for_its_end(*_: object) -> int | None:
            asyncio.run_coroutine_threadsafe(ended.wait(), loop).result()
            return wait()

        monkeypatch.setattr(first, "wait", wait_for_its_end)
        job, batch = await a_batch(at, b"a")
        first.kill()
        await at.prepare(job, 1)
        await soon(lambda: at.store.stats().waits > 0)
        assert nothing_sent(at, 1)(), "the process may still write to these pages"
        ended.set()
        again = await second.next(messages.Encode)
        assert again.places == batch.places


async def test_a_silent_device_is_unready_and_killed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.devices.dispatcher.TICK_S", 0.02)
    async with floor(model) as at:
        [device], [link] = at.devices, at.links
        device.tell(messages.Report(None))
        await soon(lambda: not at.engine.answers)
        assert link.is_up, "it is not killed yet"
        await soon(lambda: device.restarts["stuck"] == 1 and link.is_up)
        for _ in range(3 * linking.SILENT_TICKS):
            device.tell(messages.Report(None))
            await asyncio.sleep(0.02)
        assert device.restarts["stuck"] <= 2, "a device that reports is left alone, but for a busy machine"


async def test_a_device_that_keeps_an_image_is_killed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "CREDIT_TICKS", 3)
    monkeypatch.setattr(linking, "DECODE_S", 0.0)
    monkeypatch.setattr("encoder_service.devices.dispatcher.TICK_S", 3600.0)  # only this test ticks
    async with floor(model) as at:
        [device], [link] = at.devices, at.links
        assert link.tick() == ""
        at.submit(b"a", demanded())
        await device.next(messages.Decode)
        found = [link.tick() for _ in range(3)]
        assert found == ["", "", "it has not returned an image to decode"]
        link.silent_ticks = 0


async def test_time_with_an_empty_queue_is_not_starved(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    set_clock(monkeypatch, lambda: now[0])
    async with floor(model) as at:
        [device], [link] = at.devices, at.links
        await measured(at, 0.1)
        before = at.metrics._starved._value.get()
        at.jobs.poke()
        await asyncio.sleep(0.05)
        now[0] += 10.0
        job = at.submit(b"a", demanded())
        [image] = (await device.next(messages.Decode)).images
        await soon(lambda: link.idle_since is not None)
        now[0] += 0.1
        device.prepared(image.number)
        device.encoded(await device.next(messages.Encode))
        await soon(lambda: job in [ended for ended, _ in at.ended])
        assert at.metrics._starved._value.get() - before == pytest.approx(0.1)


async def test_our_error_while_pushing_ends_the_server(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    async with floor(model) as at:
        monkeypatch.setattr(linking.Link, "push_single", lambda _: 1 / 0)
        job = at.submit(b"a", demanded())
        outcome: list[object] = []
        at.jobs.watch(job, outcome.append)
        await soon(lambda: bool(outcome))
        assert not isinstance(outcome[0], Pin)
        assert at.jobs.is_closed
        at.jobs._closed = False  # as the end of this test asks
