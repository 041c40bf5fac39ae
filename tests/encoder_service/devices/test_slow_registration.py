"""A device's process reports before it maps and registers the store's memory, which takes 0.3 s per GiB."""

import threading
from typing import Any

import pytest

from encoder_service.devices import device_main
from encoder_service.devices.device_inbox import Inbox
from encoder_service.devices.model import Model
from testing.photos import photo
from tests.device_bench import demanded, running
from tests.waiting import PATIENCE_S


async def test_a_device_reports_while_it_maps_the_memory(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server kills a silent device, so one that registers before its first report would never start."""
    memory, tell, reported = device_main._memory, Inbox.tell, threading.Event()

    def slow(*args: Any) -> Any:
        assert reported.wait(PATIENCE_S)
        return memory(*args)

    def told(inbox: Inbox, report: Any) -> None:
        tell(inbox, report)
        reported.set()

    monkeypatch.setattr(device_main, "_memory", slow)
    monkeypatch.setattr(Inbox, "tell", told)
    async with running(model) as bench:
        with await bench.rows(photo(128, 128, 1), demanded("a")):
            pass
