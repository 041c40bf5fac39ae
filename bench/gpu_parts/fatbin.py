"""Makes a CUDA library small: of its code for GPUs, only that of some compute capabilities is kept.

The code lies in the section `.nv_fatbin`: containers (magic, version, bytes of the header, bytes of what follows), one
for each source file, and in each an entry for every capability (kind, version, bytes of the header, bytes of the code,
..., capability). What is not kept becomes zeros, which a compressor takes to nothing: offsets stay as they are.
"""

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_CONTAINER = struct.Struct("<IHHQ")
_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQ")
_CAPABILITY_AT = 28  # in an entry's header
_PTX = 1
_SECTION = ".nv_fatbin"


def prune(library: Path, capabilities: Collection[int]) -> int:
    """Zero the code for other capabilities (90 is 9.0), and PTX; return how many bytes.

    A container without code for any of `capabilities` stays as it is: its PTX is compiled when it is used. Raises
    `ValueError` for a file that is no 64-bit ELF library.
    """
    content = bytearray(library.read_bytes())
    if (section := section_of(content, _SECTION)) is None:
        return 0
    zeroed = 0
    for entries in _containers(content, *section):
        kept = [each for each in entries if each.kind != _PTX and each.capability in capabilities]
        for each in entries if kept else ():
            if each not in kept:
                content[each.begin : each.end] = bytes(each.end - each.begin)
                zeroed += each.end - each.begin
    library.write_bytes(content)
    return zeroed


def section_of(content: bytes | bytearray, name: str) -> tuple[int, int] | None:
    """Return where a section of an ELF file begins and ends; None without it. Raises `ValueError`."""
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF file")
    [table] = struct.unpack_from("<Q", content, 40)
    size, count, names = struct.unpack_from("<HHH", content, 58)
    headers = [struct.unpack_from("<IIQQQQ", content, table + size * number) for number in range(count)]
    texts = headers[names][4]
    for header in headers:
        begin = texts + header[0]
        if content[begin : content.index(0, begin)] == name.encode():
            return header[4], header[4] + header[5]
    return None


@dataclass(frozen=True, slots=True)
class _Entry:
    """The code for one capability: where it begins and ends."""

    kind: int
    capability: int
    begin: int
    end: int


def _containers(content: bytearray, at: int, end: int) -> Iterator[list[_Entry]]:
    """Yield the entries of each container."""
    while at + _CONTAINER.size <= end:
        magic, _, header, size = _CONTAINER.unpack_from(content, at)
        if magic != _MAGIC:
            at += 8  # between containers
            continue
        entry, at = at + header, at + header + size
        found = []
        while entry < at:
            kind, _, header, size = _ENTRY.unpack_from(content, entry)
            [capability] = struct.unpack_from("<I", content, entry + _CAPABILITY_AT)
            found.append(_Entry(kind, capability, entry + header, entry + header + size))
            entry += header + size
        yield found
