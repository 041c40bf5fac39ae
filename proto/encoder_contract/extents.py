"""Extents of bytes: which parts of a memory they are, and how bytes move between parts that are cut differently.

A view is flat bytes in place: a memoryview, a numpy array or a tensor. Slicing one copies nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from encoder_contract.errors import InternalError
from encoder_contract.framing import Checksum

Extent = tuple[int, int]
"""(offset, length), in bytes."""


class View(Protocol):
    """Flat bytes that can be sliced without a copy."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


AnyView = TypeVar("AnyView", bound=View)
Target = TypeVar("Target", bound=View)
Source = TypeVar("Source", bound=View)


def views(memory: AnyView, extents: Iterable[Extent], base: int = 0) -> list[AnyView]:
    """Return a view of each extent; offsets count from byte `base` of `memory`."""
    return [memory[base + offset : base + offset + length] for offset, length in extents]


def cut(whole: Iterable[AnyView], most: Callable[[AnyView], int]) -> Iterator[AnyView]:
    """Yield the same bytes in parts: `most` returns how many bytes from the beginning of a view a part may have."""
    for view in whole:
        rest = view
        while len(rest):
            part: AnyView = rest[: most(rest)]
            yield part
            rest = rest[len(part) :]


def pairs(targets: Iterable[Target], sources: Iterable[Source]) -> Iterator[tuple[Target, Source]]:
    """Yield (target, source) parts of equal length, in order, that cover both. The totals must be equal."""
    remaining = iter(sources)
    source: Any = b""
    for whole in targets:
        target: Any = whole
        while len(target):
            while not len(source):
                source = next(remaining, None)
                assert source is not None, "the sources have fewer bytes than the targets"
            count = min(len(target), len(source))
            yield target[:count], source[:count]
            target, source = target[count:], source[count:]
    assert not len(source), "the sources have more bytes than the targets"
    assert not any(map(len, remaining)), "the sources have more bytes than the targets"


def move_all(view: memoryview, move: Callable[[memoryview, int], int]) -> int:
    """Call `move(rest, moved)` until it has moved all of `view`; return the bytes moved, fewer if it returned 0."""
    moved = 0
    while moved < len(view) and (count := move(view[moved:], moved)):
        moved += count
    return moved


class Filling:
    """Writes bytes that arrive in order into views. Not thread-safe."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._unfilled = list(into)
        self._checksum = Checksum()
        self.missing_bytes = sum(map(len, into))
        """Bytes that have not arrived yet."""

    def add(self, data: memoryview) -> None:
        """Write the next bytes. Raises `InternalError`, and writes none of them, if they are more than are missing."""
        if len(data) > self.missing_bytes:
            raise InternalError(
                f"{len(data)} bytes of rows arrived, but only {self.missing_bytes} are missing"
            )
        self._checksum.add(data)
        self.missing_bytes -= len(data)
        while data:
            target = self._unfilled[0]
            count = min(len(target), len(data))
            target[:count] = data[:count]
            data = data[count:]
            if count == len(target):
                del self._unfilled[0]
            else:
                self._unfilled[0] = target[count:]

    @property
    def complete(self) -> bool:
        """Whether all bytes have arrived."""
        return not self.missing_bytes

    @property
    def checksum(self) -> int:
        """XXH3-64 of the bytes that have arrived."""
        return self._checksum.value
