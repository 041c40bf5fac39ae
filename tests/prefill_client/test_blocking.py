"""The blocking client: calls from several threads, and how closing ends them."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from encoder_contract.errors import InvalidImageError, ModelMismatchError, UnavailableError, UnknownImageError
from encoder_service.config import Config
from encoder_service.devices.model import load_model
from prefill_client import BlockingClient, EncoderClient, RowRequest
from testing.photos import photo
from testing.server_process import ServerProcess
from tests.servers import server_of
from tests.waiting import PATIENCE_S


@pytest.fixture
def client(process: ServerProcess) -> Iterator[BlockingClient]:
    with BlockingClient.connect(process.endpoint) as client:
        yield client


def rows_of(client: BlockingClient, image: bytes) -> np.ndarray:
    (submitted,) = client.submit([image])
    with client.fetch([RowRequest(submitted.digest)]) as outcomes:
        (outcome,) = outcomes
        assert outcome.error is None
        assert outcome.array.shape[0] == submitted.tokens
        return outcome.array.copy()


def test_submit_accepts_paths(client: BlockingClient, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(photo(70, 90, 77, "PNG"))
    by_path, by_name, by_bytes = client.submit([path, str(path), path.read_bytes()])
    assert by_path.digest == by_name.digest == by_bytes.digest
    assert by_path.tokens > 0
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        client.submit([tmp_path / "none.png"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
async def test_float32_equals_the_tensor(config: Config, dtype: str) -> None:
    def compare(endpoint: str) -> None:
        with BlockingClient.connect(endpoint) as client:
            (submitted,) = client.submit([photo(90, 60, 3)])
            with client.fetch([RowRequest(submitted.digest)]) as outcomes:
                (outcome,) = outcomes
                numbers, tensor, array = outcome.float32(), outcome.tensor(), outcome.array
            assert client.description.dtype == dtype
            assert numbers.dtype == np.float32
            assert np.array_equal(numbers, tensor.float().numpy())
            assert numbers.std() > 0
            assert client.description.row_bytes * len(numbers) == tensor.nbytes == array.nbytes

    config = replace(config, dtype=dtype)
    model = load_model(config)
    async with server_of(config, model) as server:
        await asyncio.to_thread(compare, server.endpoint)
    model.decoder.close()


def test_reading_rows_of_a_failed_image_raises_its_error(client: BlockingClient) -> None:
    with client.fetch([RowRequest(b"x" * 32)], grace_ms=0, timeout_s=PATIENCE_S) as outcomes:
        (outcome,) = outcomes
    for read in (lambda: outcome.array, outcome.float32, outcome.tensor):
        with pytest.raises(UnknownImageError):
            read()


async def test_rows_equal_those_of_the_asynchronous_client(
    client: BlockingClient, process: ServerProcess
) -> None:
    image = photo(200, 150, 1)
    blocking_rows = rows_of(client, image)
    async with await EncoderClient.connect(process.endpoint) as other:
        (submitted,) = await other.submit([image])
        async with other.fetch([RowRequest(submitted.digest)]) as outcomes:
            async_rows = [outcome.array.copy() async for outcome in outcomes]
    assert np.array_equal(blocking_rows, async_rows[0])


async def test_a_tenant_cannot_fetch_another_tenants_images(process: ServerProcess) -> None:
    image = photo(140, 90, 2)
    async with await EncoderClient.connect(process.endpoint, tenant_salt=b"one") as one:
        two = one.for_tenant(b"two")
        assert one.for_tenant(b"one") is one
        (submitted,) = await one.submit([image])
        for client, expected in ((one, type(None)), (two, UnknownImageError)):
            async with client.fetch([RowRequest(submitted.digest)], grace_ms=0, timeout_s=60) as outcomes:
                assert [type(outcome.error) async for outcome in outcomes] == [expected]


def test_kept_images_stay_submitted_until_they_are_closed(client: BlockingClient) -> None:
    images = [photo(96, 90, 81), photo(96, 90, 82)]
    with client.keep(images) as kept:
        assert [answer.error for answer in kept.answers] == [None] * 2
        requests = [RowRequest(answer.digest) for answer in kept.answers]
        with client.fetch(requests, kept=True, timeout_s=PATIENCE_S) as outcomes:
            assert [outcome.error for outcome in outcomes] == [None] * 2
        assert kept.error is None


def test_many_threads_share_one_client(client: BlockingClient) -> None:
    images = [photo(120 + 8 * number, 90, number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda image: rows_of(client, image), images * 2))
    for image, first, second in zip(images, together[:8], together[8:], strict=True):
        assert np.array_equal(first, second)
        assert np.array_equal(first, rows_of(client, image))


def test_a_bad_image_fails_alone(client: BlockingClient) -> None:
    good, bad = client.submit([photo(100, 80, 50), b"no image"])
    assert good.error is None
    assert isinstance(bad.error, InvalidImageError)


def test_leaving_a_fetch_early_releases_its_rows(client: BlockingClient) -> None:
    submitted = client.submit([photo(130, 90, seed) for seed in (60, 61, 62)])
    with client.fetch([RowRequest(image.digest) for image in submitted]) as outcomes:
        next(iter(outcomes))
    assert rows_of(client, photo(130, 90, 60)).shape[0] == submitted[0].tokens


def test_close_ends_running_and_later_calls(process: ServerProcess) -> None:
    client = BlockingClient.connect(process.endpoint)
    errors: list[BaseException] = []
    fetching = threading.Event()

    def wait_for_nothing() -> None:
        try:
            with client.fetch([RowRequest(b"\1" * 32)], grace_ms=30_000, timeout_s=60) as outcomes:
                fetching.set()
                list(outcomes)
        except UnavailableError as error:
            errors.append(error)

    thread = threading.Thread(target=wait_for_nothing)
    thread.start()
    assert fetching.wait(PATIENCE_S)
    time.sleep(0.1)  # until it waits
    client.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(errors) == 1
    client.close()
    with pytest.raises(UnavailableError, match="closed"):
        client.submit([photo(64, 64, 1)])


def test_a_failed_blocking_connect_leaves_no_thread(process: ServerProcess) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(ModelMismatchError):
        BlockingClient.connect(process.endpoint, model_fingerprint=b"\0" * 32)
    with pytest.raises(UnavailableError):
        BlockingClient.connect("127.0.0.1:1", timeout_s=0.3)
    assert "encoder-client" not in {thread.name for thread in threading.enumerate()} - before
