"""Cases for a live server: Submits and Fetches of random steps, valid or not, and damaged files.

Each call must succeed or end in a status that blames its sender; the server must survive and hold nothing.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any

import grpc

from encoder_contract.digest import content_digest
from encoder_contract.framing import checksum
from encoder_contract.v1 import encoder_pb2 as pb
from testing.fuzz.answers import SERVICE, check
from testing.fuzz.mutation import mutated
from testing.photos import damaged, photo

# For a busy machine; a case takes some milliseconds.
PATIENCE_S = 60.0
READ_S = 2.0  # how long a caller of rows waits for the next answer

Case = Callable[[Any, int, random.Random], Coroutine[Any, Any, None]]
"""Runs on a channel, with a seed and its random numbers; messages are bytes."""


async def submit(channel: Any, _seed: int, draw: random.Random) -> None:
    """A Submit of random messages, ended at random."""
    call: Any = channel.stream_stream(f"{SERVICE}/Submit")()
    files = [draw.choice(_FILES) for _ in range(draw.randrange(1, 6))]
    answers: list[pb.SubmitResponse] = []
    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        written = draw.choice((1, 2, 100, 100, 100))
        for message in islice(_submit_messages(draw, files), written):
            await call.write(message)
        if draw.random() < 0.5:
            await call.done_writing()
            while (raw := await call.read()) is not grpc.aio.EOF:
                answers.append(pb.SubmitResponse.FromString(raw))
    call.cancel()
    await check(call, [state.error for answer in answers for state in answer.states])


def _submit_messages(draw: random.Random, files: Sequence[bytes]) -> Iterator[bytes]:
    """Yield a caller's messages; some are left out, repeated, reordered or damaged."""
    caller = pb.Caller(request_id=draw.choice(("", "fuzz", "x" * 200)), priority=draw.choice((0, 0, 8, 99)))
    steps = [pb.SubmitRequest(open=caller)]
    names = [_name(draw, index, file) for index, file in enumerate(files)]
    steps.append(pb.SubmitRequest(names=pb.ImageNames(names=names)))
    for index, file in enumerate(files):
        cut = draw.randrange(len(file) + 1)
        steps.append(pb.SubmitRequest(bytes=[pb.ImageBytes(index=index, data=file[:cut])]))
        steps.append(pb.SubmitRequest(bytes=[pb.ImageBytes(index=index, data=file[cut:], last=True)]))
    steps.append(pb.SubmitRequest(last=True))
    if draw.random() < 0.3:
        draw.shuffle(steps)
    for raw in _joined(draw, [step.SerializeToString() for step in steps]):
        for _ in range(draw.choice((0, 1, 1, 1, 1, 1, 1, 2))):
            yield mutated(draw, raw) if draw.random() < 0.1 else raw


def _joined(draw: random.Random, steps: list[bytes]) -> Iterator[bytes]:
    """Yield the messages, or some of them joined: in protobuf, that is one message with all their fields."""
    while steps:
        count = draw.choice((1, 1, 2, len(steps)))
        yield b"".join(steps[:count])
        steps = steps[count:]


def _name(draw: random.Random, index: int, file: bytes) -> pb.ImageName:
    """Return a name whose fields are right or wrong at random."""
    name = pb.ImageName(index=index, digest=content_digest(file))
    if draw.random() < 0.1:
        name.index = draw.choice((0, index + 1, 2**32 - 1))
    if draw.random() < 0.1:
        name.digest = draw.randbytes(draw.choice((0, 31, 32)))
    if draw.random() < 0.2:
        name.variant.CopyFrom(_variant(draw))
    if draw.random() < 0.2:
        sides = (0, 1, 2, 4, 2**16, 2**32 - 1)
        name.grid.CopyFrom(pb.Grid(t=draw.choice((0, 1, 2)), h=draw.choice(sides), w=draw.choice(sides)))
    if draw.random() < 0.5:
        name.size_bytes = draw.choice((len(file), 0, 1, 2**40, 2**64 - 1))
    return name


def _variant(draw: random.Random) -> pb.Variant:
    pixels = (0, 1, 1024, 65536, 2**40, 2**64 - 1)
    return pb.Variant(min_pixels=draw.choice(pixels), max_pixels=draw.choice(pixels))


