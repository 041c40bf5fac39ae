"""Rows in shared memory that are held for long or lost: a reader never gets another image's rows."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from hashlib import sha256

import numpy as np
import pytest

from encoder_contract.errors import DeadlineError, StaleHandleError
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import (
    EncoderClient,
    FetchedRows,
    FetchStream,
    PrefetchSession,
    RowRequest,
    expand_prompt,
    plan,
    read,
)
from testing.photos import photo
from tests.calls import encoded
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon, within_some_limit

# The store has room for seven of these embeddings. Eight others evict every embedding that is not held.
SIDE, ROOM, OTHERS = 256, 7, 8


@pytest.fixture
async def small(config: Config, model: Model) -> AsyncIterator[Server]:
    """A server whose store is almost full."""
    rows_bytes = (SIDE // 32) ** 2 * model.tower.width * 4
    async with server_of(config, model, store_host_gib=ROOM * rows_bytes / (1 << 30)) as server:
        yield server


async def written_over(client: EncoderClient, seed: int = 100) -> None:
    """Encode other images until all rows that are not held are evicted and their pages reused."""
    for n in range(OTHERS):
        await encoded(client, photo(SIDE, SIDE, seed + n), transports=["inline"])


async def submitted(client: EncoderClient, seed: int) -> tuple[RowRequest, np.ndarray]:
    """Submit an image; return its request, and its rows as received inline."""
    rows = await encoded(client, photo(SIDE, SIDE, seed), transports=["inline"])
    return RowRequest(rows.digest), rows.array


def lose(server: Server, stream: FetchStream) -> Awaitable[None]:
    """End the calls of a fetch as a lost connection does, and wait until the server has released them."""
    for call in stream._streams:
        call._call.cancel()
    return soon(lambda: server.store.stats().pins == 0)


async def test_the_timeout_bounds_the_wait_but_not_how_long_rows_are_held(small: Server) -> None:
    async with await EncoderClient.connect(small.endpoint) as client:
        request, expected = await submitted(client, 1)

        async def came_in_time(limit_s: float) -> bool:
            async with client.fetch([request], timeout_s=limit_s) as stream:
                outcome = await anext(aiter(stream))
                if isinstance(outcome.error, DeadlineError):
                    return False
                assert outcome.transport == "shm"
                await asyncio.sleep(limit_s + 0.5)  # past the deadline
                await written_over(client)
                await soon(lambda: small.store.stats().pins == 1)  # the calls that read the others have ended
                assert np.array_equal(outcome.array, expected)
            await soon(lambda: small.store.stats().pins == 0)
            return True

        await within_some_limit(came_in_time)


async def test_a_late_image_does_not_lose_the_other_rows(small: Server) -> None:
    async with await EncoderClient.connect(small.endpoint) as client:
        request, expected = await submitted(client, 1)
        late = RowRequest(b"\5" * 32)

        async def one_came_in_time(limit_s: float) -> bool:
            async with client.fetch([request, late], timeout_s=limit_s, grace_ms=60_000) as stream:
                outcomes = {outcome.index: outcome async for outcome in stream}
                assert isinstance(outcomes[1].error, DeadlineError)
                if isinstance(outcomes[0].error, DeadlineError):
                    return False
                await written_over(client)
                assert np.array_equal(outcomes[0].array, expected)
            return True

        await within_some_limit(one_came_in_time)


async def test_rows_replaced_while_they_are_read_raise_stale_handle(small: Server) -> None:
    async with await EncoderClient.connect(small.endpoint) as client:
        request, expected = await submitted(client, 1)
        async with client.fetch([request]) as stream:
            outcome = await anext(aiter(stream))
            with outcome.in_place() as rows:
                assert np.array_equal(rows.array, expected)
            with pytest.raises(StaleHandleError), outcome.in_place() as rows:  # noqa: PT012 - it is raised at the end
                await lose(small, stream)
                await written_over(client)
                assert not np.array_equal(rows.array, expected)
            for use in (outcome.copy, lambda: outcome.array, outcome.tensor):
                with pytest.raises(StaleHandleError):
                    use()


async def test_lost_rows_replace_an_error_of_their_reader(small: Server) -> None:
    async with await EncoderClient.connect(small.endpoint) as client:
        request, _ = await submitted(client, 1)
        async with client.fetch([request]) as stream:
            outcome = await anext(aiter(stream))
            with pytest.raises(ZeroDivisionError), outcome.in_place():
                raise ZeroDivisionError
            with pytest.raises(StaleHandleError), outcome.in_place():  # noqa: PT012 - of all this
                await lose(small, stream)
                await written_over(client)
                raise ZeroDivisionError


async def test_rows_cannot_be_read_after_their_call_has_ended(small: Server) -> None:
    async with await EncoderClient.connect(small.endpoint) as client:
        request, _ = await submitted(client, 1)
        async with client.fetch([request]) as stream:
            outcome = await anext(aiter(stream))
            await lose(small, stream)
            assert outcome.lost
            with pytest.raises(StaleHandleError, match="has ended"), outcome.in_place():
                pytest.fail("used")


async def test_lost_rows_are_fetched_again_for_every_reader(small: Server) -> None:
    async with await EncoderClient.connect(small.endpoint) as client:
        request, expected = await submitted(client, 1)
        loop, found = asyncio.get_running_loop(), []

        async def away() -> None:
            await lose(small, stream)
            await written_over(client)

        def use(rows: Sequence[FetchedRows]) -> np.ndarray:
            found.append(rows[0].transport)
            if len(found) == 1:
                asyncio.run_coroutine_threadsafe(away(), loop).result(PATIENCE_S)
            return rows[0].array.copy()

        async with client.fetch([request]) as stream:
            outcome = await anext(aiter(stream))
            assert np.array_equal(await read([outcome], use), expected)
        assert found == ["shm", "inline"]


async def test_a_session_reads_correct_rows_when_calls_end_at_any_time(small: Server) -> None:
    async with await EncoderClient.connect(small.endpoint) as client:
        wanted = [await submitted(client, seed) for seed in (1, 2, 3)]
        tokens = [len(rows) for _, rows in wanted]
        streams: list[FetchStream] = []

        def fetch(requests: Sequence[RowRequest]) -> FetchStream:
            streams.append(client.fetch(requests))
            return streams[-1]

        chunks = plan(expand_prompt([7, 7, 7], 7, tokens), tokens[0])
        read_rows = []
        async with PrefetchSession(fetch, chunks, [r for r, _ in wanted], row_bytes=1) as session:
            async for ready in session:
                if ready.chunk.index == 1:  # the third chunk's rows are here too
                    await soon(session._held[2].rows.done)
                    await soon(lambda: small.store.stats().pins == 2)
                    streams[1].close()
                    await lose(small, streams[2])
                    await written_over(client)
                read_rows.append(await ready.read(lambda rows: np.concatenate([each.array for each in rows])))
        for found, (_, expected) in zip(read_rows, wanted, strict=True):
            assert np.array_equal(found, expected)


STOPPED = """
import sys
from hashlib import sha256
from encoder_contract.errors import StaleHandleError
from prefill_client import BlockingClient, RowRequest

