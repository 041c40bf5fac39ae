"""Replays seeded traces of image requests against eviction orders, and measures the cost of the cache's own order.

An access is a request for the rows of an image of Qwen3-VL-8B. A miss costs the seconds that a tower on an H200 needs
by arithmetic. Each order is compared with plain LRU; the offline order, which knows the future, is an upper
bound. No server runs.
"""

import argparse
import heapq
import random
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from multiprocessing import Pool
from typing import Any, NamedTuple, Protocol

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, table
from encoder_service.store.eviction import EvictionOrder, Item

TRACES = ("chats", "albums", "scans and chats", "catalogue", "drifting catalogue", "mix")
BENCHMARK = Benchmark(
    "eviction",
    "What does the order of eviction save?",
    (
        Figure("mix", "four holders, 8 GiB: tower time saved, ours / LRU", target=">= 1.15"),
        Figure("mix_over_shares", "the same: ours / LRU inside equal shares", target=">= 1.8"),
        Figure("worst", "the worst of the six traces: ours / LRU", target=">= 0.98"),
        Figure("scans and chats", "scans beside chats: ours / LRU"),
        Figure("mix_of_offline", "four holders: ours / an order that knows the future"),
        Figure("access_us", "an access at 100 000 entries, processor time: ours", "µs", "<= 5"),
        Figure("lru_access_us", "the same: LRU", "µs"),
    ),
    limit_s=300,
    arguments=("--plot",),
    dry_run=("--seeds", "1", "--minutes", "6"),
)

GIB = 1 << 30
ROW_BYTES = 32_768  # main and three DeepStack levels of 4096 bf16 values
SIZES = {"256": (256, 256), "512": (512, 512), "720": (1280, 704), "1080": (1920, 1088), "1440": (2560, 1440)}
H200_FLOPS = 790e12
WARM_UP = 0.1  # of a trace, which is not counted


class Access(NamedTuple):
    """One request for an image: at which second, whose, which one, and of which size."""

    at_s: float
    holder: str
    image: tuple[int, int]
    size: str

    @property
    def key(self) -> tuple[str, tuple[int, int]]:
        """What identifies the image."""
        return self.holder, self.image


def embedding(size: str) -> tuple[int, float]:
    """Return the bytes of an image's rows, and the seconds that a tower needs for them."""
    width, height = SIZES[size]
    patches = width // 32 * 2 * (height // 32 * 2)
    return patches // 4 * ROW_BYTES, patches * (0.90e9 + 124.4e3 * patches) / H200_FLOPS + 0.0015


ROWS = {size: embedding(size) for size in SIZES}
Trace = list[Access]


def chats(draw: random.Random, seconds: float, a_second: float) -> Trace:
    """Return chats about a few images: each turn sends all images of its history again, some 50 s later."""
    trace: Trace = []
    for chat, begin in arrivals(draw, seconds, a_second):
        at, images = begin, list[str]()
        for turn in range(min(30, 1 + int(draw.expovariate(1 / 4)))):
            if not turn or draw.random() < 0.3:
                sizes = ("512", "720", "1080", "1440")
                images += draw.choices(sizes, (2, 5, 2.5, 0.5), k=draw.choice((1, 1, 1, 2, 3)))
            trace += [Access(at, "c", (chat, number), size) for number, size in enumerate(images)]
            at += 5 + draw.expovariate(1 / 45)
    return trace


def albums(draw: random.Random, seconds: float, a_second: float) -> Trace:
    """Return albums of 8 to 32 images, asked about once or a few times."""
    trace: Trace = []
    for album, begin in arrivals(draw, seconds, a_second):
        at, count = begin, draw.choice((8, 12, 16, 24, 32))
        (size,) = draw.choices(("720", "1080", "1440"), (3, 5, 2))
        for _ in range(1 + int(draw.expovariate(1 / 0.8))):
            trace += [Access(at, "a", (album, number), size) for number in range(count)]
            at += 10 + draw.expovariate(1 / 60)
    return trace


def scans(draw: random.Random, seconds: float, a_second: float) -> Trace:
    """Return batches of scanned pages, each of which is read once."""
    return [
        Access(begin + page * 0.5, "s", (batch, page), draw.choice(("1080", "1440")))
        for batch, begin in arrivals(draw, seconds, a_second)
        for page in range(draw.choice((50, 100, 200)))
    ]


def catalogue(
    draw: random.Random, seconds: float, a_second: float, *, items: int = 6000, drift: int = 0
) -> Trace:
    """Return requests for pictures of a catalogue by Zipf's law (0.9); with `drift`, other pictures become popular."""
    weights = list(accumulate(1 / (rank + 1) ** 0.9 for rank in range(items)))
    pictures = list(range(items))
    draw.shuffle(pictures)
    sizes = draw.choices(("256", "512", "720"), (3, 4, 3), k=items)
    trace: Trace = []
    for _, at in arrivals(draw, seconds, a_second):
        rank = min(bisect_left(weights, draw.random() * weights[-1]), items - 1)
        picture = pictures[(rank + int(at / seconds * drift)) % items]
        trace.append(Access(at, "z", (picture, 0), sizes[picture]))
    return trace


