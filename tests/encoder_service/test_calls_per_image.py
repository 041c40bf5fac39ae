"""How many calls of our functions one image costs on the event loop. Counted, so that no clock disturbs it.

A number that changes by a tenth is news: if it fell, lower it here; if it rose, say in the commit what it pays for.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest

import encoder_service
from encoder_contract import arena, extents, turns
from encoder_service.config import Config
from encoder_service.devices import dispatcher, messages
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, RowRequest
from testing.device_thread import DeviceThread
from testing.photos import photo
from tests.servers import server_of

CALLS = {("miss", 1): 819, ("miss", 2): 842, ("hit", 1): 336, ("hit", 2): 336}
ROUNDS = 7
# The last three are mechanisms of the service that its clients share.
OURS = str(Path(encoder_service.__file__).parent), turns.__file__, extents.__file__, arena.__file__


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of our functions on this thread, by function; comprehensions and lambdas do not count."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and "<" not in code.co_name:
            calls[f"{Path(code.co_filename).name}:{code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


async def fetch(client: EncoderClient, file: bytes) -> None:
    """Submit an image, and fetch its rows inline."""
    [submitted] = await client.submit([file])
    async with client.fetch([RowRequest(submitted.digest)], transports=["inline"]) as rows:
        async for outcome in rows:
            assert outcome.error is None, outcome.error
    for _ in range(20):  # until the server has ended both calls
        await asyncio.sleep(0)


@pytest.mark.parametrize("devices", [1, 2])
async def test_an_image_costs_as_many_calls_as_before(
    config: Config, model: Model, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, interval in ((messages, "REPORT_S"), (dispatcher, "TICK_S")):
        monkeypatch.setattr(module, interval, 3600.0)  # they are paid by the second, not by the image
    threads = [DeviceThread(config, model, number, devices) for number in range(devices)]
    found: dict[str, list[Counter[str]]] = {"miss": [], "hit": []}
    async with (
        server_of(config, model, threads) as server,
        await EncoderClient.connect(server.endpoint) as client,
    ):
        await fetch(client, photo(256, 256, 0))
        for number in range(1, 1 + ROUNDS):
            for calls in found.values():
                with counted() as counts:
                    await fetch(client, photo(256, 256, number))
                calls.append(counts)
    for case, calls in found.items():
        typical = median(counts.total() for counts in calls)
        most = sum(calls, Counter()).most_common(10)
        assert typical == pytest.approx(CALLS[case, devices], rel=0.1), (case, most)
