"""Submitted bytes: bounded, least recently used out first, gone after their time."""

from encoder_contract.header import Header
from encoder_service.image.source import Source
from encoder_service.image.source_cache import SourceCache


def of(key: bytes, size: int) -> Source:
    """A source of so many bytes."""
    return Source(key, bytes(size), Header("JPEG", 1, 1, 1, 3))


class Clock:
    """A clock the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_least_recently_used_make_room() -> None:
    sources = SourceCache(max_bytes=30, ttl_s=100)
    for name in (b"a", b"b", b"c"):
        sources.put(of(name, 10))
    assert sources.get(b"a") is not None
    sources.put(of(b"d", 10))
    assert sources.get(b"b") is None
    assert [sources.get(name) is not None for name in (b"a", b"c", b"d")] == [True] * 3
    assert sources.held_bytes == 30


def test_an_image_larger_than_the_bound_is_not_kept_and_evicts_nobody() -> None:
    sources = SourceCache(max_bytes=30, ttl_s=100)
    sources.put(of(b"a", 10))
    sources.put(of(b"big", 31))
    assert sources.get(b"big") is None
    assert sources.get(b"a") is not None


def test_an_image_lives_for_its_time_after_the_last_use() -> None:
    clock = Clock()
    sources = SourceCache(max_bytes=100, ttl_s=10, clock=clock)
    sources.put(of(b"a", 10))
    sources.put(of(b"b", 10))
    clock.now = 9
    assert sources.get(b"a") is not None
    clock.now = 11
    assert sources.get(b"b") is None
    assert sources.get(b"a") is not None
    clock.now = 22
    assert sources.get(b"a") is None
    assert sources.held_bytes == 0


def test_putting_an_image_again_counts_it_once() -> None:
    sources = SourceCache(max_bytes=100, ttl_s=10)
    sources.put(of(b"a", 10))
    sources.put(of(b"a", 10))
    assert (len(sources), sources.held_bytes) == (1, 10)
