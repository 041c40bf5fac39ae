"""Of the clients of a fleet one downloads a URL, while its host lets it be kept; the others submit what it found."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import InvalidImageError, UnavailableError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.model import Model
from prefill_client import Image
from prefill_client.media.url_digest import shared_digest
from prefill_client.reference.http_service import Limits
from testing.photos import photo
from tests.image_host import Host, image_host
from tests.language_servers import Start, language_servers, lose
from tests.operator_view import numbers
from tests.prefill_client.reference.test_http_service import serving, user
from tests.servers import server_of
from tests.waiting import soon

PHOTO = photo(96, 64, 31)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with image_host() as host:
        host.body = PHOTO
        yield host


@pytest.fixture
async def sharing(config: Config, model: Model) -> AsyncIterator[Server]:
    """A server whose operator lets everybody share."""
    async with server_of(config, model, share_urls="yes") as server:
        yield server


@pytest.fixture
async def start(sharing: Server, host: Host) -> AsyncIterator[Start]:
    """Return what starts a language server."""
    async with language_servers(sharing, host) as start:
        yield start


async def test_one_downloads_and_the_other_gets_the_rows_by_what_it_found(
    start: Start, host: Host, sharing: Server
) -> None:
    a, b = await start(), await start()
    url = f"http://{host.name}/a?signature=secret"
    made = await a.submit(url)
    await a.told()
    named = await b.loader.open(url, b.client)
    assert isinstance(named, Image)
    assert (named.data, named.digest) == (b"", content_digest(PHOTO))
    assert (await b.submit(url)).array.tobytes() == made.array.tobytes()
    assert len(host.asked) == 1
    now = await numbers(sharing)
    assert now.total("encoded_images_total", outcome="kept") == 1
    answers = {each: now.total("resolved_urls_total", answer=each) for each in ("claimed", "fresh")}
    assert answers == {"claimed": 1, "fresh": 2}
    kept = sharing.cluster.url_records._records.values()  # type: ignore[attr-defined]
    assert not [each for each in kept if b"secret" in each.content], "a server learns no URL"


async def test_of_many_who_ask_at_once_one_downloads(start: Start, host: Host) -> None:
    servers = [await start() for _ in range(6)]
    host.answering.clear()
    asking = [asyncio.create_task(each.submit(f"http://{host.name}/a")) for each in servers * 3]
    await soon(lambda: len(host.asked) == 1)
    await asyncio.sleep(0.5)  # the others have asked by now; a machine where they have not proves less
    host.answering.set()
    rows = {outcome.array.tobytes() for outcome in await asyncio.gather(*asking)}
    assert (len(rows), len(host.asked)) == (1, 1)


@pytest.mark.parametrize("forbids", ["no-store", "private, max-age=600", "max-age=600\r\nVary: *"])
async def test_what_may_not_be_kept_is_downloaded_by_each_and_nobody_waits_for_another(
    start: Start, host: Host, forbids: str
) -> None:
    host.headers, host.etag = f"Cache-Control: {forbids}", '"1"'
    a, b = await start(), await start()
    for each in (a, b):
        await each.submit(f"http://{host.name}/a")
        await each.told()
    assert len(host.asked) == 2
    assert not [request for request in host.asked if b"If-None-Match" in request]


async def test_what_is_stale_is_asked_about_and_not_downloaded_again(start: Start, host: Host) -> None:
    host.headers, host.etag = "Cache-Control: no-cache", '"1"'
    a, b = await start(), await start()
    made = await a.submit(f"http://{host.name}/a")
    await a.told()
    assert isinstance(await b.loader.open(f"http://{host.name}/a", b.client), Image)
    await b.told()
    assert (await b.submit(f"http://{host.name}/a")).array.tobytes() == made.array.tobytes()
    assert [b"If-None-Match" in request for request in host.asked] == [False, True, True]
    host.etag, host.body = '"2"', photo(64, 96, 32)
    await b.told()
    assert (await b.submit(f"http://{host.name}/a")).grid != made.grid, "it has changed"


async def test_what_was_reached_over_a_redirect_is_asked_about_where_it_is(start: Start, host: Host) -> None:
    host.headers, host.etag, host.moved["/a"] = "Cache-Control: no-cache", '"1"', "/b"
    a, b = await start(), await start()
    await a.submit(f"http://{host.name}/a")
    await a.told()
    await b.submit(f"http://{host.name}/a")
    asked = [(request.split()[1], b"If-None-Match" in request) for request in host.asked]
    assert asked == [(b"/a", False), (b"/b", False), (b"/a", False), (b"/b", True)]
    await b.told()
    host.moved["/a"] = "/c"
    await a.submit(f"http://{host.name}/a")
    assert b"If-None-Match" not in host.asked[-1], "what another URL answered says nothing of this one"


async def test_one_of_those_who_find_it_stale_asks_for_all(start: Start, host: Host) -> None:
    host.headers, host.etag = "Cache-Control: no-cache", '"1"'
    a, *others = [await start() for _ in range(5)]
    await a.submit(f"http://{host.name}/a")
    await a.told()
    host.headers = "Cache-Control: max-age=600"
    await asyncio.gather(*(each.submit(f"http://{host.name}/a") for each in others))
    assert len(host.asked) == 2


async def test_clients_of_another_salt_or_other_rules_share_nothing(start: Start, host: Host) -> None:
    url = f"http://{host.name}/a"
    await (a := await start()).submit(url)
    await a.told()
    other_salt, other_rules = await start(tenant_salt=b"another"), await start("10.0.0.0/8")
    for number, other in enumerate((other_salt, other_rules), start=2):
        assert isinstance(await other.loader.open(url, other.client), bytes)
        assert len(host.asked) == number
    same_rules = await start(host.name.upper())
    assert isinstance(await same_rules.loader.open(url, same_rules.client), Image)


async def test_a_downloader_that_died_is_waited_for_no_longer_than_its_claim(
    start: Start, host: Host
) -> None:
    dead, b = await start(), await start(timeout_s=120)
    allowed = b.loader._loader.allowed(f"http://{host.name}/a")
    digest = shared_digest(allowed, b.loader._loader.destinations)
    claim = await dead.client.url_calls.resolve(digest, wait_s=0, claim_s=0.5)
    assert claim.claim
    async with asyncio.timeout(30):
        await b.submit(f"http://{host.name}/a")
    await b.told()
    c = await start()
    assert isinstance(await c.loader.open(f"http://{host.name}/a", c.client), Image)
    assert len(host.asked) == 1


async def test_a_downloader_that_takes_long_is_waited_for_half_the_time_of_a_download(
    start: Start, host: Host
) -> None:
    slow, b = await start(), await start(timeout_s=2)
    digest = shared_digest(b.loader._loader.allowed(f"http://{host.name}/a"), b.loader._loader.destinations)
    assert (await slow.client.url_calls.resolve(digest, wait_s=0, claim_s=60)).claim
    assert isinstance(await b.loader.open(f"http://{host.name}/a", b.client), bytes)


async def test_a_download_that_fails_makes_way_for_all_who_wait(start: Start, host: Host) -> None:
    servers = [await start() for _ in range(4)]
    host.body = bytes(2 << 20)  # over the limit
    asking = [each.loader.open(f"http://{host.name}/a", each.client) for each in servers]
    failed = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(each, InvalidImageError) for each in failed)
    assert len(host.asked) == 4


async def test_an_image_that_the_server_has_lost_is_downloaded_again(
    start: Start, host: Host, sharing: Server
) -> None:
    a, b = await start(), await start()
    url = f"http://{host.name}/a"

    await a.submit(url)
    await a.told()
    named = await b.loader.open(url, b.client)
    assert isinstance(named, Image)
    await lose(sharing)
    (submitted,) = await b.client.submit([named])
    assert (submitted.error, len(host.asked)) == (None, 2), "lost between looking it up and submitting it"
    await b.fetch(submitted.digest)
    c = await start()
    named = await c.loader.open(url, c.client)
    (submitted,) = await c.client.submit([named])
    await lose(sharing)
    assert (await c.fetch(submitted.digest)).source == "encoded"
    assert len(host.asked) == 3, "lost between submitting and fetching it"
    await c.told()
    await lose(sharing)
    d = await start()
    assert isinstance(await d.loader.open(url, d.client), bytes)
    assert len(host.asked) == 4, "lost before it was looked up"


async def test_an_image_that_changed_when_its_bytes_are_needed_is_an_error_that_a_new_request_mends(
    start: Start, host: Host, sharing: Server
) -> None:
    a, b = await start(), await start()
    url = f"http://{host.name}/a"
    await a.submit(url)
    await a.told()
    named = await b.loader.open(url, b.client)
    await lose(sharing)
    host.body = photo(64, 96, 33)
    whole = photo(80, 80, 34)
    changed, other = await b.client.submit([named, whole])
    assert isinstance(changed.error, UnavailableError)
    assert "changed" in changed.error.message
    assert other.error is None
    assert (await b.submit(url)).digest == content_digest(host.body)


async def test_without_a_server_that_shares_each_downloads(start: Start, host: Host, server: Server) -> None:
    """Callers that are not told apart could tell each other anything: a server lets them only if it is told to."""
    a, b = await start(endpoint=server.endpoint), await start(endpoint=server.endpoint)
    for each in (a, b):
        await each.submit(f"http://{host.name}/a")
    assert len(host.asked) == 2
    assert a.loader._rest_until > 0


async def test_without_a_server_a_url_is_downloaded(start: Start, host: Host, sharing: Server) -> None:
    a = await start()
    await sharing.drain()
    assert await a.loader.open(f"http://{host.name}/a", a.client) == PHOTO


async def test_records_that_make_no_sense_are_not_used(start: Start, host: Host) -> None:
    b = await start()
    await b.client.submit([PHOTO])
    calls, digest = b.client.url_calls, content_digest(PHOTO)
    for number, given in enumerate(
        (
            pb.UrlRecord(digest=digest, size_bytes=2 << 20, width=96, height=64),  # over our limit
            pb.UrlRecord(digest=digest, size_bytes=1, width=90_000, height=1),  # no image of this model
        )
    ):
        url = f"http://{host.name}/{number}"
        shared = shared_digest(b.loader._loader.allowed(url), b.loader._loader.destinations)
        await calls.record(pb.RecordUrlRequest(url_digest=shared, record=given, fresh_ms=60_000))
        assert (await calls.resolve(shared, wait_s=0, claim_s=1)).fresh
        assert await b.loader.open(url, b.client) == PHOTO


async def test_two_reference_services_answer_about_a_url_that_one_of_them_downloaded(
    start: Start, host: Host, checkpoint: Path
) -> None:
    a, b = await start(), await start()
    question = user("What is this?", f"http://{host.name}/a")
    answers = []
    for each in (a, b):
        async with serving(each.client, checkpoint, Limits(), loader=each.loader) as service:
            answers.append(await service.ask(question))
        await each.told()
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens
    assert len(host.asked) == 1
