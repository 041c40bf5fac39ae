"""Calls with hundreds of names: the event loop handles a few at a time and polls its sockets in between."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.keys import ImageKey
from encoder_service.limits import NAMES_AT_A_TIME
from prefill_client import EncoderClient
from tests.calls import stub
from tests.servers import server_of


async def read(call: Any, count: int) -> None:
    for _ in range(count):
        await call.read()


async def test_a_submit_of_hundreds_of_names_yields_the_loop(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_of(config, model) as server, await EncoderClient.connect(server.endpoint) as client:
        digests = [content_digest(n.to_bytes(4, "big")) for n in range(512)]
        named, tasks = 0, [len(asyncio.all_tasks())]
        key = messages.image_key

        def counted(*names: Any) -> ImageKey:
            nonlocal named
            named += 1
            return key(*names)

        async def passes(call: Any) -> list[int]:
            """Return how many names were read in each pass of the loop while a call ran."""
            each, before = [], named
            while not call.done():
                await asyncio.sleep(0)
                each.append(named - before)
                tasks.append(len(asyncio.all_tasks()))
                before = named
            return each

        monkeypatch.setattr(messages, "image_key", counted)
        submit = (await stub(client)).Submit(timeout=60)
        await submit.write(pb.SubmitRequest(open=pb.Caller()))
        names = [pb.ImageName(index=n, digest=digest) for n, digest in enumerate(digests)]
        await submit.write(pb.SubmitRequest(names=pb.ImageNames(names=names)))
        answers = asyncio.create_task(read(submit, 512))
        assert max(await passes(answers)) <= NAMES_AT_A_TIME
        submit.cancel()

        images = [pb.FetchImage(index=n, digest=digest) for n, digest in enumerate(digests)]
        fetch = (await stub(client)).Fetch(pb.FetchRequest(images=images, grace_ms=3000), timeout=60)
        assert max(await passes(asyncio.create_task(read(fetch, 512)))) <= NAMES_AT_A_TIME
        assert named == 1024
        assert max(tasks) > 512, "each unknown image has a task that waits for it"
        assert max(now - before for before, now in pairwise(tasks)) <= NAMES_AT_A_TIME + 16
