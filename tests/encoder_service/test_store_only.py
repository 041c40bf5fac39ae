"""A store-only server: it needs no weights, stores rows that clients put or peers hold, and refuses Submit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from encoder_contract.errors import ModelMismatchError
from encoder_contract.geometry import grid_of_rows
from encoder_contract.producer import EngineKey
from encoder_service.config import Config, ConfigError
from encoder_service.engine.model import Model, load_model
from prefill_client import EncoderClient, PutImage
from testing.photos import photo
from testing.server_process import ServerProcess
from tests.cluster_replica import starting
from tests.processes import running
from tests.put_calls import PRODUCER, fetch_put, new_image, rows_for
from tests.waiting import soon


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """The configuration of the checkpoint, without its weights."""
    for file in checkpoint.glob("*.json"):
        if "safetensors" not in file.name:
            shutil.copy(file, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    return tmp_path


@pytest.fixture
def stores(config: Config, model: Model, folder: Path) -> Config:
    """Settings of a server that only stores, in the fleet of the model."""
    return replace(
        config,
        model=folder,
        store_only="yes",
        accept_put="yes",
        model_fingerprint=model.recipe.model.hex(),
    )


async def test_a_store_only_server_serves_put_rows_and_refuses_images(folder: Path, model: Model) -> None:
    with running(folder, store_only="yes", accept_put="yes") as server:
        assert any("stores only" in line for line in server.lines)
        async with await EncoderClient.connect(server.endpoint) as client:
            ours = client.description
            assert (ours.width, ours.dtype) == (model.tower.width, model.recipe.dtype)
            assert ours.geometry == model.tower.geometry
            assert ours.processor_fingerprint == model.recipe.processor
            assert ours.model_fingerprint != model.recipe.model, "it has no weights to tell"
            image, rows = new_image(), rows_for(client, 1)
            async with client.put(PRODUCER) as session:
                assert (await session.put((await session.name([image]))[0], rows)).state == "held"
            assert np.array_equal((await fetch_put(client, image)).array, rows)
            (submitted,) = await client.submit([photo(64, 64, 1)])
            assert isinstance(submitted.error, ModelMismatchError)
            assert "--store-only" in str(submitted.error)


# Of a family that has no tower of the server's own, and to which nothing of `transformers` is needed.
GEMMA = {
    "model_type": "gemma3",
    "text_config": {"hidden_size": 2560},
    "vision_config": {"model_type": "siglip_vision_model"},
    "dtype": "bfloat16",
}


async def put_and_fetch(server: ServerProcess, width: int) -> None:
    """Put rows that are named by their number alone, and fetch them as another client."""
    async with (
        await EncoderClient.connect(server.endpoint) as client,
        await EncoderClient.connect(server.endpoint) as other,
    ):
        assert (client.description.width, client.description.geometry) == (width, None)
        image = PutImage(grid_of_rows(7, client.description.geometry), engine_key=EngineKey("test", b"k"))
        rows = np.arange(7 * width, dtype=np.uint16).reshape(7, width) % 256  # bfloat16 as the client has it
        async with client.put(PRODUCER) as session:
            assert (await session.put((await session.name([image]))[0], rows)).state == "held"
        assert np.array_equal((await fetch_put(other, image)).array, rows)


async def test_rows_of_any_model_are_stored_from_its_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    with running(tmp_path, store_only="yes", accept_put="yes", dtype="auto") as server:
        await put_and_fetch(server, 2560)


async def test_rows_of_a_model_without_a_folder_are_stored_by_their_width() -> None:
    settings = {"row_width": 5120, "dtype": "bfloat16"}
    with running(Path("org/a-model"), store_only="yes", accept_put="yes", **settings) as server:
        assert any("a-model" in line for line in server.lines)
        await put_and_fetch(server, 5120)


def test_a_store_only_server_needs_a_row_width(stores: Config, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA, "text_config": {}}))
    with pytest.raises(ConfigError, match="names no hidden_size of a language model: say --row-width"):
        load_model(replace(stores, model=tmp_path))
    for changed in ({"store_only": "no", "model_fingerprint": ""}, {"dtype": "auto"}):
        with pytest.raises(ConfigError, match="--row-width needs --store-only and --dtype"):
            replace(stores, row_width=64, **changed)


def test_model_fingerprint_must_be_valid_and_needs_store_only(stores: Config) -> None:
    assert load_model(stores).recipe.model.hex() == stores.model_fingerprint
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        replace(stores, model_fingerprint="abc")
    with pytest.raises(ConfigError, match="--store-only"):
        replace(stores, store_only="no")
    with pytest.raises(ConfigError, match="--store-device-gib"):
        replace(stores, store_device_gib=1.0)
    with pytest.raises(ConfigError, match="neither"):
        load_model(replace(stores, store_only="no", model_fingerprint=""))


async def test_in_a_mixed_fleet_each_replica_serves_rows_of_the_other(
    config: Config, model: Model, stores: Config, redis_url: str
) -> None:
    only = {"store_only": "yes", "model": stores.model, "model_fingerprint": stores.model_fingerprint}
    async with starting(replace(config, accept_put="yes", put_lease_s=60.0), model, redis_url) as start:
        encoder, store = await start(), await start(load_model(stores), **only)
        await soon(lambda: len(store.index.peers()) == len(encoder.index.peers()) == 1)
        image, rows = new_image(), rows_for(store.client, 2)
        async with store.client.put(PRODUCER) as ours, encoder.client.put(PRODUCER) as theirs:
            (mine,) = await ours.name([image])
            assert [answer.state for answer in await theirs.name([image])] == ["wait"]
            assert (await ours.put(mine, rows)).state == "held"
        brought = await fetch_put(encoder.client, image, grace_ms=30_000)
        assert (brought.error, brought.source) == (None, "peer")
        assert np.array_equal(brought.array, rows)

        (submitted,) = await encoder.client.submit([photo(300, 200, 71)])
        made = await encoder.fetch(submitted.digest)
        kept = await store.fetch(submitted.digest, grace_ms=30_000)
        assert (kept.error, kept.source) == (None, "peer")
        assert kept.array.tobytes() == made.array.tobytes()
        assert await encoder.encodes() == 1
