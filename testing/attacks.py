"""Attacks on a server, each a process that abuses it in one way until it is killed.

    python -m testing.attacks NAME HOST:PORT HTTP_HOST:PORT

The process prepares its bytes, prints "ready", and attacks once it has read a line from its input. It runs with a low
priority, so that server and victim get the processor first: what a victim feels is then what the server allows, not
the price of another busy process on the machine. It calls from another address than the victim: without tenants, the
callers of a host share what the host may use.

Loads are bounded: no attack sends more than some hundred megabytes, or holds more than 2500 connections.
"""

import argparse
import asyncio
import itertools
import os
import random
import resource
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2
from h2.exceptions import ProtocolError

from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from testing import hostile_images as files
from testing.photos import photo, with_comment
from testing.raw_http2 import RawConnection, framed
from testing.tcp_proxy import ANOTHER_HOST, from_another_host

if TYPE_CHECKING:  # the class of an asyncio stub exists for the type checker only
    from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceAsyncStub
    from testing.server_process import ServerProcess

NICE = 10
SUBMIT, FETCH, DESCRIBE = (
    f"/encoder_contract.v1.EncoderService/{name}" for name in ("Submit", "Fetch", "Describe")
)
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
RETRY_S = 0.5  # before an attack whose calls the server has ended begins again
DESCRIBE_S, REACH_S = 10.0, 60.0  # until an attacker asks again on a new connection, and until it gives up
PIECE = bytes(1 << 20)


