"""The connections of a client: one to a server that was started anew is a new one."""

import numpy as np

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.config import Config
from encoder_service.engine.model import Model
from prefill_client import EncoderClient
from prefill_client.fleet.put_session import PutSession
from tests.processes import running
from tests.put_calls import PRODUCER, fetch_put, new_image, request_of, rows_for
from tests.servers import server_of
from tests.waiting import soon

STORES = {"store_only": "yes", "accept_put": "yes"}


async def transports(client: EncoderClient, session: PutSession) -> tuple[str, str]:
    """Put an image and fetch it; return by what its rows came and went, or why they did not."""
    image = new_image()
    (answer,) = await session.name([image])
    if answer.state == "yours":
        answer = await session.put(answer, rows_for(client, 1))
    if answer.error is not None:
        return type(answer.error).__name__, ""
    fetched = await fetch_put(client, image)
    opened = [task.result() for task in session._streams.values()]
    return fetched.transport, " ".join("shm" if stream.shares_memory else "inline" for stream in opened)


async def test_a_server_that_was_drained_and_started_anew_shares_its_memory_again(
    config: Config, model: Model
) -> None:
    async with server_of(config, model, accept_put="yes") as first:
        client = await EncoderClient.connect(first.endpoint)
        session = client.put(PRODUCER)
        assert await transports(client, session) == ("shm", "shm")
    async with client, session, server_of(config, model, accept_put="yes", listen=first.endpoint):

        async def both_ways() -> bool:
            return await transports(client, session) == ("shm", "shm")

        await soon(both_ways)


async def test_a_call_that_has_chosen_its_connection_is_served_though_the_next_ones_get_another(
    config: Config, model: Model
) -> None:
    async with (
        server_of(config, model, accept_put="yes") as server,
        await EncoderClient.connect(server.endpoint) as client,
    ):
        async with client.put(PRODUCER) as session:
            (answer,) = await session.name([image := new_image()])
            await session.put(answer, rows_for(client, 1))
        before = await client._pool.connection(server.endpoint)
        client._pool._drop(server.endpoint, before)
        assert await client._pool.connection(server.endpoint) is not before
        stream = before.fetch([request_of(image)], pb.Caller(), grace_ms=0, producer=PRODUCER)
        fetched = await anext(aiter(stream))
        assert fetched.error is None
        assert np.array_equal(fetched.copy().array, rows_for(client, 1))
        stream.close()


async def test_a_server_that_was_killed_and_started_anew_shares_its_memory_again(config: Config) -> None:
    with running(config.model, **STORES) as first:
        async with await EncoderClient.connect(first.endpoint) as client, client.put(PRODUCER) as session:
            assert await transports(client, session) == ("shm", "shm")
            first.kill()
            with running(config.model, listen=first.endpoint, **STORES):

                async def both_ways() -> bool:
                    return await transports(client, session) == ("shm", "shm")

                await soon(both_ways)
