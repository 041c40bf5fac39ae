"""Calls with hundreds of names: the event loop handles a few at a time and polls its sockets in between."""

import asyncio
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import grpc
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.keys import ImageKey
from encoder_service.limits import NAMES_AT_A_TIME
from tests.calls import begin_submit, next_states, stub
from tests.servers import server_and_client
from tests.waiting import PATIENCE_S, within_some_limit


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_submit_of_hundreds_of_names_yields_the_loop(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_and_client(config, model) as (_, client):
        digests = [content_digest(n.to_bytes(4, "big")) for n in range(512)]
        named, tasks = 0, [len(asyncio.all_tasks())]
        key = messages.image_key

        def counted(*names: Any) -> ImageKey:
            nonlocal named
            named += 1
            return key(*names)

        async def passes(reading: Coroutine[Any, Any, object]) -> list[int]:
            """Return how many names were read in each pass of the loop while the answers of a call were read."""
            each, before = [], named
            task = asyncio.create_task(reading)
            while not task.done():
                await asyncio.sleep(0)
                each.append(named - before)
                tasks.append(len(asyncio.all_tasks()))
                before = named
            await task
            return each

        monkeypatch.setattr(messages, "image_key", counted)
        names = [pb.ImageName(index=n, digest=digest) for n, digest in enumerate(digests)]
        submit = await begin_submit(client, *names)
        assert max(await passes(next_states(submit, 512))) <= NAMES_AT_A_TIME
        assert named == 512
        assert max(now - before for before, now in pairwise(tasks)) <= NAMES_AT_A_TIME + 16
        submit.cancel()

        images = [pb.FetchImage(index=n, digest=digest) for n, digest in enumerate(digests)]

        async def all_wait(limit_s: float) -> bool:
            """Fetch all images, which wait for `limit_s`. Return whether all of them waited at one moment."""
            nonlocal named, tasks
            named, tasks = 0, [len(asyncio.all_tasks())]
            request = pb.FetchRequest(images=images, grace_ms=int(limit_s * 1000))
            fetch = (await stub(client)).Fetch(request, timeout=PATIENCE_S)
            assert max(await passes(read_to_the_end(fetch))) <= NAMES_AT_A_TIME
            assert named == 512
            assert max(now - before for before, now in pairwise(tasks)) <= NAMES_AT_A_TIME + 16
            return max(tasks) > 512

        await within_some_limit(all_wait)
