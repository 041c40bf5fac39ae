"""Puts of random steps, valid or not, of images that other Puts name at the same time; then the images are fetched.

A valid Put is answered as the contract says: each name by HELD, YOURS, WAIT or an error, and the rows of a YOURS image
by HELD. After any other Put, an image has its own rows or none.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import grpc

from encoder_contract.digest import content_digest
from encoder_contract.framing import checksum, frame, parse_fetch_response
from encoder_contract.producer import Producer
from encoder_contract.v1 import encoder_pb2 as pb
from testing.fuzz.answers import SERVICE, check
from testing.fuzz.mutation import mutated

PRODUCER = Producer(b"fuzz", b"fuzz", b"fuzz", "float32", "testing.fuzz").to_message()
GRID, TOKENS = pb.Grid(t=1, h=4, w=6), 6
_NAMES = 24
_PIECE_BYTES = 1 << 16
_LAST = (pb.HOLDING_HELD, pb.HOLDING_WAIT, pb.HOLDING_FAILED)


async def put(channel: Any, seed: int, draw: random.Random) -> None:
    """A Put that is valid, or of random messages, ended at random; then its images are fetched."""
    described = pb.DescribeResponse.FromString(
        await channel.unary_unary(f"{SERVICE}/Describe")(pb.DescribeRequest().SerializeToString())
    )
    row_bytes = described.width * (2 if described.dtype == "bfloat16" else 4)
    # A damaged message describes an image wrongly, so the images of invalid Puts have other names.
    sound = draw.random() < 0.5
    keys = [
        b"fuzz %d" % draw.randrange(_NAMES) + (b"" if sound else b" of %d" % seed)
        for _ in range(draw.randrange(1, 5))
    ]
    rows = {key: _rows_of(key, TOKENS * row_bytes) for key in keys}
    names = [
        pb.PutName(
            index=index,
            engine_key=pb.EngineKey(scheme="fuzz", key=key),
            grid=GRID,
            width=described.width,
            dtype=described.dtype,
        )
        for index, key in enumerate(keys)
    ]
    call = _Put(channel.stream_stream(f"{SERVICE}/Put")(), draw, names, rows)
    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await (call.run_valid() if sound else call.run_random())
    await call.end()
    for key, right in rows.items():
        await _read(channel, key, right)


class _Put:
    """One call, the images that it names, and their rows by key."""

    def __init__(
        self, call: Any, draw: random.Random, names: list[pb.PutName], rows: dict[bytes, bytes]
    ) -> None:
        self._call = call
        self._draw = draw
        self._names = names
        self._rows = rows
        self._errors: list[pb.ImageError] = []

    async def run_valid(self) -> None:
        """Name images, put or abandon the rows of some that are ours, or leave."""
        names, answers = self._names, self._answers()
        for message in (
            pb.PutRequest(open=pb.PutOpen(producer=PRODUCER)),
            pb.PutRequest(names=pb.PutNames(names=names)),
        ):
            await self._call.write(message.SerializeToString())
        named = {(state := await anext(answers)).index: state for _ in names}
        assert named.keys() == {name.index for name in names}, "each name has one answer"
        ours = [name for name in names if named[name.index].holding == pb.HOLDING_YOURS]
        assert all(named[name.index].holding in _LAST for name in names if name not in ours)
        assert len({name.engine_key.key for name in ours}) == len(ours), "an image is one caller's to compute"
        for name in ours[: self._draw.choice((0, 1, 9, 9))]:
            abandoned = self._draw.random() < 0.2
            await self._send(name, self._rows[name.engine_key.key], abandoned=abandoned)
            state = await anext(answers)
            assert state.index == name.index
            kept = state.holding == pb.HOLDING_HELD
            assert kept != abandoned or state.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], state

    async def run_random(self) -> None:
        """Send random messages."""
        messages = _messages(self._draw, self._names, self._rows)
        for message in islice(messages, self._draw.choice((1, 2, 100, 100))):
            await self._call.write(message)
        if self._draw.random() < 0.5:
            await self._call.done_writing()
            async for _ in self._answers():
                pass

    async def end(self) -> None:
        """End the call and check that neither its status nor an image's error blames the server."""
        self._call.cancel()
        await check(self._call, self._errors)

    async def _send(self, name: pb.PutName, data: bytes, *, abandoned: bool) -> None:
        for begin in range(0, 0 if abandoned else len(data), _PIECE_BYTES):
            await self._call.write(frame(name.index, [memoryview(data)[begin : begin + _PIECE_BYTES]]))
        end = pb.PutEnd(index=name.index, checksum=checksum([memoryview(data)]), abandoned=abandoned)
        await self._call.write(pb.PutRequest(end=end).SerializeToString())

    async def _answers(self) -> AsyncIterator[pb.PutState]:
        while (raw := await self._call.read()) is not grpc.aio.EOF:
            response = pb.PutResponse.FromString(raw)
            if response.HasField("state"):
                self._errors.append(response.state.error)
                yield response.state


