"""The engine on a simulated GPU: images pass four streams without a race, and a missing wait or record is found."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from encoder_contract import registration
from encoder_service.config import Config
from encoder_service.devices import workers
from encoder_service.devices.device_inbox import Inbox
from encoder_service.devices.model import Model, load_model
from encoder_service.devices.torch_device import CudaStream, Device
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.decoder import PillowDecoder
from encoder_service.image.device_decoder import Decoder
from encoder_service.image.pillow import decode_file
from encoder_service.vision import attention
from testing.decoding import source_of
from testing.photos import photo
from testing.reference_tower import row_errors
from tests.device_bench import Bench, demanded, running
from tests.simulated_gpu.device import SimulatedGpu
from tests.towers import load
from tests.waiting import PATIENCE_S, soon

pytest.importorskip("triton", reason="triton is not installed: the extra dev brings it")

from tests.simulated_gpu import simulated_gpu

pytestmark = [pytest.mark.slow]

GPU = "cuda:1"
STORE_BYTES = 4 << 20
# JPEGs are decoded in batches, PNGs one by one. Two images have a grid that others had before.
IMAGES = [
    photo(256, 256, 0),
    photo(300, 200, 1),
    photo(256, 256, 2, "PNG"),
    photo(320, 256, 3, "PNG"),
    photo(300, 200, 4),
    photo(256, 256, 5),
]
# Sent after these: the tables of its grid exist, so the wait for them covers none of its patches.
LATER = photo(256, 256, 6)


class SimulatedJpegs(DaliJpegs):
    """DALI's decoder, whose pixels are Pillow's, on a stream of its own and in memory that it reuses."""

    def __init__(self) -> None:
        self.name = "simulated"
        self._torch_device = torch.device(GPU)
        self._stream = torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]

    def start(self, max_files: int) -> None:
        """Do nothing."""

    def _decode(self, files: Any) -> list[Tensor]:
        with torch.cuda.stream(self._stream):
            samples = [pixels_of(file).pin_memory().to(GPU, non_blocking=True) for file in files]
        self._stream.synchronize()
        return self._owned(samples)


def pixels_of(file: bytes) -> Tensor:
    """Return the pixels of a file on the CPU."""
    decoded = decode_file(source_of(file))
    assert not isinstance(decoded, Exception)
    return torch.from_numpy(decoded)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    """A simulated GPU for a test."""
    monkeypatch.setattr(attention, "MAX_THIRD_CALL_MS", math.inf)  # the simulated device takes its time
    monkeypatch.setattr("torch.utils.dlpack.from_dlpack", lambda sample: sample)
    encoded = Inbox.encoded
    with simulated_gpu() as gpu:

        def encoded_and_checked(inbox: Inbox, *args: Any) -> None:
            gpu.reported_by_host("a batch is reported as encoded")
            encoded(inbox, *args)

        monkeypatch.setattr(Inbox, "encoded", encoded_and_checked)
        yield gpu


def model_on(folder: Path, device: str, **options: Any) -> Model:
    """Return the model on a device, which is the current one of this thread, as in a device's process."""
    Device(device).make_current()
    tower = load(folder, "bfloat16", device=device, **options)
    jpegs = SimulatedJpegs() if device != "cpu" else None
    return Model(tower, tower.recipe, Decoder(torch.device(device), PillowDecoder(), jpegs), Device(device))


async def encode(bench: Bench, images: Sequence[bytes] = IMAGES) -> list[Tensor]:
    """Queue images together; return the rows of each, on the host."""
    requests = [bench.rows(image, demanded(str(number))) for number, image in enumerate(images)]
    found = []
    for pin in await asyncio.gather(*requests):
        with pin:
            data = bytearray(b"".join(bytes(part) for part in pin.rows()))
            rows = torch.frombuffer(data, dtype=torch.bfloat16)
            found.append(rows.view(-1, bench.model.tower.width).float())
    return found


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.cuda
async def test_images_pass_four_streams_without_a_finding(
    gpu: SimulatedGpu, checkpoint: Path, graphs: bool
) -> None:
    model = model_on(checkpoint, GPU, graphs=graphs, batch_patches=512)
    before = len(gpu.streams)
    async with running(model, batch_patches=512) as bench:
        rows = [*await encode(bench), *await encode(bench, [LATER])]
    assert len(gpu.streams) == before + 4, "torch keeps memory for each: one for all threads of single images"
    on_cpu = model_on(checkpoint, "cpu")
    for image, ours in zip([*IMAGES, LATER], rows, strict=True):
        pixels = pixels_of(image)
        grid = on_cpu.tower.geometry.grid(pixels.shape[1], pixels.shape[0])
        [truth] = on_cpu.tower.encode(on_cpu.tower.inputs([pixels], [grid]), [grid])
        assert row_errors(ours, truth.float()).max() <= 0.03
    assert all(gpu.launched(name) for name in ("prepare", "prepare-single", "vit", "copy-out"))
    assert (gpu.launched("vit", "graph") > 0) == graphs
    assert not gpu.findings


