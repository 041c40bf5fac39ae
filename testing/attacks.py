"""Attacks: what a caller can take of a server, each in one way, until it is stopped.

Loads are bounded: no attack sends more than some hundred megabytes, or keeps more connections than an honest fleet.
"""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2
from h2.exceptions import ProtocolError

from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from testing import hostile_images as files
from testing.photos import photo
from testing.raw_http2 import RawConnection
from testing.traffic import marked

if TYPE_CHECKING:  # the class of an asyncio channel has a name for the type checker only
    from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceAsyncStub

SUBMIT, FETCH = (f"/encoder_contract.v1.EncoderService/{name}" for name in ("Submit", "Fetch"))
WATCH = "/grpc.health.v1.Health/Watch"
AGAIN_S = 0.5  # between attempts of an attacker whose calls were ended
PIECE = bytes(1 << 20)


@dataclass(frozen=True)
class Target:
    """A server: where its calls and its operator's port are."""

    grpc: str
    http: str

    def stub(self) -> "EncoderServiceAsyncStub":
        """Return a stub on a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 64 << 20)]
        return EncoderServiceStub(grpc.aio.insecure_channel(self.grpc, options))


Attack = Callable[[Target, Callable[[], Awaitable[None]]], Awaitable[None]]


async def headers(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Small files whose headers are long to read, each uploaded once and named under many variants."""
    kinds = (files.newlines_png(), files.pieces_jpeg())
    stub = target.stub()
    await ready()
    for number in itertools.count():
        file = files.again(kinds[number % 2], number)
        digest = content_digest(file)
        names = [pb.ImageName(index=n, digest=digest, variant=_variant(n)) for n in range(512)]
        await _submit(stub, names[:1], {digest: file})
        await _submit(stub, names[1:], {})


def _variant(number: int) -> pb.Variant:
    return pb.Variant(min_pixels=65536, max_pixels=65536 + 1024 * number)


