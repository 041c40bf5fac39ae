"""Tenants: separate rights, addresses and shares; a tenant cannot detect the images of another."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder_contract.digest import content_digest
from encoder_contract.errors import ForbiddenError, UnauthenticatedError, UnknownImageError
from encoder_contract.v1 import admin_pb2
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.admin_pb2_grpc import AdminServiceStub
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from tests.calls import begin_submit, connection, encoded, fetched, next_state, refused
from tests.cluster_replica import starting
from tests.counting import counted, stop_timers
from tests.tenants import TOKENS, As, with_token
from tests.waiting import PATIENCE_S, settled, soon

HASH = hashlib.sha256(TOKENS["chat"].encode()).hexdigest()


@pytest.mark.attack("a caller without a token, with an unknown one, or with the hash of one")
@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer somebody"),),
        (("authorization", "Bearer "),),
        (("authorization", TOKENS["chat"]),),
        (("authorization", f"Basic {TOKENS['chat']}"),),
        # The hashes in the file are not tokens.
        (("authorization", f"Bearer {HASH}"),),
    ],
    ids=["none", "unknown", "empty", "bare", "basic", "the hash"],
)
async def test_callers_without_a_tenant_are_unauthenticated_in_every_call(
    guard: Server, metadata: Any
) -> None:
    async with grpc.aio.insecure_channel(guard.endpoint) as channel:
        service: Any = EncoderServiceStub(channel)
        operator: Any = AdminServiceStub(channel)
        # No message is sent: otherwise gRPC's client might report its failed write instead of the answer.
        submit = service.Submit(metadata=metadata)
        request = pb.FetchRequest(images=[pb.FetchImage(digest=b"\1" * 32)])
        for call in (
            service.Describe(pb.DescribeRequest(), metadata=metadata),
            service.Fetch(request, metadata=metadata),
            submit,
            operator.Flush(admin_pb2.FlushRequest(proof=guard.store.segment.segment_id), metadata=metadata),
        ):
            code, details = await refused(call)
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert "tenant" in details
            if not metadata:
                assert "the call has neither" in details, "no token was sent, so none is unknown"
            is_hash = bool(metadata) and metadata[0][1].endswith(HASH)
            assert ("send the token of which it is the SHA-256" in details) == is_hash
        # Probes have no token.
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1


async def test_a_client_without_a_token_is_refused_at_once(guard: Server) -> None:
    with pytest.raises(UnauthenticatedError):
        await EncoderClient.connect(guard.endpoint, timeout_s=PATIENCE_S)


async def test_a_tenant_has_exactly_its_rights(as_tenant: As) -> None:
    picture = photo(64, 64, 1)
    async with as_tenant(TOKENS["chat"]) as chat:
        await encoded(chat, picture)
    async with as_tenant(TOKENS["reader"]) as reader:
        (submitted,) = await reader.submit([picture])
        assert isinstance(submitted.error, ForbiddenError)
        assert "tenant reader lacks the right `submit`: ask the server's operator" in str(submitted.error)
        assert isinstance((await fetched(reader, content_digest(picture))).error, UnknownImageError)
    async with as_tenant(TOKENS["ops"]) as ops:
        rows = await fetched(ops, content_digest(picture))
        assert isinstance(rows.error, ForbiddenError)


@pytest.mark.attack("an operator's call without the right or from another host")
async def test_operator_calls_need_the_right_and_the_host(
    guard: Server, as_tenant: As, tmp_path: Path
) -> None:
    from encoder_service.api.admin_client import OperatorError, run

    for name, token in TOKENS.items():
        for command in ("flush", "reload"):
            absent = str(tmp_path / "absent")
            answers = run(command, guard.endpoint, folder=absent, credentials=with_token(tmp_path, token))
            called = asyncio.to_thread(list, answers)
            if name != "ops":
                with pytest.raises(OperatorError, match="lacks the right `operate`"):
                    await called
            elif command == "flush":
                assert "entries dropped" in (await called)[0]
            else:
                with pytest.raises(OperatorError, match="the server goes on as before"):
                    await called
    async with as_tenant(TOKENS["ops"]) as ops:
        operator: Any = AdminServiceStub((await connection(ops)).channel)
        metadata = (("authorization", f"Bearer {TOKENS['ops']}"),)
        call = operator.Flush(admin_pb2.FlushRequest(proof=bytes(16)), metadata=metadata)
        assert (await refused(call))[0] is grpc.StatusCode.PERMISSION_DENIED


async def state_of(client: EncoderClient, token: str, digest: bytes, salt: bytes = b"") -> pb.ImageState:
    """Name an image without sending it, and return the answer."""
    metadata = (("authorization", f"Bearer {token}"),)
    name = pb.ImageName(digest=digest)
    call = await begin_submit(client, name, metadata=metadata, tenant_salt=salt, client_id="chat")
    state = await next_state(call)
    call.cancel()
    return state


async def test_a_tenant_can_neither_detect_nor_fetch_anothers_image(guard: Server, as_tenant: As) -> None:
    picture = photo(64, 64, 2)
    digest = content_digest(picture)
    async with as_tenant(TOKENS["chat"]) as chat, as_tenant(TOKENS["search"]) as search:
        (ours,) = await chat.submit([picture])
        assert (await fetched(chat, digest)).error is None
        assert (await state_of(chat, TOKENS["chat"], digest)).state == pb.STATE_CACHED
        # The answers do not differ between another tenant's image and an unknown one, with any salt or client name.
        stolen = guard.service._served.info.identity.fleet_key.salt("chat", b"")  # type: ignore[union-attr]
        for salt in (b"", b"chat", stolen):
            known = await state_of(search, TOKENS["search"], digest, salt)
            unknown = await state_of(search, TOKENS["search"], b"\2" * 32, salt)
            assert (known.state, known.tokens, known.HasField("grid")) == (
                unknown.state,
                unknown.tokens,
                unknown.HasField("grid"),
            )
            assert known.state == pb.STATE_NEEDS_BYTES
        assert isinstance((await fetched(search, digest)).error, UnknownImageError)
        (foreign,) = await search.submit([picture])
        assert not foreign.cached
        assert foreign.address != ours.address
        assert (await fetched(search, digest)).source in ("encoded", "host")


@pytest.mark.attack("a tenant that tries to find out what others sent, by answers or by timing")
async def test_timing_does_not_reveal_another_tenants_image(as_tenant: As) -> None:
    """For both, the server looks up an address that is not in the store. The test alternates between them, shuffled.

    A call takes longer after a hit, whose end the server still works on, so none may always come second.
    """
    order = Random(0)
    pictures = [photo(64, 64, seed) for seed in range(3, 11)]
    async with as_tenant(TOKENS["chat"]) as chat, as_tenant(TOKENS["search"]) as search:
        for submitted in await chat.submit(pictures):
            assert (await fetched(chat, submitted.digest)).error is None
        seconds: dict[str, list[float]] = {"foreign": [], "unknown": [], "ours": []}
        for number in range(160):
            asked = [
                ("foreign", search, content_digest(pictures[number % 8])),
                ("unknown", search, content_digest(b"%d" % number)),
                ("ours", chat, content_digest(pictures[number % 8])),
            ]
            order.shuffle(asked)
            for whose, client, digest in asked:
                began = time.perf_counter()
                rows = await fetched(client, digest)
                seconds[whose].append(time.perf_counter() - began)
                assert (rows.error is None) == (whose == "ours")
        # A leak would make one kind slower in most pairs, as it does for a hit. Chance moves the share by 0.03.
        assert 0.35 < _share_slower(seconds["foreign"], seconds["unknown"]) < 0.65


def _share_slower(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the share of the pairs of two times of which the first is the longer one: 0.5 for times of one kind."""
    return mean(one > other for one, other in product(some, others))