def _messages(draw: random.Random, names: list[pb.PutName], rows: dict[bytes, bytes]) -> Iterator[bytes]:
    """Yield a caller's messages; some are left out, repeated, reordered or damaged."""
    for name in names:
        _distort(draw, name)
    opened = pb.PutOpen(producer=PRODUCER)
    if draw.random() < 0.2:
        opened.segment, opened.shm_proof = (
            draw.choice(("/etc/passwd", "/dev/shm/none", "x")),
            draw.randbytes(16),
        )
    steps = [
        pb.PutRequest(open=opened).SerializeToString(),
        pb.PutRequest(names=pb.PutNames(names=names)).SerializeToString(),
    ]
    for name in names:
        data = rows[name.engine_key.key][: draw.choice((None, None, 0, 7, -1))]
        end = pb.PutEnd(index=name.index, checksum=checksum([memoryview(data)]) ^ draw.choice((0, 0, 1)))
        extent = pb.Extent(offset=draw.choice((0, 2**63)), length=draw.choice((0, 8, 2**40)))
        if draw.random() < 0.2:
            steps.append(
                pb.PutRequest(shared=pb.PutShared(index=name.index, extent=extent)).SerializeToString()
            )
        steps += [frame(name.index, [memoryview(data)]), pb.PutRequest(end=end).SerializeToString()]
    if draw.random() < 0.3:
        draw.shuffle(steps)
    for step in steps:
        for _ in range(draw.choice((0, 1, 1, 1, 1, 1, 1, 2))):
            yield mutated(draw, step) if draw.random() < 0.1 else step


def _distort(draw: random.Random, name: pb.PutName) -> None:
    if draw.random() < 0.2:
        name.index = draw.choice((0, 3, 2**31, 2**32 - 1))
    if draw.random() < 0.1:
        name.grid.h = draw.choice((0, 1, 2**16, 2**32 - 1))
    if draw.random() < 0.1:
        name.width, name.dtype = draw.choice((0, 1, 2**32 - 1)), draw.choice(("", "float64", "x" * 99))


async def _read(channel: Any, key: bytes, right: bytes) -> None:
    """Fetch an image and check that its rows are right or absent."""
    image = pb.FetchImage(engine_key=pb.EngineKey(scheme="fuzz", key=key))
    call: Any = channel.unary_stream(f"{SERVICE}/Fetch")(
        pb.FetchRequest(images=[image], producer=PRODUCER).SerializeToString()
    )
    data, errors = b"", []
    with suppress(grpc.aio.AioRpcError):
        async for raw in call:
            message = parse_fetch_response(raw)
            if isinstance(message, tuple):
                data += bytes(message[1])
            elif message.HasField("error"):
                errors.append(message.error)
    await check(call, errors)
    assert data in (b"", right), "these rows were not put for this image"


def _rows_of(key: bytes, size: int) -> bytes:
    block = content_digest(key)
    return (block * (size // len(block) + 1))[:size]