def arrivals(draw: random.Random, seconds: float, a_second: float) -> Iterator[tuple[int, float]]:
    """Yield the numbers and times of a Poisson process."""
    number, at = 0, draw.expovariate(a_second)
    while at < seconds:
        yield number, at
        number, at = number + 1, at + draw.expovariate(a_second)


def trace_of(name: str, seed: int, seconds: float) -> Trace:
    """Return one of `TRACES`, in the order of time."""
    draw = random.Random(f"{name} {seed}")
    made = {
        "chats": lambda: chats(draw, seconds, 0.6),
        "albums": lambda: albums(draw, seconds, 0.12),
        "scans and chats": lambda: scans(draw, seconds, 0.012) + chats(draw, seconds, 0.3),
        "catalogue": lambda: catalogue(draw, seconds, 8),
        "drifting catalogue": lambda: catalogue(draw, seconds, 8, drift=600),
        "mix": lambda: (
            chats(draw, seconds, 0.25)
            + albums(draw, seconds, 0.03)
            + scans(draw, seconds, 0.006)
            + catalogue(draw, seconds, 3)
        ),
    }[name]()
    return sorted(made, key=lambda access: access.at_s)


class Cache(Protocol):
    """A cache of rows with a size in bytes."""

    def access(self, number: int, access: Access) -> bool:
        """Return whether the rows are held; if not, keep them and evict others. `number` counts the accesses."""


class Lru:
    """Evicts the least recently used rows of all holders."""

    def __init__(self, size: int, _trace: Trace) -> None:
        self._free = size
        self._held: OrderedDict[Any, int] = OrderedDict()

    def access(self, _number: int, access: Access) -> bool:
        """See `Cache`."""
        if access.key in self._held:
            self._held.move_to_end(access.key)
            return True
        size, _ = ROWS[access.size]
        while self._free < size:
            self._free += self._held.popitem(last=False)[1]
        self._held[access.key] = size
        self._free -= size
        return False


class EqualShares:
    """Evicts the least recently used rows of the holder with the most bytes."""

    def __init__(self, size: int, _trace: Trace) -> None:
        self._free = size
        self._held: dict[str, OrderedDict[Any, int]] = {}
        self._bytes: dict[str, int] = {}

    def access(self, _number: int, access: Access) -> bool:
        """See `Cache`."""
        ours = self._held.setdefault(access.holder, OrderedDict())
        if access.key in ours:
            ours.move_to_end(access.key)
            return True
        size, _ = ROWS[access.size]
        self._bytes[access.holder] = self._bytes.get(access.holder, 0) + size
        while self._free < size:
            most = max(filter(self._held.__getitem__, self._held), key=self._bytes.__getitem__)
            _, freed = self._held[most].popitem(last=False)
            self._bytes[most] -= freed
            self._free += freed
        ours[access.key] = size
        self._free -= size
        return False


class Ours:
    """The order of the store: `encoder_service.store.eviction`."""

    def __init__(self, size: int, _trace: Trace) -> None:
        self._free = size
        self._order: EvictionOrder[Item] = EvictionOrder(size)
        self._held: dict[Any, Item] = {}

    def access(self, _number: int, access: Access) -> bool:
        """See `Cache`."""
        order, held = self._order, self._held.get(access.key)
        if held is not None:
            order.remove(held)
            order.use(held, access.at_s)
            order.add(held)
            return True
        size, _ = ROWS[access.size]
        while self._free < size:
            victim = order.victim(access.at_s, access.holder, size, key=access.key)
            assert victim is not None
            order.remove(victim)
            order.dropped(victim)
            order.release(victim)
            del self._held[victim.key]
            self._free += victim.amounts[0]
        self._held[access.key] = rows = Item(access.key, size)
        self._free -= size
        order.admit(rows, access.holder)
        order.use(rows, access.at_s)
        order.add(rows)
        return False


class Offline:
    """Evicts the rows whose next use is furthest away, and keeps none that is never used again: knows the trace."""

    def __init__(self, size: int, trace: Trace) -> None:
        self._free = size
        self._next = [len(trace)] * len(trace)
        following: dict[Any, int] = {}
        for number in reversed(range(len(trace))):
            self._next[number] = following.get(trace[number].key, len(trace))
            following[trace[number].key] = number
        self._held: dict[Any, tuple[int, int]] = {}  # next use, size
        self._furthest: list[tuple[int, Any]] = []

    def access(self, number: int, access: Access) -> bool:
        """See `Cache`."""
        hit, following = access.key in self._held, self._next[number]
        if not hit and following == len(self._next):
            return False
        size, _ = ROWS[access.size]
        self._free -= 0 if hit else size
        self._held[access.key] = following, size
        heapq.heappush(self._furthest, (-following, access.key))
        while self._free < 0:
            use, key = heapq.heappop(self._furthest)
            if self._held.get(key, (0, 0))[0] == -use:
                self._free += self._held.pop(key)[1]
        return hit


