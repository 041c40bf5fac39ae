"""How many clients one replica serves: each has a connection with a health watch on every replica, as ours do."""

import asyncio

from grpc_health.v1.health_pb2 import HealthCheckRequest

from prefill_client import EncoderClient
from testing.attacks import WATCH
from testing.photos import photo
from testing.raw_http2 import RawConnection

CLIENTS = 4000
A_HOST = 100  # connections from one address: a host may have only a share
AT_ONCE = 32  # of 64 requests of unknown callers that may arrive at a time; ours ask again after a refusal


async def _watch(endpoint: str, source: str) -> RawConnection:
    connection = await RawConnection.open(endpoint, source=source)
    await connection.call(WATCH, HealthCheckRequest().SerializeToString())
    await connection.answered()
    return connection


def _ended(connection: RawConnection) -> bool:
    return any("grpc-status" in found for found in connection.trailers.values())


async def clients_of_one(endpoint: str, clients: int = CLIENTS) -> int:
    """Open watches from many hosts, and return how many are served while one more client has an image encoded."""
    watching: list[RawConnection] = []
    try:
        sources = [f"127.0.1.{number // A_HOST + 1}" for number in range(clients)]
        for first in range(0, clients, AT_ONCE):
            group = sources[first : first + AT_ONCE]
            watching += await asyncio.gather(*(_watch(endpoint, source) for source in group))
        async with await EncoderClient.connect(endpoint, timeout_s=30) as client:
            [image] = await client.submit([photo(300, 280, 1)], timeout_s=30)
            if image.error is not None:
                raise image.error
        # A watch that is refused ends; one that is served has no trailers.
        return sum(not each.closed.is_set() and not _ended(each) for each in watching)
    finally:
        for each in watching:
            await each.close()