async def uploads(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Uploads that never end: bytes of images are sent, and their last piece is not."""
    stub, names = target.stub(), itertools.count()

    async def hold() -> None:
        call = stub.Submit()
        images = [
            pb.ImageName(index=n, digest=content_digest(next(names).to_bytes(8, "big"))) for n in range(32)
        ]
        await call.write(pb.SubmitRequest(open=pb.Caller()))
        await call.write(pb.SubmitRequest(names=pb.ImageNames(names=images)))
        for image in images:
            await call.write(pb.SubmitRequest(bytes=pb.ImageBytes(index=image.index, data=PIECE)))
        while await call.read() is not grpc.aio.EOF:
            pass

    await ready()
    await _keep(4, hold)


async def readers(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Fetches of held images that are never read."""
    stub, base = target.stub(), photo(512, 512, 7)
    digests: list[bytes] = []
    for begin in range(0, 96, 16):
        some = await _submit_files(stub, [marked(base, begin + n) for n in range(16)])
        await _read(stub, _request(some))
        digests += some

    async def hold() -> None:
        async with await RawConnection.open(target.grpc, window=0) as connection:
            for begin in range(0, len(digests), 32):
                await connection.call(FETCH, _request(digests[begin : begin + 32]).SerializeToString())
            await connection.closed.wait()

    await ready()
    await _keep(2, hold)


async def decoders(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Progressive JPEGs of thousands of scans, and PNGs of many pixels in few bytes."""
    kinds = [files.scans_jpeg(), *[files.bomb_png()] * 4]
    stub = target.stub()
    await ready()
    for number in itertools.count():
        some = [files.again(file, 10 * number + n) for n, file in enumerate(kinds)]
        await _read(stub, _request(await _submit_files(stub, some)))


async def messages(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Kilobytes that gzip turns into megabytes of empty sub-messages."""
    bodies = _empty_messages(2_000_000)
    channel: Any = grpc.aio.insecure_channel(  # of bytes as they are
        target.grpc, [("grpc.max_send_message_length", 64 << 20)], compression=grpc.Compression.Gzip
    )
    await ready()
    await _repeat(channel, bodies)


def _empty_messages(count: int) -> dict[str, bytes]:
    """Return a Fetch and a Submit of so many empty sub-messages, by the path of the call."""
    names = b"\x0a\x00" * count
    return {FETCH: b"\x12\x00" * count, SUBMIT: b"\x12" + _varint(len(names)) + names}


async def _repeat(channel: Any, bodies: dict[str, bytes]) -> None:
    """Send the messages one after the other, without end."""
    for path in itertools.cycle(bodies):
        with suppress(grpc.aio.AioRpcError):
            async for _ in channel.unary_stream(path)(bodies[path], timeout=30):
                pass
        await asyncio.sleep(0.01)  # a refusal at once is no reason to ask without pause


def _varint(number: int) -> bytes:
    low = [number >> shift & 0x7F for shift in range(0, number.bit_length(), 7)]
    return bytes([*(byte | 0x80 for byte in low[:-1]), low[-1]])


async def unknown(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Fetches of hundreds of images that nobody submits."""
    stub, draw = target.stub(), random.Random(0)

    async def ask() -> None:
        digests = [draw.randbytes(32) for _ in range(512)]
        async for _ in stub.Fetch(_request(digests, grace_ms=30_000)):
            pass

    await ready()
    await _keep(64, ask)


async def partial(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Messages that are begun and not ended, on many streams."""
    start = b"\0" + (len(PIECE) + 1).to_bytes(4, "big")

    async def hold() -> None:
        async with await RawConnection.open(target.grpc) as connection:
            for _ in range(16):
                await connection.send(await connection.call(SUBMIT), start + PIECE)
            await connection.closed.wait()

    await ready()
    await _keep(8, hold)


async def claims(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Many Fetches of few images, each of which counts as one who waits; of the rows they want one each."""
    stub, base = target.stub(), photo(512, 512, 8)
    await ready()
    for number in itertools.count():
        digests = await _submit_files(stub, [marked(base, 8 * number + n) for n in range(8)])
        asked = [_read(stub, _request(digests * 32, rows=1)) for _ in range(64)]
        await asyncio.gather(*asked)


async def dripping(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Connections to the operator's port that send a byte a second and no request."""

    async def drip() -> None:
        host, _, port = target.http.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(b"GET /healthz HTTP/1.1\r\nX: ")
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(1)
        finally:
            writer.close()

    await ready()
    await _keep(128, drip)


async def watchers(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Watchers of health that take no answer, and others that come and go."""
    message = health_pb2.HealthCheckRequest().SerializeToString()

    async def hold() -> None:
        async with await RawConnection.open(target.grpc, window=0) as connection:
            for _ in range(4):
                await connection.call(WATCH, message)
            await connection.closed.wait()

    async def come_and_go() -> None:
        async with await RawConnection.open(target.grpc) as connection:
            stream = await connection.call(WATCH, message)
            await asyncio.sleep(0.1)
            connection.reset_stream(stream)

    await ready()
    await asyncio.gather(_keep(8, hold), _keep(2, come_and_go))


async def refusals(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Messages of 100 KB with 50 000 empty sub-messages, as fast as they are refused."""
    bodies = _empty_messages(50_000)
    channel: Any = grpc.aio.insecure_channel(target.grpc)  # of bytes as they are
    await ready()
    await asyncio.gather(*(_repeat(channel, {path: bodies[path]}) for path in bodies for _ in range(8)))


async def priority(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Images of the highest priority, more than the tower can encode."""
    caller = pb.Caller(priority=8)
    stub, base, numbers = target.stub(), photo(512, 512, 11), itertools.count()

    async def ask() -> None:
        images = [marked(base, next(numbers)) for _ in range(16)]
        await _read(stub, _request(await _submit_files(stub, images, caller), caller=caller))

    await ready()
    await _keep(4, ask, pause_s=0.0)


async def seconds(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Images that nobody fetches, as many as the seconds of the queue allow."""
    stub, base, numbers = target.stub(), photo(512, 512, 10), itertools.count()

    async def submit() -> None:
        await _submit_files(stub, [marked(base, next(numbers)) for _ in range(32)])

    await ready()
    await _keep(4, submit, pause_s=0.0)


async def large(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """Images of more pixels than are decoded at a time, each of which takes seconds."""
    file, numbers = files.large_jpeg2000(), itertools.count()
    stub = target.stub()

    async def ask() -> None:
        image = files.again(file, next(numbers))
        await _read(stub, _request(await _submit_files(stub, [image]), grace_ms=30_000))

    await ready()
    await _keep(4, ask, pause_s=0.0)


async def neighbour(target: Target, ready: Callable[[], Awaitable[None]]) -> None:
    """No attacker: one honest client, of new images as large as those of the attackers, one after the other."""
    stub, base = target.stub(), photo(512, 512, 9)
    await ready()
    for number in itertools.count():
        await _read(stub, _request(await _submit_files(stub, [marked(base, number)])))


# In the order of the points of a hostile day; `watchers` also looks at the drain.
ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        *(headers, uploads, readers, decoders, messages),
        *(unknown, partial, claims, dripping, watchers),
        *(refusals, priority, seconds, large),
    )
}
CALLERS = {neighbour.__name__: neighbour, **ATTACKS}


async def _submit_files(
    stub: "EncoderServiceAsyncStub", images: Sequence[bytes], caller: pb.Caller | None = None
) -> list[bytes]:
    """Submit image files; return their digests."""
    by_digest = {content_digest(file): file for file in images}
    names = [pb.ImageName(index=n, digest=each) for n, each in enumerate(by_digest)]
    await _submit(stub, names, by_digest, caller)
    return list(by_digest)


async def _submit(
    stub: "EncoderServiceAsyncStub",
    names: Sequence[pb.ImageName],
    by_digest: dict[bytes, bytes],
    caller: pb.Caller | None = None,
) -> None:
    """Name images and send the bytes that are asked for and known here; whatever is answered is fine."""
    call: Any = stub.Submit()  # whose `read` has no type but that of the end
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(pb.SubmitRequest(open=caller or pb.Caller()))
        await call.write(pb.SubmitRequest(names=pb.ImageNames(names=names)))
        digests = {name.index: name.digest for name in names}
        left = len(names)
        while left and (answer := await call.read()) is not grpc.aio.EOF:
            file = by_digest.get(digests[answer.state.index])
            if answer.state.state == pb.STATE_NEEDS_BYTES and file is not None:
                for piece in _pieces(answer.state.index, file):
                    await call.write(pb.SubmitRequest(bytes=piece))
            else:
                left -= 1
        await call.done_writing()
    call.cancel()


def _pieces(index: int, file: bytes) -> Iterator[pb.ImageBytes]:
    for begin in range(0, len(file), len(PIECE)):
        end = begin + len(PIECE)
        yield pb.ImageBytes(index=index, data=file[begin:end], last=end >= len(file))


def _request(
    digests: Sequence[bytes], grace_ms: int = 1000, rows: int = 0, caller: pb.Caller | None = None
) -> pb.FetchRequest:
    images = [pb.FetchImage(index=n, digest=digest, row_end=rows) for n, digest in enumerate(digests)]
    return pb.FetchRequest(images=images, grace_ms=grace_ms, caller=caller)


async def _read(stub: "EncoderServiceAsyncStub", request: pb.FetchRequest) -> None:
    with suppress(grpc.aio.AioRpcError):
        async for _ in stub.Fetch(request):
            pass


async def _keep(count: int, one: Callable[[], Awaitable[None]], pause_s: float = AGAIN_S) -> None:
    """Keep so many going, each begun again, after a pause, when it has ended."""

    async def again() -> None:
        while True:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, OSError, ProtocolError):
                await one()
            await asyncio.sleep(pause_s)

    await asyncio.gather(*(again() for _ in range(count)))