ORDERS: dict[str, Callable[[int, Trace], Cache]] = {
    "LRU": Lru,
    "LRU in equal shares": EqualShares,
    "ours": Ours,
    "offline": Offline,
}


def saved_share(order: str, trace: Trace, size: int) -> float:
    """Return which share of the tower's seconds the cache saves after the warm-up."""
    cache = ORDERS[order](size, trace)
    saved = needed = 0.0
    for number, access in enumerate(trace):
        hit = cache.access(number, access)
        if number >= WARM_UP * len(trace):
            seconds = ROWS[access.size][1]
            needed += seconds
            saved += seconds * hit
    return saved / needed


Trial = tuple[str, int, int, float]
"""The name of a trace, its seed, the cache's GiB, and the trace's seconds."""


def run_trial(trial: Trial) -> dict[str, float]:
    """Return the share that each order saves."""
    name, seed, gib, seconds = trial
    trace = trace_of(name, seed, seconds)
    return {order: saved_share(order, trace, gib * GIB) for order in ORDERS}


def access_us(order: str, entries: int, accesses: int) -> float:
    """Return the mean processor time of an access in a full cache of four holders, in µs.

    Seven of ten accesses are for random images that were held at the start, the others for new ones.
    """
    draw = random.Random(1)
    held = [Access(number / 100, "casz"[number % 4], (number, 0), "256") for number in range(entries)]
    asked = list(held)
    for number in range(accesses):
        at_s, old = (entries + number) / 100, draw.choice(held)
        image = old.image if draw.random() < 0.7 else (entries + number, 0)
        asked.append(Access(at_s, old.holder, image, "256"))
    cache = ORDERS[order](entries * ROWS["256"][0], asked)
    for number in range(entries):
        cache.access(number, asked[number])
    began = time.thread_time()
    for number in range(entries, entries + accesses):
        cache.access(number, asked[number])
    return (time.thread_time() - began) / accesses * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60, help="length of each trace")
    parser.add_argument("--plot", action="store_true", help="also run the mix at other sizes of the cache")
    print_figures(figures_of(args := parser.parse_args(arguments)), args)
    return 0


def figures_of(args: argparse.Namespace) -> dict[str, Any]:
    """Run all trials; return figures and tables."""
    seeds, seconds = range(1, args.seeds + 1), 60 * args.minutes
    sizes = (4, 8, 16, 32, 64) if args.plot else (8,)
    names = [(name, 8) for name in TRACES] + [("mix", gib) for gib in sizes if gib != 8]
    trials = [(name, seed, gib, seconds) for name, gib in names for seed in seeds]
    with Pool() as pool:
        found = pool.map(run_trial, trials, chunksize=1)
    saved: dict[tuple[str, int], dict[str, float]] = {}
    for number, (name, gib) in enumerate(names):
        of_seeds = found[number * len(seeds) : (number + 1) * len(seeds)]
        saved[name, gib] = {order: sum(each[order] for each in of_seeds) / len(seeds) for order in ORDERS}
    ratios = {name: saved[name, 8]["ours"] / saved[name, 8]["LRU"] for name in TRACES}
    tables = [
        table(
            f"Tower time saved at 8 GiB ({args.seeds} seeds of {args.minutes:g} minutes)",
            ("trace", *(f"{order}, %" for order in ORDERS), "ours / LRU"),
            [(name, *(100 * saved[name, 8][order] for order in ORDERS), ratios[name]) for name in TRACES],
        ),
        table(
            "Four holders: tower time saved by the size of the store",
            ("GiB", *(f"{order}, %" for order in ORDERS), "ours / LRU"),
            [
                (
                    str(gib),
                    *(100 * saved["mix", gib][order] for order in ORDERS),
                    saved["mix", gib]["ours"] / saved["mix", gib]["LRU"],
                )
                for gib in sizes
            ],
        ),
    ]
    mix = saved["mix", 8]
    return {
        **ratios,
        "worst": min(ratios.values()),
        "mix_over_shares": mix["ours"] / mix["LRU in equal shares"],
        "mix_of_offline": mix["ours"] / mix["offline"],
        "access_us": access_us("ours", 100_000, 30_000),
        "lru_access_us": access_us("LRU", 100_000, 30_000),
        "tables": tables,
    }


if __name__ == "__main__":
    raise SystemExit(main())
