"""Images by URL are downloaded once: concurrent requests share a download, and the cache follows HTTP freshness."""

import asyncio
import gzip
import ssl
from collections.abc import AsyncIterator

import pytest
import trustme

from encoder_contract.errors import ImageLimitError, InvalidImageError
from prefill_client.media.destinations import Destinations
from prefill_client.media.download import ImageHostError
from prefill_client.media.image_loader import ImageLoader
from tests.image_host import BODY, Host, image_host
from tests.waiting import PATIENCE_S, soon


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with image_host() as host:
        yield host


async def test_a_url_is_fetched_once_while_it_is_fresh(host: Host) -> None:
    loader = host.loader()
    for _ in range(3):
        assert await loader.load(f"http://{host.name}/a") == BODY
    assert await loader.load(f"HTTP://{host.name}/a#part") == BODY, "the same resource, written otherwise"
    assert len(host.requests) == 1
    await loader.load(f"http://{host.name}/a?other")
    assert len(host.requests) == 2


async def test_concurrent_requests_share_one_download(host: Host) -> None:
    host.headers, loader = "Cache-Control: no-store", host.loader()
    host.answering.clear()
    asking = [asyncio.create_task(loader.load(f"http://{host.name}/a")) for _ in range(50)]
    await soon(lambda: bool(host.requests))
    for task in asking[::2]:
        task.cancel()
    await asyncio.sleep(0)
    host.answering.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert found[1::2] == [BODY] * 25
    assert len(host.requests) == 1
    assert await loader.load(f"http://{host.name}/a") == BODY
    assert len(host.requests) == 2, "an uncacheable image is not cached"


async def test_a_download_without_waiters_ends(host: Host) -> None:
    loader = host.loader()
    host.answering.clear()
    asking = asyncio.create_task(loader.load(f"http://{host.name}/a"))
    await soon(lambda: bool(host.requests))
    asking.cancel()
    await asyncio.wait_for(host.ended.wait(), PATIENCE_S)
    host.answering.set()
    assert await loader.load(f"http://{host.name}/a") == BODY


@pytest.mark.parametrize(
    "says",
    [
        *("Cache-Control: no-cache", "Expires: Sun, 06 Nov 1994 08:49:37 GMT"),
        "Cache-Control: no-store\r\nCache-Control: max-age=3600",
    ],
)
async def test_a_response_that_may_not_be_reused_is_downloaded_again(host: Host, says: str) -> None:
    host.headers, loader = says, host.loader()
    for host.body in (BODY, b"another"):
        assert await loader.load(f"http://{host.name}/a") == host.body


async def test_a_response_without_lifetime_is_fresh_for_the_default(host: Host) -> None:
    host.headers = "X-Says: nothing"
    for seconds, requests in ((3600.0, 1), (0.0, 2)):
        host.requests.clear()
        loader = host.loader(default_fresh_s=seconds)
        for _ in range(2):
            await loader.load(f"http://{host.name}/a")
        assert len(host.requests) == requests


async def test_the_image_cache_is_bounded(host: Host) -> None:
    host.body = bytes(1000)
    loader = host.loader(cache_bytes=2500)
    for number in (1, 2, 3, 1, 3):
        assert await loader.load(f"http://{host.name}/{number}") == host.body
    assert len(host.requests) == 4, "the third evicted the first"
    host.body = bytes(3000)
    assert len(await loader.load(f"http://{host.name}/larger-than-all")) == 3000


@pytest.mark.parametrize(("forbids", "requests"), [("max-age=3600", 2), ("no-store", 4), ("private", 4)])
async def test_a_redirected_image_is_cached_only_if_the_redirect_allows_it(
    host: Host, forbids: str, requests: int
) -> None:
    host.moved["/a"], host.moved_headers = "/b", f"Cache-Control: {forbids}"
    loader = host.loader()
    for _ in range(2):
        assert await loader.load(f"http://{host.name}/a") == BODY
    assert len(host.requests) == requests


async def test_a_failure_is_not_cached(host: Host) -> None:
    loader = host.loader()
    host.body, good = bytes(2 << 20), host.body
    with pytest.raises(ImageLimitError):
        await loader.load(f"http://{host.name}/a")
    host.body = good
    assert await loader.load(f"http://{host.name}/a") == BODY


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "zstd", "deflate", "aws-chunked, gzip"])
async def test_a_compressed_body_is_refused(host: Host, encoding: str) -> None:
    host.body = gzip.compress(bytes(50 << 20))
    host.headers = f"Content-Encoding: {encoding}"
    with pytest.raises(InvalidImageError, match="compressed"):
        await host.loader().load(f"http://{host.name}/a")


async def test_a_certificate_is_checked() -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    async with image_host(tls=context) as host:
        url = f"https://localhost:{host.port}/a"
        rules = Destinations([f"localhost:{host.port}", "127.0.0.0/8"])
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)

        async def resolve(_host: str, _port: int) -> list[str]:
            return ["127.0.0.1"]

        ours = ImageLoader(rules, max_bytes=1 << 20, timeout_s=30, tls=trusting, resolve=resolve)
        assert await ours.load(url) == BODY
        strangers = ImageLoader(rules, max_bytes=1 << 20, timeout_s=30, resolve=resolve)
        with pytest.raises(ImageHostError, match="certificate"):
            await strangers.load(url)
