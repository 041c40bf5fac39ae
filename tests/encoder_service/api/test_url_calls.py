"""ResolveUrl and RecordUrl, called by hand: who may, what is believed, and for how long."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api.url_calls import MAX_VALIDATOR_BYTES
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.model import Model
from encoder_service.engine.url_resolver import MAX_WAITING
from prefill_client import EncoderClient
from testing.photos import photo
from tests.calls import connection, refused, stub
from tests.servers import server_of
from tests.tenants import TOKENS, As

PHOTO = photo(96, 64, 51)
URL = content_digest(b"a url")


def record(**changed: Any) -> pb.UrlRecord:
    given = {"digest": content_digest(PHOTO), "size_bytes": len(PHOTO), "width": 96, "height": 64}
    return pb.UrlRecord(**{**given, **changed})


@pytest.fixture
async def sharing(config: Config, model: Model) -> AsyncIterator[Server]:
    async with server_of(config, model, share_urls="yes") as server:
        yield server


@pytest.fixture
async def sharer(sharing: Server) -> AsyncIterator[EncoderClient]:
    async with await EncoderClient.connect(sharing.endpoint) as client:
        yield client


async def resolved(client: EncoderClient, url: bytes = URL, **asked: Any) -> pb.ResolveUrlResponse:
    connected = await connection(client)
    request = pb.ResolveUrlRequest(**{"url_digest": url, "claim_ms": 60_000, **asked})
    answer: pb.ResolveUrlResponse = await (await stub(client)).ResolveUrl(
        request, metadata=connected.metadata(), timeout=60
    )
    return answer


async def recorded(client: EncoderClient, url: bytes = URL, **said: Any) -> None:
    connected = await connection(client)
    request = pb.RecordUrlRequest(**{"url_digest": url, "fresh_ms": 60_000, **said})
    await (await stub(client)).RecordUrl(request, metadata=connected.metadata(), timeout=60)


async def test_a_record_is_given_only_while_the_server_has_the_image(
    sharer: EncoderClient, sharing: Server
) -> None:
    await recorded(sharer, record=record(etag='"1"'))
    answer = await resolved(sharer)
    assert not answer.HasField("record")
    await recorded(sharer, claim=answer.claim)
    (submitted,) = await sharer.submit([PHOTO])
    assert submitted.error is None
    answer = await resolved(sharer)
    assert (answer.record, answer.fresh, answer.claim) == (record(etag='"1"'), True, b"")


async def test_who_waits_hears_what_the_claim_came_to(sharer: EncoderClient) -> None:
    await sharer.submit([PHOTO])
    claim = (await resolved(sharer)).claim
    waiting = [asyncio.create_task(resolved(sharer, wait_ms=30_000)) for _ in range(8)]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in waiting)
    await recorded(sharer, record=record(), claim=claim)
    assert {(task.record.digest, task.fresh) for task in await asyncio.gather(*waiting)} == {
        (content_digest(PHOTO), True)
    }


async def test_who_waits_for_a_claim_that_comes_to_nothing_gets_it(sharer: EncoderClient) -> None:
    claim = (await resolved(sharer)).claim
    waiting = asyncio.create_task(resolved(sharer, wait_ms=30_000))
    await asyncio.sleep(0.1)
    await recorded(sharer, claim=claim)
    answer = await waiting
    assert answer.claim
    assert answer.claim != claim


async def test_what_cannot_be_shared_is_downloaded_by_all_who_wait_at_once(sharer: EncoderClient) -> None:
    claim = (await resolved(sharer)).claim
    waiting = [asyncio.create_task(resolved(sharer, wait_ms=30_000)) for _ in range(4)]
    await asyncio.sleep(0.1)
    await recorded(sharer, unshared=True, claim=claim)
    assert await asyncio.gather(*waiting) == [pb.ResolveUrlResponse()] * 4


async def test_nobody_waits_longer_than_it_said_nor_when_too_many_do(
    sharer: EncoderClient, sharing: Server
) -> None:
    assert (await resolved(sharer)).claim
    assert await resolved(sharer, wait_ms=200) == pb.ResolveUrlResponse()
    assert await resolved(sharer) == pb.ResolveUrlResponse()
    room = sharing.service.urls._resolver._waiting
    room.take(("others",), MAX_WAITING)
    async with asyncio.timeout(20):
        assert await resolved(sharer, wait_ms=30_000) == pb.ResolveUrlResponse()
    room.give_back(("others",), MAX_WAITING)
    assert room.held == 0


async def test_a_drain_waits_for_nobody_who_waits(sharer: EncoderClient, sharing: Server) -> None:
    assert (await resolved(sharer)).claim
    waiting = asyncio.create_task(resolved(sharer, wait_ms=30_000))
    await asyncio.sleep(0.1)
    sharing.service.draining = True
    async with asyncio.timeout(20):
        assert await waiting == pb.ResolveUrlResponse()


async def test_a_record_lives_no_longer_than_the_server_lets_it(
    sharer: EncoderClient, sharing: Server
) -> None:
    await sharer.submit([PHOTO])
    kept: Any = sharing.cluster.url_records
    for fresh_ms, etag, unshared, fresh_s, ttl_s in (
        (2**32 - 1, '"1"', False, 3600, 4200),
        (2**32 - 1, "", False, 3600, 3600),
        (5000, '"1"', False, 5, 605),
        (0, '"1"', False, 0, 600),
        (2**32 - 1, "", True, 60, 60),
    ):
        now = asyncio.get_running_loop().time()
        said = {"unshared": True} if unshared else {"record": record(etag=etag)}
        await recorded(sharer, fresh_ms=fresh_ms, **said)
        ((_, entry),) = kept._records.items()
        assert fresh_s <= entry.fresh_until - now < fresh_s + 60
        assert ttl_s <= entry.ends_at - now < ttl_s + 60
    kept._records.clear()
    await recorded(sharer, fresh_ms=0, record=record())
    assert not len(kept._records), "what is stale and cannot be asked about is not worth keeping"


@pytest.mark.parametrize(
    "said",
    [
        {"url_digest": b""},
        {"url_digest": bytes(31)},
        {"claim": b"no claim"},
        {"record": record(), "unshared": True},
        {"record": record(digest=b"")},
        {"record": record(digest=bytes(33))},
        {"record": record(answered_by=b"x")},
        {"record": record(size_bytes=0)},
        {"record": record(size_bytes=2**63)},
        {"record": record(width=0)},
        {"record": record(width=2**32 - 1, height=2**32 - 1)},
        {"record": record(etag="e" * (MAX_VALIDATOR_BYTES + 1))},
        {"record": record(etag="é" * (MAX_VALIDATOR_BYTES // 2 + 1))},
        {"record": record(last_modified="a\r\nX-Injected: b")},
        {"caller": pb.Caller(model_fingerprint=bytes(32))},
        {"caller": pb.Caller(tenant_salt=bytes(65))},
    ],
    ids=str,
)
async def test_what_makes_no_sense_is_refused_and_nothing_is_kept(
    sharer: EncoderClient, sharing: Server, said: dict[str, Any]
) -> None:
    request = pb.RecordUrlRequest(**{"url_digest": URL, "fresh_ms": 60_000, "record": record(), **said})
    if "unshared" not in said and "claim" not in said and "record" not in said:
        asked = pb.ResolveUrlRequest(url_digest=request.url_digest, caller=request.caller)
        assert (await refused((await stub(sharer)).ResolveUrl(asked)))[0] in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    code, _ = await refused((await stub(sharer)).RecordUrl(request))
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    kept: Any = sharing.cluster.url_records
    assert not len(kept._records)


async def test_fields_that_a_server_does_not_know_are_not_kept_for_others(
    sharer: EncoderClient, sharing: Server
) -> None:
    padded = record().SerializeToString() + b"\xfa\x01\x10" + bytes(16)  # field 31
    await recorded(sharer, record=pb.UrlRecord.FromString(padded))
    kept: Any = sharing.cluster.url_records
    ((_, entry),) = kept._records.items()
    assert entry.content == record().SerializeToString()


async def test_callers_who_are_not_told_apart_share_only_if_the_operator_lets_them(
    client: EncoderClient, config: Config
) -> None:
    code, says = await refused((await stub(client)).ResolveUrl(pb.ResolveUrlRequest(url_digest=URL)))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "--share-urls yes" in says
    code, _ = await refused((await stub(client)).RecordUrl(pb.RecordUrlRequest(url_digest=URL)))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert not replace(config, share_urls="no").shares_urls
    assert replace(config, share_urls="yes").shares_urls


async def test_what_a_tenant_recorded_another_is_not_told_and_cannot_change(
    guard: Server, as_tenant: As
) -> None:
    async with as_tenant(TOKENS["chat"]) as chat, as_tenant(TOKENS["search"]) as search:
        for client in (chat, search):
            await client.submit([PHOTO])
        await recorded(chat, record=record(etag='"chat"'))
        answer = await resolved(search)
        assert (answer.HasField("record"), bool(answer.claim)) == (False, True), "as if nobody had asked"
        await recorded(search, record=record(etag='"search"'), claim=answer.claim)
        assert (await resolved(chat)).record.etag == '"chat"'
        assert (await resolved(search)).record.etag == '"search"'
        stolen = guard.service._info.identity._fleet_key.salt("chat", b"")  # type: ignore[union-attr]
        for salt in (b"chat", stolen):
            caller = pb.Caller(tenant_salt=salt, client_id="chat")
            assert not (await resolved(search, caller=caller)).HasField("record")
        claimed = (await resolved(chat, url=bytes(32))).claim
        assert claimed
        assert (await resolved(search, url=bytes(32))).claim, "nor is a claim of another's waited for"
        await recorded(search, url=bytes(32), claim=claimed)
        assert not (await resolved(chat, url=bytes(32))).claim, "nor ended by another"


async def test_an_image_of_another_tenant_does_not_count_as_there(guard: Server, as_tenant: As) -> None:
    async with as_tenant(TOKENS["chat"]) as chat, as_tenant(TOKENS["search"]) as search:
        await chat.submit([PHOTO])
        await recorded(search, record=record())
        assert not (await resolved(search)).HasField("record")


async def test_urls_need_the_right_to_submit(as_tenant: As) -> None:
    async with as_tenant(TOKENS["reader"]) as reader:
        for asking in (resolved(reader), recorded(reader)):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await asking
            assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "no right to submit" in str(refusal.value.details())
    async with grpc.aio.insecure_channel(await _endpoint(as_tenant)) as channel:
        call: Any = channel.unary_unary("/encoder_contract.v1.EncoderService/ResolveUrl")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(pb.ResolveUrlRequest(url_digest=URL).SerializeToString())
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def _endpoint(as_tenant: As) -> str:
    async with as_tenant(TOKENS["chat"]) as chat:
        return (await connection(chat)).endpoint


async def test_a_name_without_bytes_is_answered_with_not_found_where_they_are_needed(
    client: EncoderClient,
) -> None:
    call = (await stub(client)).Submit(timeout=20)
    await call.write(pb.SubmitRequest(open=pb.Caller()))
    names = [
        pb.ImageName(index=n, digest=content_digest(image), without_bytes=n == 0, size_bytes=len(image))
        for n, image in enumerate((photo(64, 64, 52), PHOTO))
    ]
    await call.write(pb.SubmitRequest(names=pb.ImageNames(names=names)))
    states = {(state := (await call.read()).state).index: state for _ in names}
    assert states[0].error.code == grpc.StatusCode.NOT_FOUND.value[0]
    assert states[1].state == pb.STATE_NEEDS_BYTES
    await call.write(pb.SubmitRequest(bytes=pb.ImageBytes(index=1, data=PHOTO, last=True)))
    assert (await call.read()).state.state == pb.STATE_QUEUED
    await call.done_writing()
    assert not (await call.read()).HasField("state")
    assert await call.code() is grpc.StatusCode.OK