@pytest.fixture
def no_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_timers(monkeypatch)


@pytest.mark.usefixtures("no_timers")  # before the server starts
async def test_another_tenants_image_costs_the_same_work_as_an_unknown_one(as_tenant: As) -> None:
    """Every function of the server runs as often: no clock sees what the server does not do."""
    file = photo(64, 64, 3)
    async with as_tenant(TOKENS["chat"]) as chat, as_tenant(TOKENS["search"]) as search:
        for submitted in await chat.submit([file]):
            assert (await fetched(chat, submitted.digest)).error is None
        work: dict[str, Counter[str]] = {}
        for whose, client, digest in (
            ("foreign", search, content_digest(file)),
            ("unknown", search, content_digest(b"unknown")),
            ("ours", chat, content_digest(file)),
        ):
            rounds: list[Counter[str]] = []
            for _ in range(9):
                with counted() as calls:
                    await fetched(client, digest)
                    await settled()
                rounds.append(calls)
            # The typical round: the end of a call may come in the next one.
            names = {name for calls in rounds for name in calls}
            work[whose] = Counter({name: int(median(calls[name] for calls in rounds)) for name in names})
    assert +work["foreign"] == +work["unknown"]
    assert +work["ours"] != +work["unknown"]


async def test_a_tenant_has_one_share_under_any_client_name(guard: Server, as_tenant: As) -> None:
    """The claims in the queue have the name of their holder."""
    async with (
        as_tenant(TOKENS["chat"], client_id="a") as a,
        as_tenant(TOKENS["chat"], client_id="b") as b,
        as_tenant(TOKENS["search"], client_id="a") as c,
    ):
        streams = [
            client.fetch([RowRequest(bytes([n]) * 32)], grace_ms=20_000) for n, client in enumerate((a, b, c))
        ]
        waiting = [asyncio.ensure_future(anext(aiter(stream))) for stream in streams]
        room = guard.budgets.fetched_messages
        await soon(lambda: room.held == 3)
        assert dict(room._holders) == {"tenant chat": 2, "tenant search": 1}
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_tenants_find_their_images_through_any_replica(
    guarded: Config, model: Model, redis_url: str, tmp_path: Path
) -> None:
    async with starting(guarded, model, redis_url, with_token(tmp_path, TOKENS["chat"])) as start:
        a, b = await start(), await start()
        (submitted,) = await a.client.submit([photo(64, 64, 50)])
        made = await a.fetch(submitted.digest)
        assert made.error is None
        assert await b.cluster.wait_published(submitted.address, PATIENCE_S)
        brought = await b.fetch(submitted.digest)
        assert (brought.error, brought.source) == (None, "peer")
