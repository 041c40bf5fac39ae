"""A lost device or a dead thread ends the device's process, which is replaced; in the server it ends the server."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from itertools import count, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder_contract.digest import content_digest
from encoder_contract.errors import InternalError, OverloadedError, UnavailableError
from encoder_contract.header import read_header
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.devices import EXIT_LOST
from encoder_service.devices.faults import Faults
from encoder_service.devices.messages import FormGroup
from encoder_service.devices.model import Model
from encoder_service.devices.torch_device import Device
from encoder_service.devices.watchdog import Watchdog
from encoder_service.devices.workers import CopyOut, Vit
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.decoder import PillowDecoder
from encoder_service.image.device_decoder import Decoder
from encoder_service.image.source import Source
from encoder_service.metrics import scrape
from encoder_service.store import registration
from encoder_service.store.copies import copy_bytes
from prefill_client import EncoderClient
from testing.photos import photo
from testing.redis_servers import redis_server
from tests.device_bench import demanded, running
from tests.lost_device import DEADLY, DEATHS_THERE, FORKS, STAGES, TIERS, serve
from tests.waiting import PATIENCE_S, START_S, soon

IMAGES = [photo(256, 256, n) for n in range(4)]
METRICS = ("--metrics-listen", "127.0.0.1:0")
# Of 64 KiB a page: four images take two each.
DEVICE_PAGES = {"to host": 1000, "mover": 8, "tier-migrator dies": 8}


def told(what: str, log: Path) -> str:
    """Return an address that the server has told: `listening` comes last."""
    text = log.read_text() if log.exists() else ""
    return "".join(re.findall(rf"^ +{what} +(\S+)\n", text, re.MULTILINE))


async def listening(log: Path) -> str:
    """Wait until the server listens; return its endpoint."""
    await soon(lambda: bool(told("listening", log)), START_S)
    return told("listening", log)


async def outcomes(endpoint: str, images: Sequence[bytes] = IMAGES) -> list[str]:
    """Fetch the images, then submit them; return the outcome of each: its rows, or the error."""
    names = [pb.FetchImage(index=n, digest=content_digest(image)) for n, image in enumerate(images)]
    async with (
        grpc.aio.insecure_channel(endpoint) as channel,
        await EncoderClient.connect(endpoint) as client,
    ):
        fetching: Any = EncoderServiceStub(channel)
        call = fetching.Fetch(pb.FetchRequest(images=names, grace_ms=20_000), timeout=START_S)
        sending = asyncio.create_task(client.submit(images))
        said: list[Any] = []
        try:
            async for message in call:
                said += ["rows"] * len(message.ready) + [error.code for error in message.errors]
        except grpc.aio.AioRpcError as error:  # the Fetch arrived when the server had already failed
            said += [error.code().value[0]] * (len(images) - len(said))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return said


@contextmanager
def started(what: str, checkpoint: Path, tmp_path: Path, *more: str, failed: str = "") -> Iterator[Any]:
    """Run a server that fails at `what`, in a process; see `lost_device.LOSING`."""
    flags = f"--model {checkpoint} --listen 127.0.0.1:0 --devices cpu --store-host-gib 0.04"
    if pages := DEVICE_PAGES.get(what):
        flags += f" --store-device-gib {pages * (64 << 10) / (1 << 30)}"
    given = (what, failed, tmp_path / "server.log", [*flags.split(), *more])
    process = FORKS.Process(target=serve, args=given, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@asynccontextmanager
async def ending(what: str, checkpoint: Path, tmp_path: Path, *more: str) -> AsyncIterator[str]:
    """Run a server that fails: in the block its health must report it, and then it must end."""
    log = tmp_path / "server.log"
    with started(what, checkpoint, tmp_path, *more) as process:
        endpoint = await listening(log)
        async with grpc.aio.insecure_channel(endpoint) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            yield endpoint
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING, log.read_text()
        await asyncio.to_thread(process.join, PATIENCE_S)
        assert process.exitcode == EXIT_LOST, log.read_text()


ENDS = {"a hung device": "stuck", "a dead thread": "crashed", **dict.fromkeys(DEATHS_THERE, "crashed")}
# Two a server, as each start takes seconds; an image survives two processes.
LOSSES = [*STAGES, *DEATHS_THERE]
PAIRS = list(zip_longest(LOSSES[::2], LOSSES[1::2]))


@pytest.mark.parametrize("pair", PAIRS, ids=[" and ".join(filter(None, pair)) for pair in PAIRS])
@pytest.mark.cuda
async def test_a_lost_device_costs_no_image(
    pair: Sequence[str | None], checkpoint: Path, tmp_path: Path
) -> None:
    stages = [stage for stage in pair if stage]
    log = tmp_path / "server.log"
    (failed := tmp_path / "failed").mkdir()
    images = [photo(64, 64, n, kind) for n, kind in enumerate(["JPEG", "PNG", "JPEG"])]
    with started(", ".join(stages), checkpoint, tmp_path, *METRICS, failed=str(failed)):
        endpoint = await listening(log)
        assert await outcomes(endpoint, images) == ["rows"] * len(images), log.read_text()
        found = await asyncio.to_thread(scrape, told("metrics", log), PATIENCE_S)
    for why, times in Counter(ENDS.get(stage, "lost") for stage in stages).items():
        assert found.total("device_restarts_total", reason=why) == times, log.read_text()
    assert found.total("device_up") == 1


async def test_an_image_that_kills_each_process_that_decodes_it_fails_alone_and_is_remembered(
    checkpoint: Path, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    deadly, others = photo(*DEADLY, 1, "PNG"), [photo(64, 64, n, "PNG") for n in range(3)]
    with started("deadly image", checkpoint, tmp_path, *METRICS):
        endpoint = await listening(log)
        said = await outcomes(endpoint, [deadly, *others])
        assert Counter(said) == {"rows": 3, InternalError.status.value: 1}, log.read_text()
        assert await outcomes(endpoint, [deadly]) == [InternalError.status.value]
        found = await asyncio.to_thread(scrape, told("metrics", log), PATIENCE_S)
    assert found.total("device_restarts_total", reason="killed") == 3, log.read_text()
    assert found.total("device_up") == 1


async def test_a_device_that_is_lost_every_time_ends_the_server(checkpoint: Path, tmp_path: Path) -> None:
    async with ending("tower", checkpoint, tmp_path) as endpoint:
        said = await outcomes(endpoint)  # takes several starts
    assert len(said) == len(IMAGES)
    assert set(said) <= {UnavailableError.status.value, InternalError.status.value}


@pytest.mark.parametrize("what", TIERS)
async def test_a_lost_device_tier_ends_the_process(what: str, checkpoint: Path, tmp_path: Path) -> None:
    async with ending(what, checkpoint, tmp_path) as endpoint:
        if what == "mover":  # nobody waits for it
            async with await EncoderClient.connect(endpoint) as client:
                await client.submit(IMAGES)
        else:
            assert await outcomes(endpoint) == [UnavailableError.status.value] * len(IMAGES)


@pytest.mark.cuda
def test_slow_work_is_not_a_hang_before_its_limit() -> None:
    dog = Watchdog(lambda _: None)
    with dog.watching("unpredicted"), dog.watching("long", predicted_s=2.0):
        assert [dog.check() for _ in range(29)] == [None] * 29
        hung = dog.check()
        assert "unpredicted" in str(hung)
    with dog.watching("long", predicted_s=2.0):
        with dog.watching("over soon"):
            assert [dog.check() for _ in range(20)] == [None] * 20
        assert [dog.check() for _ in range(79)] == [None] * 79
        assert "long" in str(dog.check())
    assert dog.check() is None


@pytest.mark.cuda
def test_forming_a_group_is_no_hang_before_a_minute(model: Model) -> None:
    """NCCL may take longer than the 30 s of unpredicted work, and the devices form no other group after a hang."""
    dog, ticks = Watchdog(lambda _: None), list[int]()

    def form(_number: int) -> None:
        ticks.append(next(tick for tick in count(1) if dog.check() is not None))

    inbox, group = cast(Any, SimpleNamespace(tell=lambda _: None)), cast(Any, SimpleNamespace(form=form))
    faults = Faults(model.device, lambda *_: None)
    vit = Vit(inbox, model, cast(CopyOut, None), faults, dog, group)
    vit._join_group(FormGroup(0), model.device.stream())
    assert ticks == [60]


@pytest.mark.parametrize("name", ["tier-migrator", "cluster-leases"])
async def test_a_dead_thread_or_task_ends_the_process(name: str, checkpoint: Path, tmp_path: Path) -> None:
    with redis_server() if name == "cluster-leases" else nullcontext() as redis:
        index = ["--index", redis.url] if redis else []
        async with (
            ending(f"{name} dies", checkpoint, tmp_path, *index) as endpoint,
            await EncoderClient.connect(endpoint) as client,
        ):
            await client.submit(IMAGES)
    kind = "task" if redis else "thread"
    assert f"the server's {kind} {name} died: ending the process" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("link dies", "taking the reports of cpu failed: ending the process"),
        ("dispatch dies", "handing out work failed: ending the process"),
    ],
)
async def test_an_error_of_ours_in_the_server_fails_waiting_calls_and_ends_the_process(
    what: str, says: str, checkpoint: Path, tmp_path: Path
) -> None:
    async with ending(what, checkpoint, tmp_path) as endpoint:
        assert await outcomes(endpoint) == [UnavailableError.status.value] * len(IMAGES)
    assert says in (tmp_path / "server.log").read_text()


async def test_an_error_on_a_working_device_fails_only_the_image(model: Model) -> None:
    def refuse(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: invalid argument")

    async with running(model, refuse) as bench:  # type: ignore[arg-type]
        with pytest.raises(InternalError):
            await bench.rows(IMAGES[0], demanded())
        assert len(bench.jobs) == 0


@pytest.mark.cuda
async def test_exhausted_memory_is_not_a_lost_device_and_has_a_retry_hint(model: Model) -> None:
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ):

        def refuse(*_: object, error: Exception = error) -> None:
            raise error

        async with running(model, refuse) as bench:  # type: ignore[arg-type]
            with pytest.raises(OverloadedError) as refused:
                await bench.rows(IMAGES[0], demanded())
            assert refused.value.retry_after_ms > 0


def test_the_cpu_is_never_lost() -> None:
    assert not Device("cpu").is_lost()


def refusing_jpegs(monkeypatch: pytest.MonkeyPatch, *, lost: bool) -> DaliJpegs:
    """Return a DALI decoder that acts as on a GPU and refuses all images. `lost`: torch finds that GPU lost."""

    def refuse(_files: object) -> NoReturn:
        raise RuntimeError("[nvjpeg_decoder] error")

    class Stream:
        def synchronize(self) -> None:
            if lost:
                raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    jpegs = DaliJpegs(torch.device("cpu"), 1)
    jpegs._torch_device = torch.device("cuda")
    monkeypatch.setattr(jpegs, "_decode", refuse)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    return jpegs


@pytest.mark.dali
@pytest.mark.cuda
def test_images_that_dali_refuses_on_a_lost_gpu_are_not_called_invalid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(b"", IMAGES[0], read_header(IMAGES[0]))
    assert refusing_jpegs(monkeypatch, lost=False).decode([source]) == [None]
    with pytest.raises(torch.AcceleratorError):
        refusing_jpegs(monkeypatch, lost=True).decode([source])


def test_an_image_is_not_called_invalid_if_the_gpu_cannot_take_its_pixels() -> None:
    source = Source(b"", IMAGES[0], read_header(IMAGES[0]))
    decoder = Decoder(torch.device("cuda:99"), PillowDecoder())  # there is no such device, here or anywhere
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|compiled"):
        decoder.decode(source)


@pytest.mark.cuda
def test_the_store_is_registered_with_the_gpu_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    current, told = ["cuda:0"], []

    @contextmanager
    def device(name: str) -> Iterator[None]:
        current.append(name)
        yield
        current.pop()

    def call(*_: int) -> int:
        told.append(current[-1])
        return 0

    runtime = SimpleNamespace(cudaHostRegister=call, cudaHostUnregister=call)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = torch.empty(1)
    assert registration.register_memory(memory, "cuda:1")
    registration.unregister_memory(memory, "cuda:1")
    assert told == ["cuda:1", "cuda:1"]


@pytest.mark.gpu
@pytest.mark.cuda
def test_waiting_for_a_batch_or_a_copy_uses_no_core() -> None:
    stream = Device("cuda").stream()
    square = torch.randn(8192, 8192, device="cuda")
    source, target = (torch.empty(2 << 30, dtype=torch.uint8, device=place) for place in ("cuda", "cpu"))
    assert registration.register_memory(target, "cuda")

    def work() -> None:
        for _ in range(50):
            square @ square

    def waited() -> tuple[float, float]:
        """Return the wall and CPU seconds of a wait."""
        with stream.use():
            work()
            began, busy = time.monotonic(), time.thread_time()
            end = stream.mark()
            assert end is not None
            end.synchronize()
            copy_bytes([target], [source])
            return time.monotonic() - began, time.thread_time() - busy

    waited()
    took_s, busy_s = waited()
    registration.unregister_memory(target, "cuda")
    assert took_s > 0.05
    assert busy_s < took_s / 5
