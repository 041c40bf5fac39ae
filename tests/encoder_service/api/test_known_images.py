"""Names without files (`known_only`): kept if the fleet knows the image, else answered at once that it is unknown."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import LostImageError, Status, UnavailableError, UnknownImageError
from encoder_contract.geometry import Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.images import Images
from prefill_client import EncoderClient, Image, RowRequest
from prefill_client.images import read_images
from testing.clips import clip
from testing.photos import photo
from testing.processes import free_port
from testing.server_process import running as running_server
from tests.calls import LAST, all_encoded, collect, connection, next_states, stub
from tests.cluster_replica import starting
from tests.gate import Gate
from tests.operator_view import flush, numbers
from tests.servers import server_and_client, server_of
from tests.tenants import TOKENS, As
from tests.waiting import PATIENCE_S, soon, within_some_limit

PHOTO, OTHER = photo(120, 80, 771), photo(96, 64, 772)
LIE = 1 << 40


def nameless(client: EncoderClient, *files: bytes, submitted_to: str = "") -> list[Image]:
    """Return these images as another process knows them: without their files."""
    images = cast(list[Image], read_images(files, client.description.geometry))
    return [replace(image, data=b"", submitted_to=submitted_to) for image in images]


async def ask(client: EncoderClient, *names: pb.ImageName, salt: bytes = b"") -> list[pb.ImageState]:
    """Return the server's answers to names without files, in order, after the call has ended."""
    metadata = (await connection(client)).metadata()
    call = (await stub(client)).Submit(timeout=PATIENCE_S, metadata=metadata)
    named = pb.ImageNames(names=names, known_only=True)
    await call.write(pb.SubmitRequest(open=pb.Caller(tenant_salt=salt), names=named, last=True))
    states = await next_states(call, len(names))
    await ended(call)
    return sorted(states, key=lambda state: state.index)


async def ended(call: Any) -> None:
    while await call.read():
        pass


def name_of(file: bytes, index: int = 0, **fields: Any) -> pb.ImageName:
    return pb.ImageName(index=index, digest=content_digest(file), **fields)


def holds_nothing(server: Server) -> bool:
    return server.budgets.upload_bytes.held == server.jobs.scheduler.queued.images == len(server.jobs) == 0


async def stored(server: Server, client: EncoderClient, *files: bytes) -> None:
    await all_encoded(client, files, transports=["inline"])
    await soon(lambda: server.store.stats().pins == 0)


async def test_a_stored_a_queued_and_an_evicted_image_are_kept_by_their_names(
    server: Server, client: EncoderClient, gate: Gate
) -> None:
    await stored(server, client, PHOTO)
    async with await EncoderClient.connect(server.endpoint) as engine:
        kept = await engine.keep_known(nameless(engine, PHOTO))
        assert [(answer.error, answer.cached) for answer in kept.answers] == [(None, True)]
        await kept.close()
        server.store.flush()
        uploaded = (await numbers(server)).total("uploaded_bytes_total")
        with gate.closed():
            await client.submit([OTHER])
            kept = await engine.keep_known(nameless(engine, PHOTO, OTHER))
            assert [(answer.error, answer.cached) for answer in kept.answers] == [(None, False)] * 2
            assert len(server.jobs) == 2, "the evicted one is encoded again, from its file"
            assert (await numbers(server)).total("uploaded_bytes_total") == uploaded + len(OTHER)
        requests = [RowRequest(answer.digest) for answer in kept.answers]
        for rows in (await collect(engine, requests, kept=True)).values():
            assert rows.error is None
        await kept.close()


async def test_an_image_that_only_its_keeper_wants_is_withdrawn_with_it(
    server: Server, client: EncoderClient, gate: Gate
) -> None:
    with gate.closed():
        rendered = await client.keep([PHOTO])
        async with await EncoderClient.connect(server.endpoint) as engine:
            kept = await engine.keep_known(nameless(engine, PHOTO))
            await rendered.close()
            assert len(server.jobs) == 1
            await kept.close()
            await soon(lambda: holds_nothing(server))


@pytest.mark.parametrize("way", ["leave", "close"])
async def test_kept_images_stay_submitted_or_are_withdrawn(
    server: Server, client: EncoderClient, gate: Gate, way: str
) -> None:
    with gate.closed():
        kept = await client.keep([PHOTO, OTHER])
        if way == "leave":
            await kept.leave()
            assert len(server.jobs) == 2
            (answer,) = await ask(client, name_of(PHOTO))
            assert answer.state == pb.STATE_QUEUED
        else:
            await kept.close()
            await soon(lambda: holds_nothing(server))


