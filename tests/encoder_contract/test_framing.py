"""Hand-framed rows: byte-identical with the generated class, and no message can confuse the parser."""

import os
import sys
import threading
import time

import pytest
import xxhash
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from encoder_contract.errors import InternalError
from encoder_contract.framing import (
    MESSAGE_BYTES,
    checksum,
    frame,
    frame_piece,
    frame_rows,
    parse_fetch_response,
)
from encoder_contract.v1 import encoder_pb2 as pb

indices = st.integers(0, 2**32 - 1)
payloads = st.binary(max_size=300)


def generated(index, data):
    return pb.FetchResponse(rows=pb.Rows(index=index, data=data))


@given(index=indices, parts=st.lists(payloads, max_size=4))
@example(index=0, parts=[])
@example(index=1, parts=[b"x" * 70_000, b"y" * 70_000])
def test_a_frame_is_what_the_generated_class_writes(index, parts):
    data = b"".join(parts)
    message = frame(index, [memoryview(part) for part in parts])
    assert message == generated(index, data).SerializeToString()
    parsed = parse_fetch_response(message)
    assert isinstance(parsed, tuple)
    assert (parsed[0], bytes(parsed[1])) == (index, data)


@given(pieces=st.lists(st.tuples(indices, payloads, st.booleans()), max_size=4), is_last=st.booleans())
@example(pieces=[(0, b"", True), (300, b"x" * 70_000, False)], is_last=True)
def test_framed_pieces_are_what_the_generated_class_writes(pieces, is_last):
    head = pb.SubmitRequest(open=pb.Caller(request_id="a request"), names=pb.ImageNames(kept=True))
    request = pb.SubmitRequest(last=is_last)
    request.MergeFrom(head)
    parts = [head.SerializeToString()]
    for index, data, last in pieces:
        request.bytes.add(index=index, data=data, last=last)
        parts += frame_piece(index, memoryview(data), last=last)
    parts.append(pb.SubmitRequest(last=is_last).SerializeToString())
    assert b"".join(parts) == request.SerializeToString()


@given(extents=st.lists(payloads, max_size=6), message_bytes=st.integers(1, 100), index=indices)
def test_messages_carry_all_extents_in_order_and_none_is_over_the_bound(extents, message_bytes, index):
    messages = list(frame_rows(index, map(memoryview, extents), message_bytes))
    pieces = [parse_fetch_response(message) for message in messages]
    assert all(found == index for found, _ in pieces)
    assert b"".join(data for _, data in pieces) == b"".join(extents)
    assert all(len(data) == message_bytes for _, data in pieces[:-1])
    assert all(0 < len(data) <= message_bytes for _, data in pieces)


def test_rows_are_parsed_without_a_copy():
    message = frame(7, [memoryview(os.urandom(MESSAGE_BYTES))])
    index, data = parse_fetch_response(message)
    assert index == 7
    assert data.obj is message


@pytest.mark.parametrize(
    "response",
    [
        pb.FetchResponse(),
        pb.FetchResponse(ready=[pb.ImageReady(index=3, width=8, stage_ms={"vit": 1.5})]),
        pb.FetchResponse(errors=[pb.ImageError(index=2, code=5, message="unknown")]),
    ],
)
def test_other_messages_are_parsed_by_the_generated_class(response):
    assert parse_fetch_response(response.SerializeToString()) == response


def agrees_with_the_generated_class(message):
    try:
        expected = pb.FetchResponse.FromString(message)
    except DecodeError:
        with pytest.raises(InternalError):
            parse_fetch_response(message)
        return
    parsed = parse_fetch_response(message)
    if expected.HasField("rows"):
        assert (parsed[0], bytes(parsed[1])) == (expected.rows.index, expected.rows.data)
    else:
        assert parsed == expected


@given(message=st.binary(max_size=40))
@example(message=b"\x12\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01")
@example(message=b"\x12\x04\x08\x01\x12\x05")
@example(message=b"\x12\x07\x08\xff\xff\xff\xff\x7f\x12\x00")
@example(message=b"\x12\x04\x08\x01\x12\x00\x12\x02\x08\x05")
@settings(max_examples=500)
def test_any_bytes_are_accepted_or_refused_as_the_generated_class_does(message):
    agrees_with_the_generated_class(message)
    agrees_with_the_generated_class(b"\x12" + message)


@given(
    index=indices,
    data=payloads,
    at=st.integers(0, 400),
    change=st.sampled_from(["cut", "flip", "insert"]),
    byte=st.integers(0, 255),
)
@settings(max_examples=500)
def test_damaged_frames_are_judged_as_by_the_generated_class(index, data, at, change, byte):
    message = bytearray(frame(index, [memoryview(data)]))
    at %= len(message)
    if change == "cut":
        del message[at:]
    elif change == "flip":
        message[at] ^= byte
    else:
        message.insert(at, byte)
    agrees_with_the_generated_class(bytes(message))


@given(views=st.lists(payloads, max_size=5))
def test_the_checksum_does_not_depend_on_how_the_bytes_are_cut(views):
    assert checksum(map(memoryview, views)) == xxhash.xxh3_64_intdigest(b"".join(views))


@pytest.fixture
def unasked():
    """Let a thread keep Python's lock until it gives the lock up of its own accord."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("unasked")
def test_the_checksum_lets_other_threads_run():
    view, at_work = memoryview(bytes(16 << 20)), False
    seen, began = threading.Event(), time.monotonic()

    def work():
        nonlocal at_work
        at_work = True
        while not seen.is_set() and time.monotonic() < began + 60:
            checksum([view])
        at_work = False

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive() and not at_work:
        time.sleep(0.001)
    if at_work:  # it would be over if the checksum kept the lock
        seen.set()
    thread.join()
    assert seen.is_set()