endpoint, digest = sys.argv[1:]
with BlockingClient.connect(endpoint) as client:
    with client.fetch([RowRequest(bytes.fromhex(digest))], timeout_s=600) as outcomes:
        (rows,) = outcomes
        print(rows.transport, flush=True)
        sys.stdin.readline()
        try:
            print(sha256(rows.array).hexdigest(), flush=True)
        except StaleHandleError:
            print("stale", flush=True)
        print(outcomes.read([rows], lambda lent: sha256(lent[0].array).hexdigest()), flush=True)
"""


async def test_a_process_suspended_past_the_keepalive_reads_no_wrong_rows(small: Server) -> None:
    async with await EncoderClient.connect(small.endpoint) as client:
        request, expected = await submitted(client, 1)
        stopped = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", STOPPED, small.endpoint, request.digest.hex()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert stopped.stdin
            assert stopped.stdout
            assert await stopped.stdout.readline() == b"shm\n"
            stopped.send_signal(signal.SIGSTOP)
            await soon(lambda: small.store.stats().pins == 0)  # keepalive: ten seconds
            await written_over(client)
            stopped.send_signal(signal.SIGCONT)
            printed, _ = await asyncio.wait_for(stopped.communicate(b"go on\n"), PATIENCE_S)
        finally:
            if stopped.returncode is None:
                stopped.kill()
        assert printed.decode().split() == ["stale", sha256(expected).hexdigest()]
