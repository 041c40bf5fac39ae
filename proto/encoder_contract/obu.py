"""AV1's open bitstream units: the largest frame that a sequence allows, which is what a decoder prepares for."""

from collections.abc import Iterator

from encoder_contract.errors import InvalidImageError

_SEQUENCE_HEADER = 1
_MAX_SEQUENCE_HEADER_BYTES = 256
# A frame has a unit, or one for each of a few hundred tiles.
_MAX_UNITS = 4096


def frame_sizes(image: bytes, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (width, height) of each sequence header in an AV1 stream; at least one.

    Raises `InvalidImageError` for what is no such stream, or is cut.
    """
    found = False
    for kind, unit_begin, unit_end in _units(image, begin, end):
        if kind == _SEQUENCE_HEADER:
            found = True
            yield _frame_size(image[unit_begin : min(unit_end, unit_begin + _MAX_SEQUENCE_HEADER_BYTES)])
    if not found:
        raise InvalidImageError("damaged AVIF: frames without a sequence header")


def _units(image: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (type, begin, end of the payload) of each unit."""
    end = min(end, len(image))
    for _ in range(_MAX_UNITS):
        if begin >= end:
            return
        head = image[begin]
        begin += 2 if head & 4 else 1  # an extension says which layer
        length = end - begin
        if head & 2:
            length = 0
            for shift in range(0, 56, 7):
                byte = image[begin] if begin < end else 0
                begin += 1
                length |= (byte & 127) << shift
                if byte < 128:
                    break
        if length < 0 or begin + length > end:
            raise InvalidImageError("truncated: an AVIF's frame is cut")
        yield head >> 3 & 15, begin, begin + length
        begin += length
    raise InvalidImageError(f"damaged AVIF: a frame of more than {_MAX_UNITS} units")


class _Bits:
    """Takes numbers of some bits each; behind the end there are zeros."""

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