async def test_images_are_served_while_a_large_store_is_registered(
    gpu: SimulatedGpu, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 GiB take a minute or more. The store of this test has as many pieces."""
    pieces = 32
    monkeypatch.setattr(registration, "REGISTERED_BYTES", STORE_BYTES // pieces)
    register, served = gpu.register, threading.Event()

    def slow(address: int, size_bytes: int, flags: int) -> int:
        if len(gpu.registered) == pieces // 2:
            served.wait(PATIENCE_S)
        return register(address, size_bytes, flags)

    monkeypatch.setattr(gpu, "register", slow)
    model = model_on(checkpoint, GPU, graphs=False, batch_patches=512)
    async with running(model, batch_patches=512, host_bytes=STORE_BYTES) as bench:
        await soon(lambda: len(gpu.registered) == pieces // 2)
        await encode(bench)
        assert len(gpu.registered) == pieces // 2
        served.set()
        await soon(lambda: len(gpu.registered) >= pieces)
        sizes = [end - begin for begin, end in gpu.registered.items()]
        assert max(sizes) == STORE_BYTES // pieces
        first = photo(256, 256, 9)
        with await bench.rows(first, demanded("later")):
            pass
    assert not gpu.findings


def receives_nothing(_stream: Any, _event: Any, _tensors: Any) -> None:
    """Neither wait nor record."""


def receives_without_recording(stream: Any, event: Any, _tensors: Any) -> None:
    """Wait, and keep no memory."""
    stream._stream.wait_event(event)


def copies_without_waiting(targets: Any, sources: Any) -> None:
    """Copy one image's rows, and do not wait."""
    flat = torch.cat(list(sources))
    for target in targets:
        target.copy_(flat[: len(target)], non_blocking=True)
        flat = flat[len(target) :]


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "kind"),
    [
        (CudaStream, "receive", receives_nothing, "race"),
        (CudaStream, "receive", receives_without_recording, "freed"),
        (workers.Batch, "device_s", lambda _batch: 0.001, "early"),
        (workers, "copy_tensors", copies_without_waiting, "early"),
    ],
    ids=["receive", "record_stream", "event before the copy-out", "wait for the copy"],
)
async def test_a_missing_wait_or_record_is_found(
    gpu: SimulatedGpu,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    mutant: Callable[..., Any],
    kind: str,
) -> None:
    model = model_on(checkpoint, GPU, graphs=False, batch_patches=512)
    monkeypatch.setattr(owner, name, mutant)
    async with running(model, batch_patches=512) as bench:
        await encode(bench, IMAGES[:1])
        await encode(bench, [LATER])
    assert kind in {finding.partition(":")[0] for finding in gpu.findings}


@pytest.mark.parametrize("records", [True, False])
async def test_rows_stay_in_memory_until_they_are_copied_whichever_thread_drops_them_last(
    gpu: SimulatedGpu, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, records: bool
) -> None:
    put, receive = workers.CopyOut.put, CudaStream.receive
    held: list[workers.Batch | None] = []

    def put_and_hold(copy_out: workers.CopyOut, batch: workers.Batch | None) -> None:
        held.append(batch)
        put(copy_out, batch)

    def receive_before_the_copy_out(stream: CudaStream, event: Any, tensors: Any) -> None:
        if threading.current_thread().name != "copy-out":
            receive(stream, event, tensors)

    monkeypatch.setattr(workers.CopyOut, "put", put_and_hold)
    if not records:
        monkeypatch.setattr(CudaStream, "receive", receive_before_the_copy_out)
    model = model_on(checkpoint, GPU, graphs=False, batch_patches=512)
    async with running(model, batch_patches=512) as bench:
        await encode(bench, IMAGES[:1])
    assert not gpu.findings
    held.clear()  # on this thread, which has waited for nothing
    assert any(finding.startswith("freed") for finding in gpu.findings) != records


def test_a_model_loads_without_a_context_on_another_gpu(gpu: SimulatedGpu, checkpoint: Path) -> None:
    config = Config(
        model=checkpoint, devices=GPU, decoder="pillow", decoder_process="no", video="no", cuda_graphs="no"
    )
    assert load_model(config).device.name == GPU
    assert not gpu.findings