@pytest.mark.attack("a name without a file, with lies about its size, its grid and its file")
@pytest.mark.parametrize("lie", ["none", "size", "file", "another's file", "kept", "all_or_nothing", "video"])
async def test_an_unknown_image_is_answered_at_once_and_costs_nothing(
    server: Server, client: EncoderClient, lie: str
) -> None:
    name = name_of(PHOTO, size_bytes=LIE if lie != "none" else 0, video=lie == "video")
    named = pb.ImageNames(
        names=[name], known_only=True, kept=lie == "kept", all_or_nothing=lie == "all_or_nothing"
    )
    files = {"file": PHOTO, "another's file": OTHER}
    pieces = [pb.ImageBytes(data=files[lie], last=True)] if lie in files else []
    call = (await stub(client)).Submit(timeout=PATIENCE_S)
    await call.write(pb.SubmitRequest(open=pb.Caller(), names=named, bytes=pieces))
    (state,) = await next_states(call, 1)
    assert (state.state, state.error.code) == (pb.STATE_FAILED, Status.NOT_FOUND.value)
    assert state == pb.ImageState(state=pb.STATE_FAILED, error=state.error)
    assert holds_nothing(server)
    await call.write(pb.SubmitRequest(bytes=[pb.ImageBytes(data=PHOTO, last=True)]))
    await call.write(LAST)
    await ended(call)
    assert holds_nothing(server), "pieces that nobody asked for are ignored"
    (state,) = await ask(client, name_of(PHOTO))
    assert state.state == pb.STATE_FAILED


@pytest.mark.attack("a name without a file, with lies about its size, its grid and its file")
async def test_a_wrong_grid_gets_no_other_answer_than_with_a_file(
    server: Server, client: EncoderClient
) -> None:
    await stored(server, client, PHOTO)
    (image,) = nameless(client, PHOTO)
    for grid in (Grid(1, 2, 2), Grid(1, 3, 1 << 20)):
        (state,) = await ask(client, replace(image, grid=grid).to_message(0))
        assert (state.state, state.error.code) == (pb.STATE_FAILED, Status.INVALID_ARGUMENT.value)
        [answer] = await client.submit([replace(image, data=PHOTO, grid=grid)])
        assert answer.error is not None
        assert answer.error.message == state.error.message


async def test_an_unknown_image_is_so_at_a_full_server_too(config: Config, model: Model, gate: Gate) -> None:
    async with server_and_client(config, gate.before(model), max_queued_images=4) as (_, client):
        with gate.closed():
            await client.submit([photo(64, 48, seed) for seed in range(3)])
            states = await ask(client, *(name_of(b"%d" % index, index) for index in range(100)))
            assert {state.error.code for state in states} == {Status.NOT_FOUND.value}


@pytest.mark.attack("a tenant that asks for another's images by their names alone")
@pytest.mark.parametrize("what", ["rows", "file"])
async def test_a_tenant_learns_nothing_of_anothers_images(guard: Server, as_tenant: As, what: str) -> None:
    async with as_tenant(TOKENS["chat"]) as chat, as_tenant(TOKENS["search"]) as search:
        await stored(guard, chat, PHOTO)
        if what == "file":
            guard.store.flush()
        for salt in (b"", b"chat", b"tenant chat"):
            (theirs,) = await ask(search, name_of(PHOTO), salt=salt)
            (nobodys,) = await ask(search, name_of(OTHER), salt=salt)
            digests = (content_digest(file).hex() for file in (PHOTO, OTHER))
            theirs.error.message = theirs.error.message.replace(*digests)
            assert theirs == nobodys, "no field tells more"
        assert [state.state for state in await ask(chat, name_of(PHOTO))] != [pb.STATE_FAILED]


@pytest.mark.attack("a flood of names without files")
async def test_a_flood_of_unknown_names_holds_nothing_and_delays_nobody(
    server: Server, client: EncoderClient
) -> None:
    most = client.description.max_images_per_call

    async def flood(number: int) -> None:
        files = [b"%d %d" % (number, index) for index in range(most)]
        states = await ask(client, *(name_of(file, index) for index, file in enumerate(files)))
        assert {state.state for state in states} == {pb.STATE_FAILED}

    flooding = [asyncio.create_task(flood(number)) for number in range(24)]
    async with await EncoderClient.connect(server.endpoint, client_id="other") as other:
        await stored(server, other, PHOTO)
        await asyncio.gather(*flooding)
    assert len(server.jobs) == 0
    assert server.budgets.upload_bytes.held == 0
    assert not server.images.unsubmitted._waiters


async def test_a_lost_kept_image_is_told_when_a_fetch_wants_it(server: Server, client: EncoderClient) -> None:
    await stored(server, client, PHOTO, OTHER)
    async with await EncoderClient.connect(server.endpoint) as engine:
        kept = await engine.keep_known(nameless(engine, PHOTO, OTHER))
        await stored(server, engine, OTHER)
        await flush(server)
        async with engine.fetch([RowRequest(content_digest(PHOTO))], kept=True) as stream:
            reading = asyncio.ensure_future(anext(aiter(stream)))
            async with asyncio.timeout(PATIENCE_S):
                assert isinstance(await kept.lost(), LostImageError)
            # Whoever has the file brings it back, for the Fetch that still waits too.
            assert (await client.submit([PHOTO]))[0].error is None
            assert (await reading).error is None
        await kept.close()


