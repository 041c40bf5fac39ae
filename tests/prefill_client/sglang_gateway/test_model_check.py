"""Families whose rows only the service counts: SGLang gets grids in patches, or the gateway does not start."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from encoder_contract.errors import ModelMismatchError
from encoder_contract.processor import ProcessorSettings
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model, load_model
from prefill_client import EncoderClient, RowRequest, content_digest
from prefill_client.sglang_gateway.frames import SUPPORTED
from prefill_client.sglang_gateway.gateway import TOO_MANY_TOKENS
from prefill_client.sglang_gateway.model_check import SERVED, check_family
from testing.photos import data_url, photo
from tests.processes import run
from tests.servers import server_of
from tests.sglang_gateways import RunningGateway, gateway_for
from tests.sglang_receiver import LanguageServer

IMAGES = {size: photo(*size, seed) for seed, size in enumerate([(300, 220), (97, 401), (640, 480)])}
GATEWAY = ("encoder-sglang-gateway", "--listen", "127.0.0.1:0", "--encoder")


@pytest.fixture(scope="module")
def folder(kept_family: Callable[..., Path]) -> Path:
    """The checkpoint of `generic`."""
    return kept_family("qwen2_vl")


@pytest.fixture
async def service(config: Config, generic: Model) -> AsyncIterator[Server]:
    async with server_of(config, generic) as server:
        yield server


@pytest.fixture
async def gateway(service: Server) -> AsyncIterator[RunningGateway]:
    async with await EncoderClient.connect(service.endpoint) as client, gateway_for(client) as gateway:
        yield gateway


async def test_parts_have_grids_in_patches_and_the_services_rows(
    gateway: RunningGateway, folder: Path
) -> None:
    client, geometry = gateway.gateway._client, ProcessorSettings.from_folder(folder).geometry
    assert client.description.geometry is None
    expected = [list(geometry.grid(*size)) for size in IMAGES]
    urls = [data_url(image) for image in IMAGES.values()]
    async with LanguageServer(gateway.url, ranks=2) as sglang:
        separate = await sglang.to_tokenizer(*([url] for url in urls))
        (together,) = (await sglang.to_scheduler(urls)).parts
    rows = []
    async with client.fetch([RowRequest(content_digest(image)) for image in IMAGES.values()]) as stream:
        async for outcome in stream:
            rows.append((outcome.index, outcome.array))
    rows.sort(key=lambda each: each[0])
    assert [message.data.grid_dim for message in separate.parts] == [[grid] for grid in expected]
    assert together.data.grid_dim == expected
    for message, (_, right) in zip(separate.parts, rows, strict=True):
        np.testing.assert_array_equal(message.rows, right)
    np.testing.assert_array_equal(together.rows, np.concatenate([right for _, right in rows]))


async def test_the_stand_in_of_a_failed_part_fits_its_grid(gateway: RunningGateway) -> None:
    damaged = data_url(photo(640, 480, 9)[:2000])
    async with LanguageServer(gateway.url) as sglang:
        (whole,) = (await sglang.to_scheduler([damaged])).parts
        first, _ = (await sglang.to_scheduler([damaged], [data_url(IMAGES[300, 220])])).parts
    assert whole.data.shape == [TOO_MANY_TOKENS, 1]
    assert np.prod(whole.data.grid_dim) == 4 * TOO_MANY_TOKENS
    assert (first.data.grid_dim, first.data.shape[0]) == ([[1, 2, 2]], 1)


async def test_another_checkpoint_of_such_a_family_is_refused_at_start(
    service: Server, folder: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    settings = json.loads((other / "processor_config.json").read_text())
    settings["image_processor"]["image_mean"] = [0.1, 0.2, 0.3]
    (other / "processor_config.json").write_text(json.dumps(settings))
    done = await asyncio.to_thread(run, *GATEWAY, service.endpoint, "--language-model", other)
    assert done.returncode == 1
    assert "vision weights or processor files: " in done.stderr
    assert done.stderr.count("\n") == 1


async def test_a_family_that_sglang_does_not_start_for_is_refused_at_start(
    config: Config, kept_family: Callable[..., Path]
) -> None:
    config = replace(config, model=kept_family("paligemma"))
    async with server_of(config, load_model(config)) as server:
        done = await asyncio.to_thread(run, *GATEWAY, server.endpoint)
    assert done.returncode == 1
    assert "cannot serve 'paligemma'" in done.stderr
    assert f"SGLang {SUPPORTED[0]} to {SUPPORTED[-1]} does not start" in done.stderr
    assert ", ".join(SERVED) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("kimi_k25", "SGLang runs it with code from the checkpoint"),
        ("glm5_next", "its rows were not compared with those of SGLang's own tower"),
    ],
)
async def test_a_family_that_was_not_compared_is_refused_with_the_reason(
    service: Server, model_type: str, why: str
) -> None:
    async with await EncoderClient.connect(service.endpoint) as client:
        check_family(client.description)
        with pytest.raises(ModelMismatchError, match=f"cannot serve '{model_type}'.*{why}"):
            check_family(replace(client.description, model_type=model_type))