async def fetch(channel: Any, _seed: int, draw: random.Random) -> None:
    """A Fetch of held or unknown images, of existing or other rows, by any transport, cancelled at random."""
    numbers = (0, 0, 0, 1, 2, 2**31, 2**32 - 1)
    images = [
        pb.FetchImage(
            index=draw.choice((index, index, index, 0)),
            digest=draw.choice((content_digest(draw.choice(_FILES)), draw.randbytes(draw.choice((0, 32))))),
            variant=_variant(draw) if draw.random() < 0.1 else None,
            row_begin=draw.choice(numbers),
            row_end=draw.choice(numbers),
            chunk=draw.choice(numbers),
            needed_in_ms=draw.choice(numbers),
        )
        for index in range(draw.randrange(6))
    ]
    request = pb.FetchRequest(
        images=images,
        transports=draw.choices((0, 1, 2, 4, 77), k=draw.randrange(3)),  # type: ignore[arg-type]
        grace_ms=draw.choice((0, 0, 1, 20)),
        shm_proof=draw.randbytes(draw.choice((0, 16))),
        local_only=draw.random() < 0.2,
        rows_inside=draw.random() < 0.5,
    )
    raw = request.SerializeToString()
    call: Any = channel.unary_stream(f"{SERVICE}/Fetch")(mutated(draw, raw) if draw.random() < 0.1 else raw)
    left = draw.randrange(8)
    answers: list[pb.FetchResponse] = []
    with suppress(grpc.aio.AioRpcError):
        while left and (message := await call.read()) is not grpc.aio.EOF:
            answers.append(pb.FetchResponse.FromString(message))
            left -= 1
    call.cancel()
    await check(call, [error for answer in answers for error in answer.errors])


async def images(channel: Any, seed: int, _draw: random.Random) -> None:
    """A damaged file is submitted and fetched: it ends in rows or in one error that blames the file."""
    file = damaged(seed)
    digest = content_digest(file)
    call: Any = channel.stream_stream(f"{SERVICE}/Submit")()
    step = pb.SubmitRequest(
        open=pb.Caller(),
        names=pb.ImageNames(names=[pb.ImageName(digest=digest)]),
        bytes=[pb.ImageBytes(data=file, last=True)],
        last=True,
    )
    errors: list[pb.ImageError] = []
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(step.SerializeToString())
        while (raw := await call.read()) is not grpc.aio.EOF:
            errors += [state.error for state in pb.SubmitResponse.FromString(raw).states]
    await check(call, errors)
    request = pb.FetchRequest(images=[pb.FetchImage(digest=digest)])
    fetched: Any = channel.unary_stream(f"{SERVICE}/Fetch")(request.SerializeToString())
    with suppress(grpc.aio.AioRpcError):
        errors = [error async for raw in fetched for error in pb.FetchResponse.FromString(raw).errors]
    await check(fetched, errors)


async def videos(channel: Any, _seed: int, draw: random.Random) -> None:
    """A damaged video is probed, and pairs of its frames are fetched: each ends in rows or one error."""
    file = mutated(draw, draw.choice(_videos()))
    digest, grid = content_digest(file), pb.Grid(t=1, h=4, w=4)
    call: Any = channel.stream_stream(f"{SERVICE}/Submit")()
    probe = pb.ImageName(index=0, digest=digest, video=True)
    pairs = [
        pb.Frames(first=(first := draw.randrange(14)), second=first + draw.randrange(3)) for _ in range(4)
    ]
    names = [
        pb.ImageName(index=1 + number, digest=digest, frames=pair, grid=grid)
        for number, pair in enumerate(pairs)
    ]
    steps = [
        pb.SubmitRequest(open=pb.Caller()),
        pb.SubmitRequest(names=pb.ImageNames(names=[probe])),
        pb.SubmitRequest(bytes=[pb.ImageBytes(index=0, data=file, last=True)]),
        pb.SubmitRequest(names=pb.ImageNames(names=names)),
    ]
    errors: list[pb.ImageError] = []
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for step in steps:
            await call.write(step.SerializeToString())
        while len(errors) < len(names) + 1 and (raw := await call.read()) is not grpc.aio.EOF:
            for state in pb.SubmitResponse.FromString(raw).states:
                if state.state == pb.STATE_NEEDS_BYTES and state.index:  # it was refused before
                    piece = pb.ImageBytes(index=state.index, data=file, last=True)
                    await call.write(pb.SubmitRequest(bytes=[piece]).SerializeToString())
                elif state.state != pb.STATE_NEEDS_BYTES:
                    errors.append(state.error)
        await call.write(pb.SubmitRequest(last=True).SerializeToString())
        assert await call.read() is grpc.aio.EOF
    await check(call, errors)
    wanted = [
        pb.FetchImage(index=number, digest=digest, frames=pair, grid=grid)
        for number, pair in enumerate(pairs)
    ]
    fetched: Any = channel.unary_stream(f"{SERVICE}/Fetch")(
        pb.FetchRequest(images=wanted).SerializeToString()
    )
    outcomes: list[int] = []
    with suppress(grpc.aio.AioRpcError):
        async for raw in fetched:
            answer = pb.FetchResponse.FromString(raw)
            errors += answer.errors
            outcomes += [error.index for error in answer.errors] + [ready.index for ready in answer.ready]
    await check(fetched, errors)
    assert sorted(outcomes) == list(range(len(pairs))), outcomes


