"""AV1's open bitstream units: the largest frame that a sequence allows, which is what a decoder prepares for."""

from collections.abc import Iterable, Iterator

from encoder_contract.errors import InvalidImageError

_SEQUENCE_HEADER = 1
_HAS_EXTENSION, _HAS_LENGTH = 4, 2
_MAX_SEQUENCE_HEADER_BYTES = 256
# A frame has a few units, or one more for each of its tiles; a grid has some hundred frames.
_MAX_UNITS = 8192


def frame_sizes(image: bytes, frames: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield (width, height) of the sequence headers of each frame, given as its begin and end in the file.

    Raises `InvalidImageError` for what is no such stream, or is cut, and for frames of more units than sound ones.
    """
    room = _MAX_UNITS
    for begin, end in frames:
        found = False
        for kind, unit_begin, unit_end in _units(image, begin, end):
            room -= 1
            if room < 0:
                raise InvalidImageError(f"unsupported AVIF: frames of more than {_MAX_UNITS} units")
            if kind == _SEQUENCE_HEADER:
                found = True
                yield _frame_size(image[unit_begin : min(unit_end, unit_begin + _MAX_SEQUENCE_HEADER_BYTES)])
        if not found:
            raise InvalidImageError("damaged AVIF: a frame without a sequence header")


def _units(image: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (type, begin, end of the payload) of each unit."""
    end = min(end, len(image))
    while begin < end:
        head = image[begin]
        begin += 2 if head & _HAS_EXTENSION else 1
        length, begin = _length(image, begin, end) if head & _HAS_LENGTH else (end - begin, begin)
        if length < 0 or begin + length > end:
            raise InvalidImageError("truncated: an AVIF's frame is cut")
        yield head >> 3 & 15, begin, begin + length
        begin += length


def _length(image: bytes, position: int, end: int) -> tuple[int, int]:
    """Return a number of seven bits a byte, and where it ends."""
    length = 0
    for shift in range(0, 56, 7):
        byte = image[position] if position < end else 0
        position += 1
        length |= (byte & 127) << shift
        if byte < 128:
            break
    return length, position


class _Bits:
    """Takes numbers of some bits each."""

    def __init__(self, payload: bytes) -> None:
        self._bits = int.from_bytes(payload, "big")
        self._left = 8 * len(payload)

    def take(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise InvalidImageError("truncated: an AVIF's sequence header is cut")
        return self._bits >> self._left & (1 << count) - 1


def _frame_size(header: bytes) -> tuple[int, int]:
    """Read a sequence header up to the size (AV1 specification, 5.5.1)."""
    bits = _Bits(header)
    bits.take(4)  # profile, still picture
    if bits.take(1):  # reduced header
        bits.take(5)
    else:
        _skip_operating_points(bits)
    width_bits, height_bits = bits.take(4) + 1, bits.take(4) + 1
    return bits.take(width_bits) + 1, bits.take(height_bits) + 1


def _skip_operating_points(bits: _Bits) -> None:
    delay_bits = 0
    has_model = False
    if bits.take(1):  # timing
        bits.take(64)
        if bits.take(1):  # equal intervals: a number as many bits long as there are zeros before it
            zeros = 0
            while zeros < 32 and not bits.take(1):
                zeros += 1
            bits.take(zeros if zeros < 32 else 0)
        has_model = bool(bits.take(1))
        if has_model:
            delay_bits = bits.take(5) + 1
            bits.take(42)
    has_delay = bits.take(1)
    for _ in range(bits.take(5) + 1):
        bits.take(12)
        if bits.take(5) > 7:  # the level; above it there are tiers
            bits.take(1)
        if has_model and bits.take(1):
            bits.take(2 * delay_bits + 1)
        if has_delay and bits.take(1):
            bits.take(4)
