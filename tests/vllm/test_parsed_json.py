"""The middleware reads a body as vLLM does, however odd it is: else vLLM would find images that it has not seen."""

import json
import random
import struct

import pytest

from prefill_client.vllm.guarded_request import parsed_json

TWICE = b'{"a": {"uuid": "x"}, "b": [1], "a": 2}'
ODD = [
    TWICE,
    TWICE.decode().encode("utf-16"),
    TWICE.decode().encode("utf-32-le"),
    b"\xef\xbb\xbf" + TWICE,
    b'["\\ud800", "\xed\xa0\x80", "\\ud83d\\ude00", "\\u0000\\/\x7f"]',
    b"[NaN, -NaN]",
    b"[Infinity, -Infinity, 1e400, -0, -0.0, 1E5]",
    b"[9223372036854775808, -123456789012345678901234567890]",
    b"[" + b"9" * 4300 + b"]",
    b"[" + b"9" * 4301 + b"]",
    b"[" * 300 + b"]" * 300,
    b"[" * 100_000 + b"]" * 100_000,
    *(
        b'"a\tb"',
        b"{}x",
        b"{},",
        b"[1,]",
        b"[01]",
        b"[1.]",
        b"[+1]",
        b"nan",
        b'["\\x"]',
        b"\x0c{}",
        b"\xff",
        b"",
    ),
]


@pytest.mark.attack("a body that two parsers of JSON read differently")
@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
def test_a_body_is_read_as_json_reads_it(body: bytes) -> None:
    try:
        expected = json.loads(body)
    except (ValueError, RecursionError):
        expected = None
    assert repr(parsed_json(body)) == repr(expected)


def test_numbers_are_read_as_json_reads_them() -> None:
    random.seed(1)
    exact = [struct.unpack("d", random.randbytes(8))[0] for _ in range(20_000)]
    long = [f"{random.random() * 10:.40f}e{random.randrange(-330, 310)}" for _ in range(20_000)]
    body = (
        f"[{','.join([*map(repr, exact), *long])}]".replace("inf", "Infinity").replace("nan", "NaN").encode()
    )
    assert repr(parsed_json(body)) == repr(json.loads(body))
