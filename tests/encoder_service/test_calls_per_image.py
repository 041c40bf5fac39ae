"""How many calls of our functions one image costs on the event loop. Counted, so that no clock disturbs it.

A number that changes by a tenth is news: if it fell, lower it here; if it rose, say in the commit what it pays for.
"""

from collections import Counter
from statistics import median

import pytest

from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, RowRequest
from testing.device_thread import DeviceThread
from testing.photos import photo
from tests.counting import counted, stop_timers
from tests.servers import server_and_client
from tests.waiting import settled

CALLS = {("miss", 1): 711, ("miss", 2): 728, ("hit", 1): 250, ("hit", 2): 250}
ROUNDS = 7


async def fetch(client: EncoderClient, file: bytes) -> None:
    """Submit an image, and fetch its rows inline."""
    [submitted] = await client.submit([file])
    async with client.fetch([RowRequest(submitted.digest)], transports=["inline"]) as rows:
        async for outcome in rows:
            assert outcome.error is None, outcome.error
    await settled()


@pytest.mark.parametrize("devices", [1, 2])
async def test_an_image_costs_as_many_calls_as_before(
    config: Config, model: Model, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_timers(monkeypatch)
    threads = [DeviceThread(config, model, number, devices) for number in range(devices)]
    found: dict[str, list[Counter[str]]] = {"miss": [], "hit": []}
    async with server_and_client(config, model, threads) as (_, client):
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
