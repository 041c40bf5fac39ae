"""A service that takes connections and does not answer: a request waits `submit_timeout_s` for it, and no longer."""

import asyncio
import logging
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from encoder_contract.errors import DeadlineError, UnavailableError
from prefill_client.media.destinations import Destinations
from prefill_client.plugin.door import Door
from prefill_client.plugin.service import WatchedClient
from prefill_client.sglang.sglang_settings import SglangSettings
from testing.answers import data_url
from testing.photos import photo
from tests.vllm.restartable import Restartable
from tests.waiting import within_some_limit


@pytest.mark.story("the service hangs")
@pytest.mark.parametrize("connected", [False, True], ids=["at the connection", "at the images"])
def test_a_request_waits_for_a_hung_service_as_long_as_the_setting_says(
    checkpoint: Path, connected: bool
) -> None:
    """Earlier, the waits for a connection and for answers were added up: 15 s for a setting of 10."""
    from prefill_client.sglang.processors.qwen import EncoderServiceProcessor

    service = Restartable(checkpoint)
    service.start()

    async def waits_no_longer(limit_s: float) -> bool:
        settings = SglangSettings.read({"endpoints": service.endpoint, "submit_timeout_s": limit_s})
        # Without an engine's configuration.
        processor = EncoderServiceProcessor.__new__(EncoderServiceProcessor)
        processor._settings = settings
        door = WatchedClient(partial(Door.open, settings, Destinations(())), logging.getLogger())
        processor._door = door
        try:
            if connected:
                with suppress(DeadlineError, UnavailableError):
                    await processor._encoded([data_url(photo(100, 80, 1))], "first")
            if door.down is not None:
                return False  # the limit is too short for this machine
            service.signal(signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises((DeadlineError, UnavailableError)):
                await processor._encoded([data_url(photo(100, 80, 2))], "second")
            waited_s = time.monotonic() - began
            assert door.down is not None, "the next request does not wait"
            return waited_s < 1.25 * limit_s
        finally:
            await door.close()
            service.signal(signal.SIGCONT)

    try:
        asyncio.run(within_some_limit(waits_no_longer))
    finally:
        service.kill()
