"""ResolveUrl and RecordUrl with any fields, of a few URLs that other cases ask about meanwhile."""

import asyncio
import random
from contextlib import suppress
from typing import Any

import grpc

from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from testing.fuzz.answers import SERVICE, check
from testing.fuzz.mutation import mutated
from testing.photos import photo

_URLS = [content_digest(b"url %d" % number) for number in range(4)]
_IMAGES = [photo(40 + 8 * number, 40, number) for number in range(2)]
_NUMBERS = (0, 1, 20, 1000, 2**31, 2**32 - 1)


async def shared_urls(channel: Any, _seed: int, draw: random.Random) -> None:
    """A few of the two calls, sensible or not, damaged, or left before their answer."""
    claim = b""
    for _ in range(draw.randrange(1, 5)):
        resolves = draw.random() < 0.5
        request = _question(draw) if resolves else _statement(draw, claim)
        raw = request.SerializeToString()
        method = channel.unary_unary(f"{SERVICE}/{'ResolveUrl' if resolves else 'RecordUrl'}")
        call: Any = method(mutated(draw, raw) if draw.random() < 0.2 else raw)
        if draw.random() < 0.1:
            await asyncio.sleep(0.01)
            call.cancel()
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            answer = await call
            if resolves:
                claim = pb.ResolveUrlResponse.FromString(answer).claim or claim
        await check(call, [])


def _question(draw: random.Random) -> pb.ResolveUrlRequest:
    return pb.ResolveUrlRequest(
        caller=pb.Caller(tenant_salt=draw.randbytes(draw.choice((0, 0, 1, 65)))),
        url_digest=_url(draw),
        wait_ms=draw.choice((0, 0, 1, 20)),
        claim_ms=draw.choice(_NUMBERS),
    )


def _statement(draw: random.Random, claim: bytes) -> pb.RecordUrlRequest:
    image = draw.choice(_IMAGES)
    record = pb.UrlRecord(
        digest=draw.choice((content_digest(image), content_digest(image), draw.randbytes(31))),
        size_bytes=draw.choice((len(image), 0, 2**64 - 1)),
        width=draw.choice((40, 40, *_NUMBERS)),
        height=draw.choice((40, 40, *_NUMBERS)),
        etag=draw.choice(("", '"1"', "\r\n", "é" * 200)),
        answered_by=draw.randbytes(draw.choice((0, 32, 33))),
    )
    return pb.RecordUrlRequest(
        url_digest=_url(draw),
        record=record if draw.random() < 0.7 else None,
        fresh_ms=draw.choice(_NUMBERS),
        unshared=draw.random() < 0.2,
        claim=draw.choice((claim, claim, draw.randbytes(16), b"x")),
    )


def _url(draw: random.Random) -> bytes:
    return draw.choice((*_URLS, draw.randbytes(draw.choice((0, 31, 33)))))
