"""Routing: which server an image goes to, so that repeated images hit its cache and a call's images are spread evenly.

Servers of different speeds get images by the rates that they measure. It also says which server to try next.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from time import monotonic
from typing import cast

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from encoder_contract.backoff import backoff_s
from encoder_contract.errors import UnavailableError

# A server may have a quarter more than its even share of the images in progress. Nearly all images still go to their
# first choice, and a hot image cannot overload one server (Mirrokni et al., Consistent Hashing with Bounded Loads,
# arXiv 1608.01350).
LOAD_FACTOR = 1.25
# A server with fewer images in progress than this is never over its share.
IDLE_IMAGES = 16
# A new rate counts if it differs from the last one that counted by this factor, so that noise moves no images.
RATE_STEP = 1.25
# If the fastest server is less than this factor faster than the slowest, all count as equal: clients then agree.
EQUAL_RATES = 1.5
# No server is faster than this, patches/s. It would get all images.
MAX_RATE = 1e9
ROUNDING = 1e-9  # of shares
# How many of an image's best endpoints are sorted. In most calls one of them gets the image.
BEST = 8
# A restart takes about a second. A server that stays away costs one call every half minute.
FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 30.0


log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Endpoint:
    rate: float = 0.0  # patches/s, as the server measured; 0: unknown
    weight: float = 1.0  # its rate, relative to the fastest endpoint
    images: int = 0
    failures: int = 0  # consecutive failures in this outage
    relapses: int = 0  # consecutive failures of calls while the health check reported serving
    reported_serving: bool = True
    failed_at: float = float("-inf")
    down_until: float = float("-inf")


class Router:
    """Weighted rendezvous hashing over the live endpoints, with a bound on the load of each.

    The weights are the rates that the servers measure (`set_rate`). All processes that know the same endpoints and
    rates, in any order, prefer the same one for an image. When an endpoint goes away, only its own images move, evenly
    to the others, and they move back when it returns. Does no I/O. Not thread-safe.
    """

    def __init__(
        self,
        endpoints: Iterable[str],
        *,
        idle_images: int = IDLE_IMAGES,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._idle_images = idle_images
        self._clock = clock
        self._endpoints: dict[str, _Endpoint] = {}
        self._names: tuple[str, ...] = ()
        self._seeds: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._weights: NDArray[np.float64] = np.empty(0)
        self._distinct_weights: set[float] = set()
        self.ignored_rates = 0
        """How many rates were ignored because no server has such a rate."""
        self.set_endpoints(endpoints)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All known endpoints, up or down."""
        return tuple(self._endpoints)

    @property
    def any_serves(self) -> bool:
        """Whether at least one endpoint may be up, according to health checks and earlier calls."""
        return any(known.reported_serving for known in self._endpoints.values())

    def set_endpoints(self, endpoints: Iterable[str]) -> None:
        """Replace the endpoints after a new DNS answer. Endpoints that remain keep their load and state."""
        before = self._endpoints
        self._names = tuple(sorted(set(endpoints)))
        self._endpoints = {name: before.get(name) or _Endpoint() for name in self._names}
        self._seeds = _hashes(name.encode() for name in self._names)
        self._weigh()

    def set_rate(self, endpoint: str, patches_per_s: float) -> None:
        """Record the rate that a server measured; 0 is unknown, and counts as the lowest known one.

        Ignores a rate that is negative, not a number or beyond reason.
        """
        if (known := self._endpoints.get(endpoint)) is None:
            return
        if not 0 <= patches_per_s <= MAX_RATE:
            self.ignored_rates += 1
            if self.ignored_rates == 1:
                log.warning(
                    "%s: ignored its rate, %g patches/s; later ones are counted", endpoint, patches_per_s
                )
        elif not known.rate / RATE_STEP < patches_per_s < known.rate * RATE_STEP:
            known.rate = patches_per_s
            self._weigh()

    def order(self, digest: bytes) -> list[str]:
        """Return all endpoints in the order in which to try them for the image with this content digest.

        Endpoints that are up and below the bound come first, then those that are up and above it, both by preference.
        Endpoints that are down come last, by the time at which they may be tried again.
        """
        [scores] = self._scores([digest])
        return self._order(scores, self._bounds(1))

    def place(
        self,
        digests: Sequence[bytes],
        sent_to: Callable[[bytes], str | None] = lambda _: None,
        *,
        bounded: bool = True,
    ) -> list[str]:
        """Choose an endpoint for each image of one call, and count the image as in progress there until `end`.

        An image goes to the endpoint that `sent_to` returns if that is up and below the bound, else to the first one of
        its `order` that has less than its share of the call's images, by its rate: a request waits for its last image.
        Much slower endpoints get only what they end before the others. Equal digests go to the same endpoint. The
        bound counts all images of the call. With `bounded` false, neither load nor shares move images. Raises
        `UnavailableError` if no endpoint is known.
        """
        if not self._endpoints:
            raise UnavailableError("no encoder endpoint is known")
        distinct = list(dict.fromkeys(digests))
        bounds = self._bounds(len(digests)) if bounded else None
        shares = self._shares(len(distinct))
        best: dict[bytes, list[int]] = {}
        placed: dict[bytes, str] = {}
        for digest in digests:
            if digest not in placed:
                endpoint = sent_to(digest)
                if endpoint is None or not self.is_up(endpoint) or self._is_above(endpoint, bounds):
                    best = best or dict(zip(distinct, _best(self._scores(distinct)), strict=True))
                    endpoint = self._choose(digest, best[digest], bounds, shares)
                placed[digest] = endpoint
                shares.given[endpoint] += 1
            self.begin(placed[digest])
        return [placed[digest] for digest in digests]

    @contextmanager
    def placed(
        self,
        digests: Sequence[bytes],
        sent_to: Callable[[bytes], str | None] = lambda _: None,
        *,
        bounded: bool = True,
    ) -> Iterator[dict[str, list[int]]]:
        """Place images as `place` does, and count them as in progress until the block ends.

        Yields the positions in `digests` of the images that go to each endpoint, by endpoint.
        """
        placed = self.place(digests, sent_to, bounded=bounded)
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for position, endpoint in enumerate(placed):
            groups[endpoint].append(position)
        try:
            yield groups
        finally:
            for endpoint in placed:
                self.end(endpoint)

    def bound(self, more: int = 1, weight: float = 1.0) -> int:
        """Return how many images an endpoint may have in progress before others are preferred.

        `more` is the number of images about to be placed, `weight` the endpoint's rate, relative to the fastest one.
        """
        now = self._clock()
        up = [endpoint for endpoint in self._endpoints.values() if endpoint.down_until <= now]
        in_progress = sum(endpoint.images for endpoint in up)
        weights = sum(endpoint.weight for endpoint in up) or 1.0
        share = LOAD_FACTOR * (in_progress + more) * weight / weights
        return max(ceil(self._idle_images * weight), ceil(share))

    def begin(self, endpoint: str, images: int = 1) -> None:
        """Count images as in progress at an endpoint."""
        if known := self._endpoints.get(endpoint):
            known.images += images

    def end(self, endpoint: str, images: int = 1) -> None:
        """Undo `begin`. Ignores an unknown endpoint, which may have left the fleet."""
        if known := self._endpoints.get(endpoint):
            known.images = max(0, known.images - images)

    def mark_down(self, endpoint: str) -> None:
        """Prefer other endpoints for a while, longer after each consecutive failure. Has no effect while it is down."""
        known, now = self._endpoints.get(endpoint), self._clock()
        if known is None or known.down_until > now:
            return
        known.failed_at, known.down_until = (
            now,
            now + backoff_s(known.failures, FIRST_BACKOFF_S, LAST_BACKOFF_S),
        )
        known.failures += 1
        known.reported_serving = False

    def failed(self, endpoint: str) -> None:
        """Record that a call found the server unavailable."""
        if (known := self._endpoints.get(endpoint)) and known.reported_serving:
            known.relapses += 1
        self.mark_down(endpoint)

    def mark_up(self, endpoint: str) -> None:
        """Record that the health check reports serving, and use the server at once.

        If calls failed at least twice although the health check reported serving, keep backing off.
        """
        if known := self._endpoints.get(endpoint):
            known.failures, known.reported_serving = 0, True
            wait_s = (
                backoff_s(known.relapses - 2, FIRST_BACKOFF_S, LAST_BACKOFF_S) if known.relapses > 1 else 0.0
            )
            known.down_until = known.failed_at + wait_s

    def succeeded(self, endpoint: str) -> None:
        """Record that a call succeeded, and forget earlier failures."""
        if known := self._endpoints.get(endpoint):
            known.failures, known.relapses, known.reported_serving = 0, 0, True
            known.down_until = float("-inf")

    def _weigh(self) -> None:
        """Set the weights of all endpoints from their rates."""
        known = [endpoint.rate for endpoint in self._endpoints.values() if endpoint.rate]
        least, most = min(known, default=1.0), max(known, default=1.0)
        for endpoint in self._endpoints.values():
            endpoint.weight = (endpoint.rate or least) / most if most >= EQUAL_RATES * least else 1.0
        self._weights = np.array([endpoint.weight for endpoint in self._endpoints.values()])
        self._distinct_weights = set(self._weights.tolist())

    def _bounds(self, more: int) -> dict[float, int]:
        """Return the bound of endpoints by their weight."""
        return {weight: self.bound(more, weight) for weight in self._distinct_weights}

    def _is_above(self, endpoint: str, bounds: Mapping[float, int] | None) -> bool:
        known = self._endpoints[endpoint]
        return bounds is not None and known.images >= bounds[known.weight]

    def _shares(self, images: int) -> "_Shares":
        """Return the shares of a call of so many distinct images."""
        now = self._clock()
        up = {name: each for name, each in self._endpoints.items() if each.down_until <= now}
        up = up or self._endpoints
        mean = sum(known.weight for known in up.values()) / len(up)
        per_weight = images / (mean * len(up))
        sizes = {
            weight: ceil(per_weight * weight - ROUNDING)
            for weight in self._distinct_weights
            if 2 * weight >= mean
        }
        fast = {name: known for name, known in up.items() if known.weight in sizes}
        end_s = min((known.images + sizes[known.weight]) / known.weight for known in fast.values())
        return _Shares(sizes, fast, end_s)

    def _choose(
        self, digest: bytes, best: Sequence[int], bounds: Mapping[float, int] | None, shares: "_Shares"
    ) -> str:
        """Return where an image goes. `best` are the numbers of its preferred endpoints, the best one first."""
        for at in best:
            name = self._names[at]
            has_room = bounds is None or shares.has_room(name, self._endpoints[name])
            if has_room and self.is_up(name) and not self._is_above(name, bounds):
                return name
        [scores] = self._scores([digest])
        order = self._order(scores, bounds)
        if bounds is None:
            return order[0]
        for name in order:
            known = self._endpoints[name]
            if (name in shares.fast or self.is_up(name)) and shares.has_room(name, known):
                return name
        return min(shares.fast, key=lambda name: _seconds_to_end(shares.fast[name]))

    def _order(self, scores: NDArray[np.float64], bounds: Mapping[float, int] | None) -> list[str]:
        now = self._clock()
        ranked = [self._names[at] for at in np.argsort(-scores, kind="stable").tolist()]
        up = [name for name in ranked if self._endpoints[name].down_until <= now]
        down = [name for name in ranked if self._endpoints[name].down_until > now]
        below = [name for name in up if not self._is_above(name, bounds)]
        above = [name for name in up if self._is_above(name, bounds)]
        return below + above + sorted(down, key=lambda name: self._endpoints[name].down_until)

    def _scores(self, digests: Sequence[bytes]) -> NDArray[np.float64]:
        """Return the scores of weighted rendezvous hashing [digests, endpoints].

        Each endpoint has the highest score for its share of the images.
        """
        mixed = _mixed(_hashes(digests)[:, None] ^ self._seeds)
        return -self._weights / np.log(((mixed >> np.uint64(11)) + 0.5) / (1 << 53))

    def is_up(self, endpoint: str) -> bool:
        """Return whether the endpoint is known and not down. It is up once its backoff has passed."""
        known = self._endpoints.get(endpoint)
        return known is not None and known.down_until <= self._clock()


