"""Images that requests name by `uuid`, as vLLM's cache has them: a request need not send them again. No engine runs."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prefill_client import EncoderClient
from prefill_client.media.destinations import Destinations
from prefill_client.media.image_loader import ImageLoader
from prefill_client.plugin.door import Door
from prefill_client.vllm.image_service import ImageService
from prefill_client.vllm.request_images import CHAT, RequestImages
from testing.photos import data_url
from tests.image_host import BODY, image_host

OLD, NEW = b"an older image", b"a newer image"


def request(*urls: str | None) -> RequestImages:
    """Return a request with these images, the first of which has a `uuid`."""
    parts = [{"type": "image_url", "image_url": url and {"url": url}} for url in urls]
    content = [{**parts[0], "uuid": "mine"}, *parts[1:]]
    return RequestImages({"messages": [{"role": "user", "content": content}]}, form=CHAT)


async def test_a_request_with_an_older_image_of_a_uuid_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("0" * 64)
    extra = {"endpoints": "127.0.0.1:1", "name_key_file": str(tmp_path / "key")}
    config = SimpleNamespace(ec_transfer_config=SimpleNamespace(ec_connector_extra_config=extra))
    service = ImageService(config, SimpleNamespace(), None)
    async with image_host() as host:
        loader = ImageLoader(Destinations([host.name]), max_bytes=1 << 20, timeout_s=30)
        door = Door(cast(EncoderClient, None), loader)  # which only loads

        async def files(*urls: str | None) -> list[Any]:
            media = await service._media(request(*urls), door, "x", "")
            return [file for medium in media for file in medium.files]

        assert await files(data_url(OLD)) == [OLD]
        host.answering.clear()
        slow = asyncio.create_task(files(None, f"http://{host.name}/a"))
        while not host.requests:
            await asyncio.sleep(0.01)
        assert await files(data_url(NEW)) == [NEW]
        host.answering.set()
        assert await slow == [OLD, BODY]
        assert await files(None) == [NEW]
