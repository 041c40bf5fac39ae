"""Puts: a producer, images that it computes rows for, and raw messages."""

import itertools
from typing import Any

import numpy as np

from encoder_contract.framing import checksum, frame
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from prefill_client import EncoderClient, EngineKey, FetchedRows, Grid, Producer, PutImage, RowRequest
from tests.calls import stub

PRODUCER = Producer(b"model", b"weights", b"processor", "float32", "an engine 1.0")
GRID = Grid(1, 8, 12)
TOKENS = 24
numbers = itertools.count()


def new_image(grid: Grid = GRID, *, by_digest: bool = False) -> PutImage:
    """Return an image that no other test has."""
    name = f"image {next(numbers)}".encode()
    if by_digest:
        return PutImage(grid, digest=name.ljust(32, b"."))
    return PutImage(grid, engine_key=EngineKey("test", name))


def rows_for(client: EncoderClient, seed: int, tokens: int = TOKENS) -> np.ndarray:
    """Return rows of the model's width and element type."""
    assert client.description.dtype == "float32"
    draw = np.random.default_rng(seed)
    return draw.standard_normal((tokens, client.description.width), np.float32)


def request_of(image: PutImage) -> RowRequest:
    return RowRequest(image.digest, engine_key=image.engine_key)


async def fetch_put(client: EncoderClient, image: PutImage, **options: Any) -> FetchedRows:
    """Fetch the rows of an image that `PRODUCER` has put."""
    options = {"producer": PRODUCER, "grace_ms": 0, "timeout_s": 60, **options}
    async with client.fetch([request_of(image)], **options) as stream:
        outcome = await anext(aiter(stream))
        return outcome if outcome.error is not None else outcome.copy()


def nothing_is_left(server: Server) -> bool:
    """Return whether no lease and no space is held, and embeddings own all pages in use."""
    (host,) = server.store.stats().tiers
    pages = sum(
        server.store.layout.pages(entry.tokens) * server.store.layout.page_bytes
        for entry in server.store.stats().largest
    )
    assert host.entries <= 10, "more than the statistics name"
    return (len(server.leases), server.budgets.put_bytes.held, host.used_bytes) == (0, 0, pages)


class RawPut:
    """A Put call with raw messages, without the client's own checks."""

    def __init__(self, call: Any) -> None:
        self.call = call

    @classmethod
    async def open(cls, client: EncoderClient, **fields: Any) -> "RawPut":
        call = (await stub(client)).Put(timeout=60)
        opening = {"caller": pb.Caller(client_id="raw"), "producer": PRODUCER.to_message(), **fields}
        await call.write(pb.PutRequest(open=pb.PutOpen(**opening)))
        assert (await call.read()).HasField("opened")
        return cls(call)

    async def state(self) -> pb.PutState:
        return (await self.call.read()).state

    async def name(
        self, client: EncoderClient, image: PutImage, index: int = 0, **fields: Any
    ) -> pb.PutState:
        name = image.to_message(index, client.description.width, client.description.dtype)
        name.MergeFrom(pb.PutName(**fields))
        await self.call.write(pb.PutRequest(names=pb.PutNames(names=[name])))
        return await self.state()

    async def rows(self, data: bytes, index: int = 0) -> None:
        for begin in range(0, len(data), 200_000):
            piece = pb.PutRequest.FromString(frame(index, [memoryview(data[begin : begin + 200_000])]))
            await self.call.write(piece)

    async def end(self, data: bytes, index: int = 0, **fields: Any) -> pb.PutState:
        fields = {"checksum": checksum([memoryview(data)]), **fields}
        await self.call.write(pb.PutRequest(end=pb.PutEnd(index=index, **fields)))
        return await self.state()
