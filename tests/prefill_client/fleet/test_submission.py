"""Images that a client keeps submitted: their rows survive killed, drained and restarted servers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import DeadlineError, EncoderError, InvalidImageError, UnavailableError
from encoder_contract.header import Header
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, FetchedRows, RowRequest
from testing.photos import photo
from testing.processes import free_port
from testing.tcp_proxy import TcpProxy
from tests.calls import collect
from tests.gate import Gate
from tests.operator_view import flush
from tests.servers import kill, server_of
from tests.waiting import PATIENCE_S, START_S, soon, within_some_limit

PHOTOS = [photo(100 + number, 80, number) for number in range(6)]
WANTED = [RowRequest(content_digest(image)) for image in PHOTOS]


@asynccontextmanager
async def clients(*servers: Server) -> AsyncIterator[tuple[EncoderClient, EncoderClient]]:
    """One client that keeps the images and one that fetches their rows, like middleware and connector."""
    endpoints = [server.endpoint for server in servers]
    async with (
        await EncoderClient.connect(endpoints) as sender,
        await EncoderClient.connect(endpoints) as fetcher,
    ):
        yield sender, fetcher


async def rows(fetcher: EncoderClient) -> dict[int, FetchedRows]:
    outcomes = await collect(fetcher, WANTED, grace_ms=200, kept=True, transports=["inline"])
    for outcome in outcomes.values():
        assert outcome.error is None, outcome.error
    return outcomes


@pytest.mark.parametrize("way", ["killed", "drained"])
async def test_kept_images_of_a_lost_server_are_encoded_by_another(
    config: Config, model: Model, gate: Gate, way: str
) -> None:
    gated = replace(model, decoder=gate)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server_of(config, gated)) for _ in range(2)]
        sender, fetcher = await stack.enter_async_context(clients(*servers))
        with gate.closed():
            async with await sender.keep(PHOTOS) as kept:
                assert [answer.error for answer in kept.answers] == [None] * len(PHOTOS)
                fetching = asyncio.create_task(rows(fetcher))
                first = kept.answers[0].endpoint
                (gone,) = (server for server in servers if server.endpoint == first)
                (left,) = (server for server in servers if server.endpoint != first)
                await soon(lambda: len(gone.jobs) + len(left.jobs) >= len(PHOTOS))
                drain = asyncio.create_task(kill(gone) if way == "killed" else gone.drain())
                await soon(lambda: len(left.jobs) == len(PHOTOS))
                gate._open.set()
                assert len(await fetching) == len(PHOTOS)
                await soon(lambda: kept.error is None)
                await drain


async def test_kept_images_are_resubmitted_after_a_restart(config: Config, model: Model) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with (
        server_of(config, model, listen=listen) as server,
        clients(server) as (sender, fetcher),
        await sender.keep(PHOTOS) as kept,
    ):
        await kill(server)
        await soon(lambda: isinstance(kept.error, UnavailableError))
        fetching = asyncio.create_task(rows(fetcher))
        async with server_of(config, model, listen=listen):
            assert len(await fetching) == len(PHOTOS)
            await soon(lambda: kept.error is None)


async def test_kept_images_that_a_full_server_dropped_are_uploaded_again(server: Server) -> None:
    async with clients(server) as (sender, fetcher), await sender.keep(PHOTOS):
        first = await rows(fetcher)
        await flush(server)
        again = await rows(fetcher)
        assert all((first[index].array == again[index].array).all() for index in first)


async def test_kept_images_are_lost_if_no_server_accepts_them(config: Config, model: Model) -> None:
    async def lost(limit_s: float) -> bool:
        async with (
            server_of(config, model) as server,
            clients(server) as (sender, _),
            await sender.keep(PHOTOS, again_s=limit_s) as kept,
        ):
            await kill(server)
            async with asyncio.timeout(PATIENCE_S):
                error = await kept.lost()
            assert isinstance(error, UnavailableError | DeadlineError)
            return isinstance(error, UnavailableError)  # the last attempt was refused in time

    await within_some_limit(lost)


async def test_images_that_no_call_keeps_are_withdrawn(
    server: Server, client: EncoderClient, gate: Gate
) -> None:
    with gate.closed():
        kept = await client.keep([b"no image", *PHOTOS])
        assert isinstance(kept.answers[0].error, InvalidImageError)
        await soon(lambda: len(server.jobs) == len(PHOTOS))
        await kept.close()
        await soon(lambda: len(server.jobs) == 0)
        assert not kept._tasks


async def test_a_fetch_finds_a_kept_image_at_any_server(config: Config, model: Model) -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server_of(config, model)) for _ in range(3)]
        _, fetcher = await stack.enter_async_context(clients(*servers))
        for server in servers:
            async with await EncoderClient.connect(server.endpoint) as sender, await sender.keep(PHOTOS):
                await rows(fetcher)
                routed = [replace(each, submitted_to=server.endpoint) for each in WANTED]
                for kept in (True, False):
                    outcomes = await collect(fetcher, routed, grace_ms=0, kept=kept)
                    assert {outcome.endpoint for outcome in outcomes.values()} == {server.endpoint}
                await flush(server)


async def test_a_stalled_upload_is_retried(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = photo(64, 96, 70, "PNG") + bytes(3 << 20)
    async with server_of(config, model, limits={"upload_idle_s": 0.3}) as server:
        proxy = await TcpProxy(int(server.endpoint.rpartition(":")[2])).start()
        try:
            async with await EncoderClient.connect(f"127.0.0.1:{proxy.port}") as client:
                proxy.delay(0.2)  # each way: longer than the server waits for bytes
                sending = asyncio.create_task(client.submit([large], timeout_s=PATIENCE_S))
                none = b'submitted_images_total{outcome="failed",reason="deadline"} 0.0'
                await soon(lambda: none not in server.metrics.exposition())  # each stalled attempt counts
                # From now on no attempt stalls because the machine does: the client makes only a few.
                patient = replace(server.budgets, upload_idle_s=PATIENCE_S)
                monkeypatch.setattr(server.service, "_budgets", patient)
                proxy.mend()
                (answer,) = await sending
                assert answer.error is None
        finally:
            await proxy.stop()


class HeaderGate(Gate):
    """A decoder that reads no header either while it is closed."""

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:
        """Wait for the gate, then read."""
        assert self._open.wait(START_S), "the gate stayed closed"
        return super().read_header(file, formats)


async def test_a_submit_whose_time_is_up_keeps_the_answers_and_images_that_it_had(
    config: Config, model: Model
) -> None:
    """The header of a rare format is read by the decoder, which does not answer."""
    gate = HeaderGate(model.decoder)
    gated = replace(model, decoder=gate)  # type: ignore[arg-type]
    async with server_of(config, gated) as server, await EncoderClient.connect(server.endpoint) as client:
        with gate.closed():
            rare = photo(1200, 900, 62, "TIFF")
            assert len(rare) > client.description.max_message_bytes, "it does not come along with its name"

            async def partly(limit_s: float) -> bool:
                known, late = await client.submit([PHOTOS[0], rare], timeout_s=limit_s)
                assert isinstance(late.error, DeadlineError)
                return known.error is None

            await within_some_limit(partly)
            assert len(server.jobs) == 1
        await soon(lambda: server.budgets.upload_bytes.held == 0)  # the call has ended
        async with await EncoderClient.connect(server.endpoint) as fetcher:  # it has no file to submit again
            (outcome,) = (await collect(fetcher, WANTED[:1], grace_ms=0)).values()
        assert outcome.error is None
