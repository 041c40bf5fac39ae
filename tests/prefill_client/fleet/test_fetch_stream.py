"""Fetches from several servers: if one does not answer, the client asks another."""

import asyncio
from itertools import cycle

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon

PICTURES = [photo(64, 64, seed) for seed in range(70, 86)]  # some are at home at each of two servers


async def fetched(client: EncoderClient, picture: bytes) -> EncoderError | None:
    """Fetch one; return its error."""
    requests = [RowRequest(content_digest(picture))]
    async with client.fetch(requests, grace_ms=60_000, timeout_s=2 * PATIENCE_S) as stream:
        return (await anext(aiter(stream))).error


async def test_calls_interrupted_by_a_drain_continue_at_another_server(config: Config, model: Model) -> None:
    async with (
        server_of(config, model, drain_s=0.1) as a,
        server_of(config, model, drain_s=0.1) as b,
        await EncoderClient.connect([a.endpoint, b.endpoint]) as client,
    ):
        waiting = asyncio.create_task(fetched(client, PICTURES[0]))
        rooms = {server: server.budgets.fetched_messages for server in (a, b)}
        await soon(lambda: any(room.held for room in rooms.values()))
        first_server, other = (a, b) if rooms[a].held else (b, a)
        await first_server.drain()
        await soon(lambda: rooms[other].held > 0)
        async with await EncoderClient.connect(other.endpoint) as submitter:
            await submitter.submit(PICTURES[:1])
        assert await waiting is None


async def test_calls_to_a_stopping_server_are_retried(config: Config, model: Model) -> None:
    """GRPC cancels such calls. The server has not started them, so a retry repeats nothing."""
    outcomes: list[EncoderError | None] = []

    async def ask(client: EncoderClient, first: int) -> None:
        for picture in cycle([*PICTURES[first:], *PICTURES[:first]]):
            outcomes.append(await fetched(client, picture))

    async def filled(server: Server) -> None:
        async with await EncoderClient.connect(server.endpoint) as client:
            await client.submit(PICTURES)
            for picture in PICTURES:
                assert await fetched(client, picture) is None

    async def more() -> None:
        begun = len(outcomes)
        await soon(lambda: len(outcomes) > begun + 100)

    async with server_of(config, model) as stays:
        await filled(stays)
        for _ in range(3):
            async with (
                server_of(config, model) as stops,
                await EncoderClient.connect([stays.endpoint, stops.endpoint]) as client,
            ):
                await filled(stops)
                asking = [asyncio.create_task(ask(client, n)) for n in range(16)]
                await more()
                await stops.drain()
                await more()
                for each in asking:
                    each.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
    assert set(outcomes) == {None}
