"""A request with one failed image: work on its other images ends with the answer."""

import asyncio
from pathlib import Path

import openai
import pytest

from encoder_contract.errors import ForbiddenError
from encoder_contract.turns import Room
from prefill_client import EncoderClient
from prefill_client.media.destinations import Destinations
from prefill_client.media.image_loader import ImageLoader
from prefill_reference.http_service import Limits
from tests.prefill_reference.test_http_service import serving, user
from tests.waiting import soon

FORBIDDEN = "http://host/forbidden.jpg"


class Endless(ImageLoader):
    """Refuses one URL once the other downloads have started. Those never end by themselves."""

    def __init__(self, others: int) -> None:
        super().__init__(Destinations([]), max_bytes=1 << 20, timeout_s=1)
        self.begun = asyncio.Barrier(others + 1)
        self.running = 0

    async def load(self, url: str, lookups: Room | None = None) -> bytes:
        self.running += 1
        try:
            await self.begun.wait()
            if url == FORBIDDEN:
                raise ForbiddenError("not this one")
            return await asyncio.get_running_loop().create_future()
        finally:
            self.running -= 1


async def test_a_failed_image_cancels_the_other_downloads(client: EncoderClient, checkpoint: Path) -> None:
    others = ["http://host/1.jpg", "http://host/2.jpg"]
    loader = Endless(len(others))
    async with serving(client, checkpoint, Limits(), loader=loader) as service:
        with pytest.raises(openai.PermissionDeniedError, match="not this one"):
            await service.ask(user("What?", FORBIDDEN, *others))
        await soon(lambda: loader.running == 0)
