"""Rows on the wire: `FetchResponse{rows{index, data}}` framed and parsed by hand, without protobuf's copies.

`PutRequest{rows{index, data}}` has the same bytes. They are identical to those of the generated classes, which can read
them. protobuf copies `bytes` when a message is built, serialised and parsed, and at every access of the field. This
module copies once when writing and never when reading.
"""

from collections.abc import Iterable, Iterator

import xxhash
from google.protobuf.message import DecodeError

from encoder_contract.errors import InternalError
from encoder_contract.v1.encoder_pb2 import FetchResponse

MESSAGE_BYTES = 1 << 20
"""Payload of a message: larger is no faster and stalls the event loop longer (4 MiB: 10-15 ms)."""

_ROWS_TAG = 0x12  # FetchResponse.rows: field 2, length-delimited
_INDEX_TAG = 0x08  # Rows.index: field 1, varint
_DATA_TAG = 0x12  # Rows.data: field 2, length-delimited


def frame_rows(
    index: int, extents: Iterable[memoryview], message_bytes: int = MESSAGE_BYTES
) -> Iterator[bytes]:
    """Yield serialised messages that carry the bytes of `extents`, in order, `message_bytes` in each."""
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
    length = sum(map(len, parts))
    fields = b"" if index == 0 else bytes((_INDEX_TAG,)) + _varint(index)
    if length:
        fields += bytes((_DATA_TAG,)) + _varint(length)
    head = bytes((_ROWS_TAG,)) + _varint(len(fields) + length) + fields
    return b"".join((head, *parts))


def parse_fetch_response(message: bytes) -> FetchResponse | tuple[int, memoryview]:
    """Return (index, data) of a rows message, data viewed in place, or the parsed message of any other kind.

    Accepts exactly what the generated class accepts. Raises `InternalError` for anything else.
    """
    rows = parse_rows(message)
    if rows is not None:
        return rows
    try:
        response = FetchResponse.FromString(message)
    except DecodeError as error:
        raise InternalError(f"{len(message)} bytes are not a FetchResponse: {error}") from error
    if response.WhichOneof("message") == "rows":
        return response.rows.index, memoryview(response.rows.data)
    return response


class Checksum:
    """XXH3-64 over bytes as they arrive, while they are still in the processor's cache."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def add(self, data: memoryview) -> None:
        """Add `data`. Releases the GIL for large views."""
        self._digest.update(data)

    @property
    def value(self) -> int:
        """Checksum of all that was added."""
        return self._digest.intdigest()


def checksum(views: Iterable[memoryview]) -> int:
    """Return XXH3-64 over the bytes of `views`, one after the other."""
    running = Checksum()
    for view in views:
        running.add(view)
    return running.value


def parse_rows(raw: bytes) -> tuple[int, memoryview] | None:
    """Return what `frame` wrote; None for any other arrangement of fields, left to protobuf's parser."""
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
    """Return (value, where the next field begins); IndexError beyond the end or beyond a uint32."""
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
