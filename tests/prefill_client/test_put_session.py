"""Putting rows with the client: the documented example, a lost server, and several servers."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoder_contract.errors import InvalidRequestError, UnavailableError
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.model import Model
from prefill_client import EncoderClient, PutImage
from prefill_client.fleet.routing import IDLE_IMAGES, Router
from testing.processes import free_port
from testing.server_process import ServerProcess
from tests.processes import running
from tests.put_calls import GRID, PRODUCER, fetch_put, new_image, rows_for
from tests.servers import server_of
from tests.small_store import STORE_GIB
from tests.waiting import soon

PAGE = (Path(__file__).resolve().parents[2] / "docs/shared-store.md").read_text()


@pytest.fixture
async def servers(config: Config, model: Model) -> AsyncIterator[list[Server]]:
    async with (
        server_of(config, model, accept_put="yes") as one,
        server_of(config, model, accept_put="yes") as other,
    ):
        yield [one, other]


async def test_engines_that_follow_the_documented_steps_encode_each_image_once(
    servers: list[Server],
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(example, "example", "exec"), namespace)
    runs: list[bytes] = []
    async with await EncoderClient.connect(servers[0].endpoint) as client:

        async def run_tower(key: bytes) -> np.ndarray:
            runs.append(key)
            await asyncio.sleep(0.2)
            return rows_for(client, key[0])

        namespace["tower"] = run_tower
        engines = [namespace["rows_of"](client, PRODUCER, key, GRID) for key in (b"1", b"2", b"3") * 4]
        found = await asyncio.gather(*engines)
        assert sorted(runs) == [b"1", b"2", b"3"]
        for number, rows in enumerate(found):
            assert np.array_equal(rows, rows_for(client, b"123"[number % 3]))


def preferring(endpoint: str, endpoints: list[str], count: int) -> list[PutImage]:
    """Return new images that go to one server while all are up. Every other one is named by its digest."""
    found: list[PutImage] = []
    while len(found) < count:
        image = new_image(by_digest=len(found) % 2 == 0)
        if Router(endpoints).order(image.routed_by)[0] == endpoint:
            found.append(image)
    return found


async def test_names_and_fetches_go_to_the_same_server(servers: list[Server]) -> None:
    endpoints = [server.endpoint for server in servers]
    # Most prefer one endpoint: more images than the bound would otherwise allow there.
    images = preferring(endpoints[0], endpoints, IDLE_IMAGES + 8) + preferring(endpoints[1], endpoints, 4)
    async with await EncoderClient.connect(endpoints) as client:
        async with client.put(PRODUCER) as session:
            answers = await session.name(images)
            assert {answer.state for answer in answers} == {"yours"}
            assert {answer.endpoint for answer in answers} == {server.endpoint for server in servers}
            for number, answer in enumerate(answers):
                assert (await session.put(answer, rows_for(client, number))).state == "held"
        for number, image in enumerate(images):

            async def fetched(image: PutImage = image, number: int = number) -> bool:
                outcome = await fetch_put(client, image)
                return outcome.error is None and np.array_equal(outcome.array, rows_for(client, number))

            await soon(fetched)  # a server that was not heard of for a moment is passed by


async def test_rows_without_a_lease_cannot_be_put(servers: list[Server]) -> None:
    async with await EncoderClient.connect(servers[0].endpoint) as client:
        image = new_image()
        async with client.put(PRODUCER) as holder, client.put(PRODUCER) as second:
            await holder.name([image])
            (answer,) = await second.name([image])
            assert answer.state == "wait"
            failed = await second.put(answer, rows_for(client, 1))
            assert isinstance(failed.error, InvalidRequestError)


async def test_a_lost_server_fails_running_puts_and_is_used_again_later(
    checkpoint: Path,
) -> None:
    stores: dict[str, Any] = {"store_only": "yes", "accept_put": "yes"}
    with running(checkpoint, **stores, listen=f"127.0.0.1:{free_port()}") as first:
        async with await EncoderClient.connect(first.endpoint) as client:
            session = client.put(PRODUCER, timeout_s=30)
            (answer,) = await session.name([new_image()])
            first.kill()
            failed = await session.put(answer, rows_for(client, 1))
            assert (failed.state, isinstance(failed.error, UnavailableError)) == ("failed", True)
            (gone,) = await session.name([new_image()])
            assert isinstance(gone.error, UnavailableError)
            again = ServerProcess(checkpoint, **stores, listen=first.endpoint, store_host_gib=STORE_GIB)
            try:
                again.wait_until_it_listens()
                async with asyncio.timeout(60):
                    while (await session.name([new_image()]))[0].state != "yours":
                        await asyncio.sleep(0.1)
            finally:
                await session.close()
                again.kill()
