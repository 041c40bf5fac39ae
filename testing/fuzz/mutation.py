"""Seeded faults in bytes."""

import random

_BYTES = (0, 1, 0x7F, 0x80, 0xFF)


def mutated(draw: random.Random, data: bytes) -> bytes:
    """Return `data` with bytes changed, cut off, removed, doubled or inserted; one time in eight unchanged."""
    changed = bytearray(data)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 4, 8))):
        at, length = draw.randrange(len(changed) + 1), draw.choice((1, 1, 2, 8, 64))
        match draw.randrange(5):
            case 0 if at < len(changed):
                changed[at] = draw.choice((*_BYTES, draw.randrange(256)))
            case 1:
                del changed[at:]
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = changed[at : at + length]
            case _:
                changed[at:at] = draw.randbytes(length)
    return bytes(changed)
