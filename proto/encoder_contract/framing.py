"""Rows and files on the wire, framed and parsed by hand to avoid protobuf's copies.

Rows are `FetchResponse{rows{index, data}}`, and files are `SubmitRequest{bytes[{index, data, last}]}`.

The frames are identical to those of the generated classes, which can read them. protobuf copies `bytes` when it builds,
serialises and parses a message, and at every access of the field. This module copies once when it writes, and never
when it reads.
"""

from collections.abc import Iterable, Iterator

import xxhash
from google.protobuf.message import DecodeError

from encoder_contract.errors import InternalError
from encoder_contract.v1.encoder_pb2 import FetchResponse

MESSAGE_BYTES = 1 << 20
"""Payload of one message. Larger messages are no faster, and stall the event loop longer (4 MiB: 10-15 ms)."""

_ROWS_TAG = 0x12  # FetchResponse.rows: field 2, length-delimited
_INDEX_TAG = 0x08  # Rows.index: field 1, varint
_DATA_TAG = 0x12  # Rows.data: field 2, length-delimited
_PIECE_TAG = (
    0x1A  # SubmitRequest.bytes: field 3, length-delimited; ImageBytes has the fields of Rows, and `last`
)
_LAST = b"\x18\x01"  # ImageBytes.last: field 3, true


def frame_rows(
    index: int, extents: Iterable[memoryview], message_bytes: int = MESSAGE_BYTES
) -> Iterator[bytes]:
    """Yield serialised messages with the bytes of `extents`, in order, `message_bytes` in each."""
    parts: list[memoryview] = []
    held = 0
    for extent in extents:
        begin = 0
        while begin < len(extent):
            part = extent[begin : begin + message_bytes - held]
            parts.append(part)
            held += len(part)
            begin += len(part)
            if held == message_bytes:
                yield frame(index, parts)
                parts, held = [], 0
    if parts:
        yield frame(index, parts)


def frame(index: int, parts: list[memoryview]) -> bytes:
    """Return `FetchResponse{rows{index, data}}`, serialised, with `parts` joined as its data (one copy)."""
    return b"".join((_head(_ROWS_TAG, index, sum(map(len, parts))), *parts))


def frame_piece(index: int, data: memoryview, *, last: bool) -> tuple[bytes, memoryview, bytes]:
    """Return the parts of `SubmitRequest{bytes[{index, data, last}]}`, serialised. The messages can be joined."""
    end = _LAST if last else b""
    return _head(_PIECE_TAG, index, len(data), len(end)), data, end


def _head(tag: int, index: int, length: int, more: int = 0) -> bytes:
    """Return what precedes `length` bytes of data in a message of this tag, which has `more` bytes after them."""
    fields = b"" if index == 0 else bytes((_INDEX_TAG,)) + _varint(index)
    if length:
        fields += bytes((_DATA_TAG,)) + _varint(length)
    return bytes((tag,)) + _varint(len(fields) + length + more) + fields


def parse_fetch_response(message: bytes) -> FetchResponse | tuple[int, memoryview]:
    """Return (index, data) of a rows message, with data as a view; return the parsed message for any other kind.

    Accepts exactly what the generated class accepts. Raises `InternalError` for anything else.
    """
    rows = parse_rows(message)
    if rows is not None:
        return rows
    try:
        response = FetchResponse.FromString(message)
    except DecodeError as error:
        raise InternalError(f"{len(message)} bytes are not a FetchResponse: {error}") from error
    if response.HasField("rows"):
        return response.rows.index, memoryview(response.rows.data)
    return response


class Checksum:
    """A running XXH3-64 checksum, for bytes that are still in the processor's cache when they arrive."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def add(self, data: memoryview) -> None:
        """Add `data`. Releases the GIL for large views."""
        self._digest.update(data)

    @property
    def value(self) -> int:
        """Checksum of all bytes added so far."""
        return self._digest.intdigest()


def checksum(views: Iterable[memoryview]) -> int:
    """Return XXH3-64 over the bytes of `views`, in order."""
    running = Checksum()
    for view in views:
        running.add(view)
    return running.value


def parse_rows(raw: bytes) -> tuple[int, memoryview] | None:
    """Return (index, data) of a message that `frame` wrote; None for any other message, which protobuf has to parse."""
    message = memoryview(raw)
    try:
        if message[0] != _ROWS_TAG:
            return None
        length, at = _read_varint(message, 1)
        if at + length != len(message):
            return None
        index = 0
        if message[at] == _INDEX_TAG:
            index, at = _read_varint(message, at + 1)
        if message[at] != _DATA_TAG:
            return None
        length, at = _read_varint(message, at + 1)
    except IndexError:
        return None
    if at + length != len(message):
        return None
    return index, message[at:]


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return (value, offset of the next field). Raises `IndexError` past the end, or for more than a uint32."""
    value = 0
    for shift in range(0, 35, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 32:
                break
            return value, at
    raise IndexError
