"""Cases for parsers: image headers, frames of rows, requests, URLs. A case passes if it returns."""

import random
import time
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from encoder_contract.errors import (
    EncoderError,
    ForbiddenError,
    InternalError,
    InvalidImageError,
    InvalidRequestError,
)
from encoder_contract.framing import frame, parse_fetch_response
from encoder_contract.header import read_header
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from prefill_client.media.destinations import ImageUrl
from prefill_client.media.download import MAX_FRESH_S, fresh_s
from testing.fuzz.mutation import mutated
from testing.photos import damaged

# CPU time: a busy machine does not lengthen it. The header of a valid file takes well under 1 ms.
MAX_CASE_S = 2.0

Parser = Callable[[int, random.Random], object]


def header(seed: int, _draw: random.Random) -> None:
    """A damaged image file has a header or is invalid."""
    _ends_in(lambda: read_header(damaged(seed)), InvalidImageError)


def frames(_seed: int, draw: random.Random) -> None:
    """Our parser and protobuf's agree on a damaged message of rows."""
    sound = frame(draw.randrange(1 << 32), [memoryview(draw.randbytes(draw.choice((0, 1, 40, 300))))])
    message = mutated(draw, sound)
    try:
        expected = pb.FetchResponse.FromString(message)
    except DecodeError:
        _raises(lambda: parse_fetch_response(message), InternalError)
        return
    found: Any = parse_fetch_response(message)
    if expected.HasField("rows"):
        assert found == (expected.rows.index, expected.rows.data), message
    else:
        assert found == expected, message


def requests(_seed: int, draw: random.Random) -> None:
    """A damaged request is parsed or invalid."""
    name = pb.ImageName(index=draw.randrange(9), digest=draw.randbytes(32), grid=pb.Grid(t=1, h=4, w=4))
    submits = (
        pb.SubmitRequest(
            open=pb.Caller(request_id="r", tenant_salt=draw.randbytes(8), priority=draw.randrange(-9, 9))
        ),
        pb.SubmitRequest(names=pb.ImageNames(names=[name] * draw.randrange(6))),
        pb.SubmitRequest(
            bytes=[pb.ImageBytes(index=1, data=draw.randbytes(draw.choice((0, 100, 3000))), last=True)]
        ),
    )
    parts = draw.sample(submits, draw.randrange(1, 4))
    raw = mutated(draw, b"".join(part.SerializeToString() for part in parts))
    _ends_in(lambda: _parse_submit(raw), InvalidRequestError)
    wanted = pb.FetchRequest(
        images=[pb.FetchImage(digest=draw.randbytes(32))] * draw.randrange(6), grace_ms=5
    )
    raw = mutated(draw, wanted.SerializeToString())
    _ends_in(lambda: messages.parse_fetch(raw, 8), InvalidRequestError)


def _parse_submit(raw: bytes) -> None:
    """Count and parse a message, with and without its files. A message that is accepted has what was counted."""
    counted = messages.parse_submit(raw, 8)
    whole, without = counted.parsed(), counted.parsed(with_files=False)
    assert not without.bytes
    assert whole.names == without.names
    assert sum(len(piece.data) for piece in whole.bytes) <= counted.file_bytes, raw
    assert whole.HasField("open") == (counted.open is not None), raw
    if counted.open is not None:
        counted.caller()


def urls(_seed: int, draw: random.Random) -> None:
    """A damaged URL is refused, or parses to the same again when it is written."""
    sound = draw.choice(
        (
            "http://user@cdn.example.org:8080/a/b.jpg?size=3#top",
            "https://[2001:db8::1]:1/",
            "http://127.0.0.1/%20",
            "https://faß.例え。テスト:8/50%?%zz",
        )
    )
    text = mutated(draw, sound.encode()).decode("utf-8", draw.choice(("replace", "ignore")))
    try:
        url = ImageUrl.parse(text)
    except (InvalidImageError, ForbiddenError):
        return
    assert ImageUrl.parse(str(url)) == url, text
    control = draw.choice(("max-age=3, no-cache", "s-maxage=9, private", "max-age=100000000000"))
    date, age = "Sun, 06 Nov 1994 08:49:37 GMT", "60"
    sound_headers = {"cache-control": control, "expires": date, "date": date, "age": age, "vary": "*"}
    headers = {
        name: mutated(draw, value.encode()).decode("latin-1")
        for name, value in sound_headers.items()
        if draw.random() < 0.5
    }
    assert 0 <= fresh_s(headers, 60.0) <= MAX_FRESH_S, headers


PARSERS: dict[str, Parser] = {each.__name__: each for each in (header, frames, requests, urls)}


def run(name: str, seed: int) -> None:
    """Run one case. Raises the error that it finds, or `TimeoutError` if it takes too long."""
    began = time.thread_time()
    PARSERS[name](seed, random.Random(seed))
    took_s = time.thread_time() - began
    if took_s > MAX_CASE_S:
        raise TimeoutError(f"it took the processor {took_s:.1f} s")


def _ends_in(parse: Callable[[], object], error: type[EncoderError]) -> None:
    try:
        parse()
    except error:
        return


def _raises(parse: Callable[[], object], error: type[EncoderError]) -> None:
    try:
        parse()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")