@dataclass(slots=True)
class _Shares:
    """How many of a call's images each endpoint should get, by its rate: a request waits for its last image."""

    sizes: Mapping[float, int]  # by weight
    fast: Mapping[str, _Endpoint]
    """Those that are up. All others are much slower, and get what they end before `end_s`, when these end."""
    end_s: float  # in image times of the fastest endpoint
    given: Counter[str] = field(default_factory=Counter)

    def has_room(self, name: str, known: _Endpoint) -> bool:
        """Return whether an endpoint has less than its share."""
        if name in self.fast:
            return self.given[name] < self.sizes[known.weight]
        return _seconds_to_end(known) < self.end_s


def _seconds_to_end(known: _Endpoint) -> float:
    """Return when an endpoint would end another image, in image times of the fastest endpoint."""
    return (known.images + 1) / known.weight


def _best(scores: NDArray[np.float64]) -> list[list[int]]:
    """Return the numbers of the `BEST` endpoints of each image by score, the best one first."""
    losses = -scores
    if losses.shape[1] > BEST:
        few = np.argpartition(losses, BEST, axis=1)[:, :BEST]
        order = np.argsort(np.take_along_axis(losses, few, axis=1), axis=1)
        few = np.take_along_axis(few, order, axis=1)
    else:
        few = np.argsort(losses, axis=1)
    return cast("list[list[int]]", few.tolist())


def _hashes(data: Iterable[bytes]) -> NDArray[np.uint64]:
    return np.fromiter(map(xxh3_64_intdigest, data), np.uint64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well mixed hashes of hashes: the last steps of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
