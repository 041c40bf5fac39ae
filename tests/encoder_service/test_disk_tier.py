"""A server with `--store-disk`: rows that left memory, or that an earlier server had, are served bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoder_contract.settings import ConfigError
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, FetchedRows, RowRequest
from testing.photos import photo
from tests.calls import collect, encoded
from tests.operator_view import numbers
from tests.servers import server_and_client, server_of
from tests.waiting import soon

PHOTOS = [photo(320 + 32 * number, 320, 40 + number) for number in range(12)]
MIB = 1 / 1024  # in GiB


def small_memory(config: Config, model: Model, folder: Path, **settings: Any) -> Any:
    return server_and_client(config, model, store_host_gib=2 * MIB, store_disk=str(folder), **settings)


async def fetched(client: EncoderClient, digest: bytes) -> FetchedRows:
    (rows,) = (await collect(client, [RowRequest(digest)], transports=["inline"])).values()
    assert rows.error is None, rows.error
    return rows


def on_disk(server: Server) -> int:
    return server.store.stats().tiers[-1].entries


async def encode(server: Server, client: EncoderClient) -> dict[bytes, FetchedRows]:
    """Encode all photos, and wait until some rows are only on the disk."""
    rows: dict[bytes, FetchedRows] = {}
    for file in PHOTOS:
        found = await encoded(client, file, transports=["inline"])
        rows[found.digest] = found
        await soon(lambda: not server.store.moves.is_host_low)
    await soon(lambda: on_disk(server) >= 6)
    return rows


async def encodes(server: Server) -> float:
    return (await numbers(server)).total("encoded_images_total")


async def test_rows_that_left_memory_are_read_back(config: Config, model: Model, tmp_path: Path) -> None:
    async with small_memory(config, model, tmp_path / "rows", source_gib=0.0) as (server, client):
        rows = await encode(server, client)
        hits = 0
        for digest, before in rows.items():
            # Rows whose next use is unlikely may leave memory without a file, but not once there is room.
            await soon(lambda: not server.store.moves.is_host_low)
            is_held, count = server.store.contains(before.address), await encodes(server)
            again = await fetched(client, digest)
            assert np.array_equal(again.float32(), before.float32())
            assert await encodes(server) == count + (not is_held)
            hits += is_held
        assert hits >= 6
        assert (await numbers(server)).total("store_hits_total", tier="disk") >= 4


async def test_a_restarted_server_serves_what_was_left(config: Config, model: Model, tmp_path: Path) -> None:
    async with small_memory(config, model, tmp_path / "rows", source_gib=0.0) as (server, client):
        rows = await encode(server, client)
    async with small_memory(config, model, tmp_path / "rows", source_gib=0.0) as (server, client):
        found = {file.address for file in server.store.disk.files()}  # type: ignore[union-attr]
        assert len(found) >= 6
        for file in PHOTOS:
            (answer,) = await client.submit([file])
            assert answer.cached == (answer.address in found)
            again = await fetched(client, answer.digest)
            assert np.array_equal(again.float32(), rows[answer.digest].float32())
        assert await encodes(server) == len(PHOTOS) - len(found)


async def test_a_damaged_file_is_encoded_again(config: Config, model: Model, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    async with small_memory(config, model, folder) as (server, client):
        rows = await encode(server, client)
        for path in folder.iterdir():
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        for digest, before in rows.items():
            again = await fetched(client, digest)
            assert np.array_equal(again.float32(), before.float32())
        assert (await numbers(server)).total("store_damaged_files_total") >= 6
        assert (await numbers(server)).total("store_disk_off") == 0


async def test_a_folder_in_use_is_refused_in_one_line(config: Config, model: Model, tmp_path: Path) -> None:
    settings = {"store_disk": str(tmp_path / "rows")}
    async with server_of(config, model, **settings):
        with pytest.raises(ConfigError, match="is in use by another server: name a folder for each"):
            async with server_of(config, model, **settings):
                pass
