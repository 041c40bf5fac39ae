"""Rows of trained weights and real photos: those of the package's own inference, and the same bits on every path."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from encoder_service.config import Config
from encoder_service.devices.model import Model, load_model
from encoder_service.image.decoder import FileDecoder, PillowDecoder
from encoder_service.image.decoder_pool import DecoderPool
from encoder_service.image.device_decoder import Decoder
from prefill_client import EncoderClient
from testing.decoding import decode_files
from testing.real_weights import head, missing, network_with_rows, normalised, photos, square, write_llava
from testing.reference_tower import row_errors
from testing.server_process import ServerProcess, running
from tests.calls import all_encoded
from tests.servers import server_of
from tests.small_store import STORE_GIB
from tests.waiting import START_S, soon

pytestmark = pytest.mark.real

MAX_FLOAT32_ERROR = 1e-5
MIN_BFLOAT16_COSINE = 0.998
MAX_SALIENCY_ERROR = {"float32": 1e-4, "bfloat16": 0.05}  # of 0 to 1
MIB = 1 / 1024  # in GiB
LEAST_ON_DISK = 4
Rows = Mapping[bytes, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := missing():
        pytest.skip(reason)
    return write_llava(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def squares(folder: Path) -> list[bytes]:
    """PNGs that no processor resizes."""
    return [square(file) for file in photos().values()]


@pytest.fixture(scope="module")
def files(squares: list[bytes]) -> list[bytes]:
    """The squares, and the photos as they are."""
    return [*squares, *photos().values()]


@pytest.fixture(scope="module")
def inference(squares: list[bytes]) -> dict[bytes, tuple[Tensor, Tensor]]:
    """What the package's inference gives for each square: saliency [224, 224] and last hidden states [256, 384]."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(network_with_rows(), options, ["CPUExecutionProvider"])
    outputs = {file: session.run(None, {"input_image": normalised(file)}) for file in squares}
    return {
        file: (torch.from_numpy(saliency[0, 0]), torch.from_numpy(hidden[0, 1:]))
        for file, (saliency, hidden) in outputs.items()
    }


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def config(request: pytest.FixtureRequest, folder: Path) -> Config:
    return Config(
        model=folder,
        dtype=request.param,
        devices="cpu",
        listen="127.0.0.1:0",
        rows_listen="127.0.0.1:0",
        store_host_gib=STORE_GIB,
        drain_s=5,
    )


@pytest.fixture(scope="module")
def model(config: Config) -> Iterator[Model]:
    model = load_model(config)
    yield model
    model.decoder.close()


@pytest.fixture(scope="module")
def alone(model: Model, files: list[bytes]) -> Rows:
    """The rows of each file, decoded in this thread and encoded alone."""
    return encoded(model, files, PillowDecoder())


def encoded(model: Model, files: list[bytes], decoder: FileDecoder) -> dict[bytes, Tensor]:
    """Decode the files with `decoder`; return the rows of each, which is encoded alone."""
    rows = {}
    for file, values in zip(files, decode_files(Decoder(torch.device("cpu"), decoder), files), strict=True):
        assert isinstance(values, Tensor)
        grid = model.tower.geometry.grid(values.shape[1], values.shape[0])
        [rows[file]] = model.tower.encode(model.tower.inputs([values], [grid]), [grid])
    return rows


def test_rows_are_those_of_the_packages_inference(
    config: Config, alone: Rows, inference: Mapping[bytes, tuple[Tensor, Tensor]]
) -> None:
    for file, (_, true) in inference.items():
        rows = alone[file].float()
        assert rows.shape == true.shape == (256, 384)
        if config.dtype == "float32":
            assert row_errors(rows, true).max() <= MAX_FLOAT32_ERROR
        assert torch.cosine_similarity(rows, true).min() >= MIN_BFLOAT16_COSINE


def test_the_trained_head_finds_in_our_rows_what_the_package_finds(
    config: Config, alone: Rows, inference: Mapping[bytes, tuple[Tensor, Tensor]]
) -> None:
    for file, (saliency, _) in inference.items():
        found = torch.from_numpy(head(alone[file].float().numpy()))
        assert (found - saliency).abs().max() <= MAX_SALIENCY_ERROR[config.dtype]


@pytest.mark.parametrize("pool", [PillowDecoder, lambda: DecoderPool(1)], ids=["thread", "process"])
def test_each_decoder_gives_the_same_bits(
    model: Model, files: list[bytes], alone: Rows, pool: Callable[[], FileDecoder]
) -> None:
    with closing(pool()) as decoder:
        decoder.start()
        rows = encoded(model, files, decoder)
    assert all(torch.equal(rows[file], alone[file]) for file in files)


@asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[EncoderClient]:
    async with await EncoderClient.connect(endpoint) as client:
        yield client


async def received(client: EncoderClient, files: list[bytes], **options: Any) -> dict[bytes, Tensor]:
    """Submit files in one call and return their rows."""
    found = await all_encoded(client, files, **options)
    assert all(rows.transport in options.get("transports", [rows.transport]) for rows in found)
    return {file: rows.tensor() for file, rows in zip(files, found, strict=True)}


def assert_same_bits(rows: Rows, alone: Rows) -> None:
    for file, tensor in rows.items():
        assert torch.equal(tensor, alone[file])


@pytest.mark.parametrize("transport", ["inline", "shm", "tcp"])
async def test_each_transport_gives_the_same_bits_together_and_alone(
    config: Config, model: Model, files: list[bytes], alone: Rows, transport: str
) -> None:
    async with server_of(config, model) as server, connected(server.endpoint) as client:
        assert_same_bits(await received(client, files[1:], transports=[transport]), alone)
        assert_same_bits(await received(client, files[:1], transports=[transport]), alone)
        assert_same_bits(await received(client, files, transports=[transport]), alone)


async def test_the_disk_and_a_restarted_server_give_the_same_bits(
    config: Config, files: list[bytes], alone: Rows, tmp_path: Path
) -> None:
    def start() -> Any:
        return running(
            config.model,
            within_s=START_S,
            threads=torch.get_num_threads(),  # their number may change bits
            dtype=config.dtype,
            devices="cpu",
            store_host_gib=MIB,  # two or five images
            store_disk=tmp_path / "rows",
            source_gib=0,
        )

    with start() as server:
        async with connected(server.endpoint) as client:
            for file in files:
                assert_same_bits(await received(client, [file]), alone)
            await soon(lambda: on_disk(server) >= LEAST_ON_DISK)
            for file in files:
                assert_same_bits(await received(client, [file]), alone)
        assert server.metrics().total("store_hits_total", tier="disk") >= 1
    with start() as server:
        kept = on_disk(server)
        assert kept >= LEAST_ON_DISK
        async with connected(server.endpoint) as client:
            for file in files:
                assert_same_bits(await received(client, [file]), alone)
        assert server.encodes() <= len(files) - kept


def on_disk(server: ServerProcess) -> int:
    return int(server.metrics().total("store_entries", tier="disk"))
