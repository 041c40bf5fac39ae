"""A well-behaved client and what it feels: how long its requests take, and which of them fail."""

import asyncio
import itertools
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from prefill_client import EncoderClient, RowRequest
from testing.hostile_images import again
from testing.photos import photo
from testing.traffic import marked

PATIENCE_S = 5.0  # of a request; many times what one takes


@dataclass
class Felt:
    """What became of requests: seconds of each, and how those that failed did."""

    seconds: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, other: "Felt") -> None:
        """Count another round."""
        self.seconds += other.seconds
        self.failed += other.failed

    @property
    def p99_ms(self) -> float:
        """The 99th percentile, milliseconds."""
        return float(np.percentile(self.seconds, 99)) * 1e3

    @property
    def per_s(self) -> float:
        """Requests that succeeded, one after the other, per second."""
        return (len(self.seconds) - len(self.failed)) / sum(self.seconds)


class Victim:
    """A client that does nothing unusual."""

    def __init__(self, client: EncoderClient, channel: grpc.aio.Channel, health_url: str) -> None:
        self._client = client
        self._service = EncoderServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._health_url = health_url
        # A JPEG is decoded in batches with others, a PNG by itself.
        self._jpeg, self._png = photo(320, 240, 1), photo(320, 240, 3, "PNG")
        self._known = photo(320, 240, 2)
        self._numbers = itertools.count()

    async def until(self, deadline: float) -> Felt:
        """Make requests one after the other until then."""
        felt = Felt()
        while time.monotonic() < deadline:
            felt.add(await self.request())
        return felt

    async def request(self) -> Felt:
        """Make one request."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._ask()
        except TimeoutError:
            return Felt([PATIENCE_S], ["it took too long"])
        except Exception as error:  # noqa: BLE001 - whatever it is, the request failed
            return Felt(
                [max(PATIENCE_S, time.monotonic() - began)], [f"{type(error).__name__}: {error}"[:200]]
            )
        return Felt([time.monotonic() - began])

    async def _ask(self) -> None:
        await self._service.Describe(pb.DescribeRequest())
        await self._health.Check(health_pb2.HealthCheckRequest())
        await asyncio.to_thread(lambda: urllib.request.urlopen(self._health_url, timeout=PATIENCE_S).read())
        number = next(self._numbers)
        photos = [self._known, again(self._png, number) if number % 2 else marked(self._jpeg, number)]
        for submitted in await self._client.submit(photos, timeout_s=PATIENCE_S):
            if submitted.error is not None:
                raise submitted.error
        requests = [RowRequest(content_digest(file)) for file in photos]
        async with self._client.fetch(requests, timeout_s=PATIENCE_S) as stream:
            async for rows in stream:
                if rows.error is not None:
                    raise rows.error

    async def hear_of_the_end(self) -> None:
        """Watch the server's health until it serves no more."""
        with suppress(grpc.aio.AioRpcError):
            async for answer in self._health.Watch(health_pb2.HealthCheckRequest()):
                if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    return
        raise AssertionError("its watch ended without a word")