@dataclass(frozen=True)
class Target:
    """The addresses of a server: of its gRPC port and of its operator's HTTP port, as another host's.

    `direct` is its gRPC port without the proxy that makes callers another host's.
    """

    grpc: str
    http: str
    direct: str
    rows_port: int = 0

    def stub(self) -> "EncoderServiceAsyncStub":
        """Return a stub on a new connection."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 64 << 20)]
        channel = grpc.aio.insecure_channel(self.grpc, options)
        stub = EncoderServiceStub(channel)
        vars(stub)["channel"] = (
            channel  # which closes when nothing refers to it, and its calls then wait for ever
        )
        return stub


Ready = Callable[[], Awaitable[None]]
"""An attack calls it once it is prepared; it returns when the attack shall begin."""
Attack = Callable[[Target, Ready], Awaitable[None]]


@contextmanager
def attacking(name: str, server: "ServerProcess") -> Iterator[Callable[[], None]]:
    """Start an attacker's process, and yield the function that begins the attack. Kill the process at the end."""
    command = [sys.executable, "-m", "testing.attacks", name, server.endpoint, server.http_endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", f"the attacker {name} ended before its attack"

        def go() -> None:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

        try:
            yield go
            assert process.poll() is None, f"the attacker {name} ended during its attack"
        finally:
            process.kill()


async def headers(target: Target, ready: Ready) -> None:
    """Small files whose headers are long to read, each uploaded once and named under many variants."""
    kinds = (files.newlines_png(), files.pieces_jpeg())
    stub = target.stub()
    await ready()
    for number in itertools.count():
        file = files.with_trailer(kinds[number % 2], number)
        digest = content_digest(file)
        names = [pb.ImageName(index=n, digest=digest, variant=_variant(n)) for n in range(512)]
        await _submit(stub, names[:1], {digest: file})
        await _submit(stub, names[1:], {})


def _variant(number: int) -> pb.Variant:
    return pb.Variant(min_pixels=65536, max_pixels=65536 + 1024 * number)


async def uploads(target: Target, ready: Ready) -> None:
    """Uploads that never end: the last piece of each image is not sent."""
    stub, names = target.stub(), itertools.count()

    async def hold() -> None:
        call = stub.Submit()
        images = [
            pb.ImageName(index=n, digest=content_digest(next(names).to_bytes(8, "big"))) for n in range(32)
        ]
        await call.write(pb.SubmitRequest(open=pb.Caller()))
        await call.write(pb.SubmitRequest(names=pb.ImageNames(names=images)))
        for image in images:
            await call.write(pb.SubmitRequest(bytes=[pb.ImageBytes(index=image.index, data=PIECE)]))
        while await call.read() is not grpc.aio.EOF:
            pass

    await ready()
    await _repeat_in_parallel(4, hold)


async def readers(target: Target, ready: Ready) -> None:
    """Fetches of held images that are never read."""
    stub, base = target.stub(), photo(512, 512, 7)
    digests: list[bytes] = []
    for begin in range(0, 96, 16):
        some = await _submit_files(stub, [with_comment(base, begin + n) for n in range(16)])
        await _read(stub, _request(some))
        digests += some

    async def hold() -> None:
        async with await RawConnection.open(target.grpc, window=0) as connection:
            for begin in range(0, len(digests), 32):
                await connection.call(FETCH, _request(digests[begin : begin + 32]).SerializeToString())
            await connection.closed.wait()

    await ready()
    await _repeat_in_parallel(2, hold)


async def decoders(target: Target, ready: Ready) -> None:
    """Progressive JPEGs of thousands of scans, and PNGs of many pixels in few bytes."""
    kinds = [files.scans_jpeg(), *[files.bomb_png()] * 4]
    stub = target.stub()
    await ready()
    for number in itertools.count():
        some = [files.with_trailer(file, 10 * number + n) for n, file in enumerate(kinds)]
        await _read(stub, _request(await _submit_files(stub, some)))


async def messages(target: Target, ready: Ready) -> None:
    """Kilobytes that gzip turns into megabytes of empty sub-messages."""
    bodies = _empty_messages(2_000_000)
    channel: Any = grpc.aio.insecure_channel(  # Any: messages are bytes
        target.grpc, [("grpc.max_send_message_length", 64 << 20)], compression=grpc.Compression.Gzip
    )
    await ready()
    await _send_in_turn(channel, bodies)


def _empty_messages(count: int) -> dict[str, bytes]:
    """Return a Fetch and a Submit with `count` empty sub-messages, by the path of the call."""
    names = b"\x0a\x00" * count
    return {FETCH: b"\x12\x00" * count, SUBMIT: b"\x12" + _varint(len(names)) + names}


async def _send_in_turn(channel: Any, bodies: dict[str, bytes]) -> None:
    """Send the messages in turn until the process ends."""
    for path in itertools.cycle(bodies):
        with suppress(grpc.aio.AioRpcError):
            async for _ in channel.unary_stream(path)(bodies[path], timeout=30):
                pass
        await asyncio.sleep(0.01)  # do not spin on immediate refusals


def _varint(number: int) -> bytes:
    low = [number >> shift & 0x7F for shift in range(0, number.bit_length(), 7)]
    return bytes([*(byte | 0x80 for byte in low[:-1]), low[-1]])


async def unknown(target: Target, ready: Ready) -> None:
    """Fetches of hundreds of images that no client submits."""
    stub, draw = target.stub(), random.Random(0)

    async def ask() -> None:
        digests = [draw.randbytes(32) for _ in range(512)]
        async for _ in stub.Fetch(_request(digests, grace_ms=30_000)):
            pass

    await ready()
    await _repeat_in_parallel(64, ask)


async def partial(target: Target, ready: Ready) -> None:
    """Messages without their last bytes, on many streams."""
    start = b"\0" + (len(PIECE) + 1).to_bytes(4, "big")

    async def hold() -> None:
        async with await RawConnection.open(target.grpc) as connection:
            for _ in range(16):
                await connection.send(await connection.call(SUBMIT), start + PIECE)
            await connection.closed.wait()

    await ready()
    await _repeat_in_parallel(8, hold)


async def claims(target: Target, ready: Ready) -> None:
    """Many Fetches of the same few images: each Fetch holds a claim on each image, and reads one row."""
    stub, base = target.stub(), photo(512, 512, 8)
    await ready()
    for number in itertools.count():
        digests = await _submit_files(stub, [with_comment(base, 8 * number + n) for n in range(8)])
        asked = [_read(stub, _request(digests * 32, rows=1)) for _ in range(64)]
        await asyncio.gather(*asked)


async def dripping(target: Target, ready: Ready) -> None:
    """Connections to the operator's port that send one byte a second and never finish a request."""

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
    await _repeat_in_parallel(128, drip)


async def watchers(target: Target, ready: Ready) -> None:
    """Health watchers that read no answer, and others that connect and disconnect."""
    message = health_pb2.HealthCheckRequest().SerializeToString()

    async def hold() -> None:
        async with await RawConnection.open(target.grpc, window=0) as connection:
            for _ in range(4):
                await connection.call(WATCH, message)
            await connection.closed.wait()

    async def reconnect() -> None:
        async with await RawConnection.open(target.grpc) as connection:
            stream = await connection.call(WATCH, message)
            await asyncio.sleep(0.1)
            connection.reset_stream(stream)

    await ready()
    await asyncio.gather(_repeat_in_parallel(8, hold), _repeat_in_parallel(2, reconnect))


async def refusals(target: Target, ready: Ready) -> None:
    """Messages of 100 KB with 50 000 empty sub-messages, as fast as the server refuses them."""
    bodies = _empty_messages(50_000)
    channel: Any = grpc.aio.insecure_channel(target.grpc)  # Any: messages are bytes
    await ready()
    await asyncio.gather(*(_send_in_turn(channel, {path: bodies[path]}) for path in bodies for _ in range(8)))


async def priority(target: Target, ready: Ready) -> None:
    """Images of the highest priority, more than the tower can encode."""
    caller = pb.Caller(priority=8)
    stub, base, numbers = target.stub(), photo(512, 512, 11), itertools.count()

    async def ask() -> None:
        images = [with_comment(base, next(numbers)) for _ in range(16)]
        await _read(stub, _request(await _submit_files(stub, images, caller), caller=caller))

    await ready()
    await _repeat_in_parallel(4, ask, pause_s=0.0)


async def seconds(target: Target, ready: Ready) -> None:
    """Images that no client fetches, as many as the queue's limit in seconds admits."""
    stub, base, numbers = target.stub(), photo(512, 512, 10), itertools.count()

    async def submit() -> None:
        await _submit_files(stub, [with_comment(base, next(numbers)) for _ in range(32)])

    await ready()
    await _repeat_in_parallel(4, submit, pause_s=0.0)


async def large(target: Target, ready: Ready) -> None:
    """Images with more pixels than the server decodes at a time; each takes seconds."""
    file, numbers = files.large_jpeg2000(), itertools.count()
    stub = target.stub()

    async def ask() -> None:
        image = files.with_trailer(file, next(numbers))
        await _read(stub, _request(await _submit_files(stub, [image]), grace_ms=30_000))

    await ready()
    await _repeat_in_parallel(4, ask, pause_s=0.0)


async def towers(target: Target, ready: Ready) -> None:
    """Twelve callers with photos of a megapixel, each of which takes the tower as long as many small images."""
    stub, base, numbers = target.stub(), photo(990, 990, 12), itertools.count()

    async def ask() -> None:
        image = with_comment(base, next(numbers))
        await _read(stub, _request(await _submit_files(stub, [image]), grace_ms=30_000))

    await ready()
    await _repeat_in_parallel(12, ask, pause_s=0.0)


async def digests(target: Target, ready: Ready) -> None:
    """Eight uploads at a time under digests that are not theirs: each is received and hashed before it is refused."""
    stub, draw, file = target.stub(), random.Random(13), bytes(8 << 20)

    async def upload() -> None:
        digest = draw.randbytes(32)
        await _submit(stub, [pb.ImageName(digest=digest)], {digest: file})

    await ready()
    await _repeat_in_parallel(8, upload, pause_s=0.0)


async def tickets(target: Target, ready: Ready) -> None:
    """Connections to the rows port that present nothing or garbage, and readers of rows that stop."""
    stub, connect = target.stub(), _to_rows_port(target)
    photos, digests = [photo(512, 512, seed) for seed in range(16)], list[bytes]()

    async def idle() -> None:
        opened = [await connect() for _ in range(64)]
        for number, (_, writer) in enumerate(opened):
            writer.write(bytes(number % 40))
        await asyncio.sleep(RETRY_S)
        for _, writer in opened:
            writer.transport.abort()

    async def stall() -> None:
        if not digests:
            digests.extend(await _submit_files(stub, photos))
        images = [
            pb.FetchImage(index=4 * n + begin, digest=digest, row_begin=begin)
            for n, digest in enumerate(digests)
            for begin in range(4)
        ]
        request = pb.FetchRequest(images=images, grace_ms=1000)
        request.transports.append(pb.TRANSPORT_TCP)
        async for answer in stub.Fetch(request):
            for each in answer.ready:
                _, writer = await connect()
                writer.write(each.ticket.secret)

    await ready()
    await asyncio.gather(_repeat_in_parallel(4, idle), _repeat_in_parallel(8, stall))


async def connections(target: Target, ready: Ready) -> None:
    """Thousands of connections to the rows port that present nothing; a new one replaces the oldest all the time."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    connect = _to_rows_port(target)
    opened = deque[asyncio.StreamWriter]()
    await ready()
    while True:
        with suppress(OSError):
            opened.append((await connect())[1])
        if len(opened) > 2500:
            opened.popleft().transport.abort()


def _to_rows_port(
    target: Target,
) -> Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Return a function that connects to a server's rows port, from another address of this host."""
    host = target.direct.rpartition(":")[0]
    return lambda: asyncio.open_connection(host, target.rows_port, limit=1, local_addr=(ANOTHER_HOST, 0))


async def _described(target: Target) -> pb.DescribeResponse:
    """Return the server's description, an empty one if it requires a token.

    Raises `TimeoutError` if no call reaches the server within `REACH_S`.
    """
    async with asyncio.timeout(REACH_S):
        while True:
            stub = target.stub()
            try:
                return await stub.Describe(pb.DescribeRequest(), timeout=DESCRIBE_S)
            except grpc.aio.AioRpcError as error:  # the attack before may still use up the host's share
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    return pb.DescribeResponse()
            await asyncio.sleep(RETRY_S)


async def strangers(target: Target, ready: Ready) -> None:
    """Calls without a token, of any method: each fills its window, and never sends a whole message."""
    message = framed(bytes(len(PIECE) + 4096))
    paths = itertools.cycle((SUBMIT, FETCH, DESCRIBE, CHECK, WATCH, "/nobody.serves/This"))

    async def call(connection: RawConnection) -> None:
        await connection.send(await connection.call(next(paths)), message[:-1])

    async def hold() -> None:
        async with await RawConnection.open(target.direct, source=ANOTHER_HOST) as connection:
            await asyncio.gather(*(call(connection) for _ in range(256)))

    await ready()
    await _repeat_in_parallel(16, hold, pause_s=0.0)


async def neighbour(target: Target, ready: Ready) -> None:
    """No attack: one honest client that asks for new images, as large as those of the attacks, one by one."""
    stub, base = target.stub(), photo(512, 512, 9)
    await ready()
    for number in itertools.count():
        await _read(stub, _request(await _submit_files(stub, [with_comment(base, number)])))


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        *(headers, uploads, readers, decoders, messages),
        *(unknown, partial, claims, dripping, watchers),
        *(refusals, priority, seconds, large, towers, digests, tickets, connections, strangers),
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
    """Name images and send the bytes that the server asks for, if they are in `by_digest`. Ignore errors."""
    call: Any = stub.Submit()  # Any: the type of `read` knows only EOF
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(pb.SubmitRequest(open=caller or pb.Caller()))
        await call.write(pb.SubmitRequest(names=pb.ImageNames(names=names)))
        digests = {name.index: name.digest for name in names}
        left = len(names)
        while left and (answer := await call.read()) is not grpc.aio.EOF:
            for state in answer.states:
                file = by_digest.get(digests[state.index])
                if state.state == pb.STATE_NEEDS_BYTES and file is not None:
                    for piece in _pieces(state.index, file):
                        await call.write(pb.SubmitRequest(bytes=[piece]))
                else:
                    left -= 1
        await call.write(pb.SubmitRequest(last=True))
        await call.read()
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


async def _repeat_in_parallel(
    count: int, call: Callable[[], Awaitable[None]], pause_s: float = RETRY_S
) -> None:
    """Run `count` copies of a call at the same time, and repeat each after a pause when it has ended."""

    async def repeat() -> None:
        while True:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, OSError, ProtocolError):
                await call()
            await asyncio.sleep(pause_s)

    await asyncio.gather(*(repeat() for _ in range(count)))


async def _attack(name: str, grpc_endpoint: str, http_endpoint: str) -> None:
    async with from_another_host(grpc_endpoint) as to_grpc, from_another_host(http_endpoint) as to_http:
        target = Target(to_grpc, to_http, grpc_endpoint)
        # An attack that did not reach the server would look like one that does no harm.
        described = await _described(target)
        await CALLERS[name](replace(target, rows_port=described.rows_port), _wait_for_go)


async def _wait_for_go() -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("attack", choices=list(CALLERS))
    parser.add_argument("grpc", help="host:port of the server")
    parser.add_argument("http", help="host:port of its metrics")
    args = parser.parse_args()
    os.nice(NICE)
    asyncio.run(_attack(args.attack, args.grpc, args.http))


if __name__ == "__main__":
    main()