@cache
def _videos() -> list[bytes]:
    from testing.clips import clip, with_index_first

    small: dict[str, Any] = {"frames": 12, "width": 64, "height": 48}
    mp4 = clip("mp4", **small)
    return [mp4, with_index_first(mp4), clip("mkv", **small), clip("webm", **small)]


async def crowds(channel: Any, _seed: int, draw: random.Random) -> None:
    """A message of many sub-messages instead of images, most of them empty."""
    count = draw.choice((0, 1, 511, 512, 513, 5_000, 50_000))
    images = b"\x0a\x00" * count
    path, raw = draw.choice(
        (
            ("Fetch", b"\x12\x00" * count),
            ("Submit", pb.SubmitRequest(names=pb.ImageNames.FromString(images)).SerializeToString()),
            ("Submit", b"\x1a\x00" * count),
        )
    )
    call: Any = channel.unary_stream(f"{SERVICE}/{path}")(mutated(draw, raw) if draw.random() < 0.2 else raw)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    await check(call, [])


async def rows(channel: Any, _seed: int, draw: random.Random) -> None:
    """Rows over the rows port: tickets are presented, repeated, damaged or left, and readers leave in the middle."""
    files = draw.sample(_FILES, 4)
    submit: Any = channel.stream_stream(f"{SERVICE}/Submit")()
    names = [
        pb.ImageName(index=index, digest=content_digest(file), size_bytes=len(file))
        for index, file in enumerate(files)
    ]
    sent = [pb.ImageBytes(index=index, data=file, last=True) for index, file in enumerate(files)]
    step = pb.SubmitRequest(open=pb.Caller(), names=pb.ImageNames(names=names), bytes=sent, last=True)
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await submit.write(step.SerializeToString())
        while await submit.read() is not grpc.aio.EOF:
            pass
    wanted = [pb.FetchImage(index=index, digest=content_digest(file)) for index, file in enumerate(files)]
    request = pb.FetchRequest(images=wanted, transports=[pb.TRANSPORT_TCP])
    call: Any = channel.unary_stream(f"{SERVICE}/Fetch")(request.SerializeToString())
    answers: list[pb.FetchResponse] = []
    left, readers = draw.choice((1, 2, 100, 100)), set()
    # A call whose tickets nobody presents waits for them.
    with suppress(grpc.aio.AioRpcError, TimeoutError):
        async with asyncio.timeout(READ_S):
            while left and (raw := await call.read()) is not grpc.aio.EOF:
                answers.append(pb.FetchResponse.FromString(raw))
                left -= 1
                for ready in answers[-1].ready:
                    readers.add(asyncio.create_task(_read_rows(draw, ready)))
                    if draw.random() < 0.1:
                        left = 0  # the call ends before its rows are read
    call.cancel()
    await asyncio.gather(*readers)
    await check(call, [error for answer in answers for error in answer.errors])


async def _read_rows(draw: random.Random, ready: pb.ImageReady) -> None:
    """Present a ticket on one or two connections, in one of many ways."""
    for _ in range(draw.choice((1, 1, 1, 2))):
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", ready.ticket.port)
            secret = ready.ticket.secret
            writer.write(draw.choice((secret, secret, secret, secret[:7], mutated(draw, secret), secret * 3)))
            with suppress(asyncio.IncompleteReadError):
                size = int.from_bytes(await reader.readexactly(8), "little") if draw.random() < 0.9 else 0
                assert size in (0, ready.row_bytes), f"{size} bytes of rows instead of {ready.row_bytes}"
                if size and draw.random() < 0.8:
                    data = await reader.readexactly(size)
                    assert checksum([memoryview(data)]) == ready.checksum, "the rows of another image"
            writer.transport.abort()


CASES: dict[str, Case] = {each.__name__: each for each in (submit, fetch, images, videos, crowds, rows)}
_FILES = [b"", b"no image", *(photo(40 + 8 * n, 40, n) for n in range(4)), *(damaged(n) for n in range(6))]


async def run(name: str, channel: grpc.aio.Channel, seed: int) -> None:
    """Run one case. Raises `AssertionError` if a status or error blames the server, `TimeoutError` if it hangs."""
    async with asyncio.timeout(PATIENCE_S):
        await CASES[name](channel, seed, random.Random(seed))
