"""The cache of submitted files: bounded, with least-recently-used eviction and a time to live."""

import threading

import pytest

from encoder_contract.header import Header
from encoder_contract.video import VideoInfo
from encoder_service.image.source import Source, VideoFile
from encoder_service.image.sources import SourceCache


def of(key: bytes, size: int) -> Source:
    """Return a source of `size` bytes."""
    return Source(key, bytes(size), Header("JPEG", 1, 1, 1, 3))


def put_video(videos: SourceCache, key: bytes, size: int, holder: str = "") -> Source:
    """Put a video of `size` bytes into the cache; return its source, which alone keeps no file alive."""
    file = VideoFile()
    file.add(bytes(size))
    source = Source.of_video(key, file, VideoInfo(2, 2, 1.0, 8, 8))
    videos.put(source, holder)
    return source


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_least_recently_used_entries_are_evicted() -> None:
    sources = SourceCache(max_bytes=30, ttl_s=100)
    for name in (b"a", b"b", b"c"):
        sources.put(of(name, 10))
    assert sources.get(b"a") is not None
    sources.put(of(b"d", 10))
    assert sources.get(b"b") is None
    assert [sources.get(name) is not None for name in (b"a", b"c", b"d")] == [True] * 3
    assert sources.held_bytes == 30


def test_a_file_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    sources = SourceCache(max_bytes=30, ttl_s=100)
    sources.put(of(b"a", 10))
    sources.put(of(b"big", 31))
    assert sources.get(b"big") is None
    assert sources.get(b"a") is not None


def test_an_entry_expires_after_its_last_use() -> None:
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


class ReadsSizeWhenHashed(bytes):
    """A key that has another thread read the size of the cache when it is hashed for the n-th time."""

    def begin(self, sources: SourceCache, clock: Clock, number: int) -> None:
        self.sources, self.clock, self.left = sources, clock, number
        self.reader = threading.Thread(target=lambda: sources.held_bytes)

    def __hash__(self) -> int:
        self.left = getattr(self, "left", 0) - 1
        if self.left == 0:
            self.clock.now += 200
            self.reader.start()
            self.reader.join(0.1)  # let it run until it ends or waits for the lock
        return super().__hash__()


def test_reading_the_size_on_another_thread_is_safe() -> None:
    """A scrape of the metrics does that, and it drops expired entries."""
    hashes = 0
    while get_while_size_is_read(hashes + 1):
        hashes += 1
    assert hashes > 0


def get_while_size_is_read(number: int) -> bool:
    """Read the size when `get` hashes its key for the n-th time, and check the cache; False if it hashes it less."""
    clock, key = Clock(), ReadsSizeWhenHashed(b"a")
    sources = SourceCache(max_bytes=30, ttl_s=100, clock=clock)
    sources.put(of(key, 10))
    key.begin(sources, clock, number)
    sources.get(key)
    if key.left > 0:
        return False
    key.left = 0  # start no further thread
    key.reader.join()
    for _ in range(3):
        clock.now += 200
        sources.put(of(b"b", 10))
        assert (sources.get(b"b") is not None, sources.held_bytes, len(sources)) == (True, 10, 1)
    return True


@pytest.mark.attack("a tenant that fills the kept files")
def test_the_holder_with_the_most_bytes_makes_room() -> None:
    sources = SourceCache(max_bytes=100, ttl_s=100)
    sources.put(of(b"calm", 10), "calm")
    for number in range(50):
        sources.put(of(b"%d" % number, 10), "greedy")
    assert sources.held_bytes == 100, "a holder may use all free space"
    assert sources.get(b"calm") is not None
    for number in range(10):
        sources.put(of(b"more %d" % number, 10), "calm")
    assert sum(sources.get(b"%d" % number) is not None for number in range(50)) == 5
    assert sources.get(b"49") is not None, "its least recently used entries are dropped first"


def test_a_large_file_of_a_new_holder_is_kept() -> None:
    sources = SourceCache(max_bytes=30, ttl_s=100)
    sources.put(of(b"small", 10), "a")
    sources.put(of(b"large", 25), "b")
    assert sources.get(b"large") is not None
    assert (len(sources), sources.held_bytes) == (1, 25)


def test_a_file_counts_against_the_holder_that_sent_it_first() -> None:
    sources = SourceCache(max_bytes=30, ttl_s=100)
    sources.put(of(b"a", 10), "first")
    sources.put(of(b"b", 10), "second")
    sources.put(of(b"a", 10), "second")
    sources.put(of(b"c", 10), "second")
    sources.put(of(b"d", 10), "third")
    assert [sources.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_videos_are_kept_up_to_a_number_and_freed_when_dropped() -> None:
    videos = SourceCache(max_bytes=1000, ttl_s=100, max_files=2)
    sources = [put_video(videos, name, 10) for name in (b"a", b"b", b"c")]
    assert [videos.get(name) is not None for name in (b"a", b"b", b"c")] == [False, True, True]
    assert videos.held_bytes == 20
    alive = [source.file is not None and source.file() is not None for source in sources]
    assert alive == [False, True, True], "a source alone keeps no file alive"


@pytest.mark.attack("a tenant that sends many tiny videos")
def test_many_tiny_videos_evict_no_large_ones_of_another_holder() -> None:
    """The number of files is short, not the bytes, so the holder with the most files makes room."""
    videos = SourceCache(max_bytes=1 << 20, ttl_s=100, max_files=256)
    large, tiny = [(b"large %d" % n, 1000) for n in range(4)], [(b"tiny %d" % n, 1) for n in range(300)]
    for name, size in large + tiny:
        put_video(videos, name, size, "alice" if size > 1 else "mallory")
    assert [videos.get(name) is not None for name, _ in large] == [True] * 4
    assert len(videos) == 256