async def test_a_lost_image_is_requested_from_who_has_its_file(server: Server, client: EncoderClient) -> None:
    kept = await client.keep([PHOTO])
    await stored(server, client, PHOTO)
    async with await EncoderClient.connect(server.endpoint) as engine:
        known = await engine.keep_known(nameless(engine, PHOTO))
        await flush(server)
        (rows,) = (await collect(engine, [RowRequest(content_digest(PHOTO))], kept=True)).values()
        assert rows.error is None
        await known.close()
    await kept.close()


async def test_the_client_asks_one_server_after_the_other(config: Config, model: Model) -> None:
    async with (
        server_of(config, model) as first,
        server_of(config, model) as second,
        await EncoderClient.connect([first.endpoint, second.endpoint]) as engine,
    ):
        # One that connects late counts as down until its health is known.
        is_up = engine._pool.router.is_up
        await soon(lambda: is_up(first.endpoint) and is_up(second.endpoint))
        photos = [photo(64, 48, 300 + seed) for seed in range(6)]
        for server, some in ((first, photos[:3]), (second, photos[3:])):
            async with await EncoderClient.connect(server.endpoint) as render:
                await stored(server, render, *some)
        for hint in ("", first.endpoint, "nowhere.example:1"):
            kept = await engine.keep_known(nameless(engine, *photos, OTHER, submitted_to=hint))
            assert [answer.error for answer in kept.answers[:6]] == [None] * 6
            at = [first.endpoint] * 3 + [second.endpoint] * 3
            assert [answer.endpoint for answer in kept.answers[:6]] == at
            assert isinstance(kept.answers[6].error, LostImageError)
            await kept.close()


async def test_an_older_server_is_noticed_by_its_question_for_the_file(
    server: Server, client: EncoderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older server ignores the field: it looks such names up as others."""
    monkeypatch.setattr(Images, "lookup_known", Images.lookup)
    await stored(server, client, PHOTO)
    kept = await client.keep_known(nameless(client, PHOTO, OTHER))
    assert kept.answers[0].error is None
    assert isinstance(kept.answers[1].error, LostImageError)
    await kept.close()
    await soon(lambda: holds_nothing(server))


@pytest.mark.attack("a server killed between the Submit of an image and its use by name")
async def test_images_of_a_killed_server_are_lost_at_once(checkpoint: Path) -> None:
    # The second server listens there too: on no port that the system gives to others in between.
    with running_server(checkpoint, listen=f"127.0.0.1:{free_port()}") as killed:
        endpoint = killed.endpoint
        async with (
            await EncoderClient.connect(endpoint) as render,
            await EncoderClient.connect(endpoint) as engine,
        ):
            assert (await render.submit([PHOTO]))[0].error is None
            (image,) = nameless(engine, PHOTO, submitted_to=endpoint)
            kept = await engine.keep_known([image])
            assert kept.answers[0].error is None
            killed.kill()

            async def is_unavailable(limit_s: float) -> bool:
                down = await engine.keep_known([image], timeout_s=limit_s)
                assert not isinstance(down.answers[0].error, UnknownImageError)
                return isinstance(down.answers[0].error, UnavailableError)

            await within_some_limit(is_unavailable)
            with running_server(checkpoint, listen=endpoint):
                async with asyncio.timeout(PATIENCE_S):
                    assert isinstance(await kept.lost(), LostImageError)
                again = await engine.keep_known([image])
                assert isinstance(again.answers[0].error, LostImageError)
                assert (await render.submit([PHOTO]))[0].error is None
                again = await engine.keep_known([image])
                assert again.answers[0].error is None
                await again.close()
            await kept.close()


async def test_an_image_of_a_peer_is_known(config: Config, model: Model, redis_url: str) -> None:
    async with starting(config, model, redis_url) as start:
        a, b = await start(), await start()
        (image,) = nameless(a.client, PHOTO)
        grid = image.to_message(0).grid
        with a.gate.closed():
            assert (await a.client.submit([PHOTO]))[0].error is None
            (state,) = await ask(b.client, image.to_message(0))
            assert (state.state, state.grid) == (pb.STATE_QUEUED, grid)
            (state,) = await ask(b.client, name_of(PHOTO))
            assert state.state == pb.STATE_FAILED, "its grid is not known here"
            (state,) = await ask(b.client, name_of(OTHER))
            assert state.state == pb.STATE_FAILED
            (rows,) = [asyncio.create_task(b.fetch(image.digest))]
        assert (await rows).error is None
        assert (await a.client.submit([OTHER]))[0].error is None, "no lease was taken for it"
        assert await b.cluster.wait_published(a.address(content_digest(OTHER)), PATIENCE_S)
        (state,) = await ask(b.client, name_of(OTHER))
        assert state.state == pb.STATE_CACHED


async def test_frames_of_a_video_are_known_by_their_names(server: Server, client: EncoderClient) -> None:
    file = clip(frames=8)
    (state,) = await ask(client, name_of(file, video=True))
    assert state.state == pb.STATE_FAILED
    await client.probe([file], [content_digest(file)])
    (state,) = await ask(client, name_of(file, video=True))
    assert (state.state, state.video.frames) == (pb.STATE_PROBED, 8)
