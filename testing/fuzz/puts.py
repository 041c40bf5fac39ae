"""Puts whose steps are drawn, sensible or not, of images that other Puts name meanwhile; then what is held is read.

A sound Put is answered by the state machine of the contract: each name by HELD, YOURS, WAIT or an error, rows of an
image that is YOURS by HELD. Whatever else is sent, rows are those of their image, or there are none.
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
    """A Put that keeps to the contract, or of any messages in any order, ended in any way; then its images are read."""
    described = pb.DescribeResponse.FromString(
        await channel.unary_unary(f"{SERVICE}/Describe")(pb.DescribeRequest().SerializeToString())
    )
    row_bytes = described.width * (2 if described.dtype == "bfloat16" else 4)
    # What a damaged message says of an image is not what that image is: those have names of their own.
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
        await (call.keep_to_the_contract() if sound else call.do_anything())
    await call.end()
    for key, right in rows.items():
        await _read(channel, key, right)


class _Put:
    """One call, the images that it names, and the rows that it has for each key."""

    def __init__(
        self, call: Any, draw: random.Random, names: list[pb.PutName], rows: dict[bytes, bytes]
    ) -> None:
        self._call = call
        self._draw = draw
        self._names = names
        self._rows = rows
        self._errors: list[pb.ImageError] = []

    async def keep_to_the_contract(self) -> None:
        """Name images, put the rows of some that are ours, give others up, or leave."""
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
            given_up = self._draw.random() < 0.2
            await self._send(name, self._rows[name.engine_key.key], given_up=given_up)
            state = await anext(answers)
            assert state.index == name.index
            kept = state.holding == pb.HOLDING_HELD
            assert kept != given_up or state.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], state

    async def do_anything(self) -> None:
        """Send any messages in any order."""
        messages = _messages(self._draw, self._names, self._rows)
        for message in islice(messages, self._draw.choice((1, 2, 100, 100))):
            await self._call.write(message)
        if self._draw.random() < 0.5:
            await self._call.done_writing()
            async for _ in self._answers():
                pass

    async def end(self) -> None:
        """End the call; nothing that it or one of its images ended with may blame the server."""
        self._call.cancel()
        await check(self._call, self._errors)

    async def _send(self, name: pb.PutName, data: bytes, *, given_up: bool) -> None:
        for begin in range(0, 0 if given_up else len(data), _PIECE_BYTES):
            await self._call.write(frame(name.index, [memoryview(data)[begin : begin + _PIECE_BYTES]]))
        end = pb.PutEnd(index=name.index, checksum=checksum([memoryview(data)]), abandoned=given_up)
        await self._call.write(pb.PutRequest(end=end).SerializeToString())

    async def _answers(self) -> AsyncIterator[pb.PutState]:
        while (raw := await self._call.read()) is not grpc.aio.EOF:
            response = pb.PutResponse.FromString(raw)
            if response.HasField("state"):
                self._errors.append(response.state.error)
                yield response.state


def _messages(draw: random.Random, names: list[pb.PutName], rows: dict[bytes, bytes]) -> Iterator[bytes]:
    """Yield what a caller should send, with messages left out, twice, in another order, and damaged."""
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
    """Fetch an image: its rows are right, or there are none."""
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
    assert data in (b"", right), "rows that nobody put for this image"


def _rows_of(key: bytes, size: int) -> bytes:
    block = content_digest(key)
    return (block * (size // len(block) + 1))[:size]
