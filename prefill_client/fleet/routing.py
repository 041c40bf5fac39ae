"""Routing: which server an image goes to, so that repeated images hit its cache and a call's images are spread evenly.

It also says which server to try next.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, inf
from time import monotonic

from xxhash import xxh3_64_intdigest

from encoder_contract.errors import UnavailableError

# A server may have a quarter more than its even share of the images in progress. Nearly all images still go to their
# first choice, and a hot image cannot overload one server (Mirrokni et al., Consistent Hashing with Bounded Loads,
# arXiv 1608.01350).
LOAD_FACTOR = 1.25
# A server with fewer images in progress than this is never over its share.
IDLE_IMAGES = 16
# A restart takes about a second. A server that stays away costs one call every half minute.
FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 30.0


@dataclass(slots=True)
class _Endpoint:
    seed: int
    images: int = 0
    failures: int = 0  # consecutive failures in this outage
    relapses: int = 0  # consecutive failures of calls while the health check reported serving
    reported_serving: bool = True
    failed_at: float = float("-inf")
    down_until: float = float("-inf")


class Router:
    """Rendezvous hashing over the live endpoints, with a bound on the load of each.

    All processes that know the same endpoints, in any order, prefer the same one for an image. When an endpoint goes
    away, only its own images move, evenly to the others, and they move back when it returns. Does no I/O. Not
    thread-safe.
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
        self._endpoints = {name: before.get(name) or _Endpoint(_hash(name.encode(), 0)) for name in endpoints}

    def order(self, digest: bytes) -> list[str]:
        """Return all endpoints in the order in which to try them for the image with this content digest.

        Endpoints that are up and below the bound come first, then those that are up and above it, both by preference.
        Endpoints that are down come last, by the time at which they may be tried again.
        """
        return self._order(digest, self.bound())

    def place(
        self,
        digests: Sequence[bytes],
        sent_to: Callable[[bytes], str | None] = lambda _: None,
        *,
        bounded: bool = True,
    ) -> list[str]:
        """Choose an endpoint for each image of one call, and count the image as in progress there until `end`.

        An image goes to the endpoint that `sent_to` returns if that is up and below the bound, else to the first one of
        its `order` that has less than an even share of the call's images: a request waits for its last image. Equal
        digests go to the same endpoint. The bound counts all images of the call. With `bounded` false, neither load nor
        shares move images. Raises `UnavailableError` if no endpoint is known.
        """
        if not self._endpoints:
            raise UnavailableError("no encoder endpoint is known")
        bound = self.bound(len(digests)) if bounded else inf
        up = sum(map(self.is_up, self._endpoints))
        share = ceil(len(set(digests)) / max(1, up)) if bounded else inf
        placed: dict[bytes, str] = {}
        given: Counter[str] = Counter()
        for digest in digests:
            if digest not in placed:
                endpoint = sent_to(digest)
                if endpoint is None or not self.is_up(endpoint) or self._endpoints[endpoint].images >= bound:
                    order = self._order(digest, bound)
                    endpoint = next((name for name in order if given[name] < share), order[0])
                placed[digest] = endpoint
                given[endpoint] += 1
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

    def bound(self, more: int = 1) -> int:
        """Return how many images an endpoint may have in progress before others are preferred.

        `more` is the number of images about to be placed.
        """
        now = self._clock()
        up = [endpoint for endpoint in self._endpoints.values() if endpoint.down_until <= now]
        in_progress = sum(endpoint.images for endpoint in up)
        return max(self._idle_images, ceil(LOAD_FACTOR * (in_progress + more) / max(1, len(up))))

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
        known.failed_at, known.down_until = now, now + _backoff_s(known.failures)
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
            wait_s = _backoff_s(known.relapses - 2) if known.relapses > 1 else 0.0
            known.down_until = known.failed_at + wait_s

    def succeeded(self, endpoint: str) -> None:
        """Record that a call succeeded, and forget earlier failures."""
        if known := self._endpoints.get(endpoint):
            known.failures, known.relapses, known.reported_serving = 0, 0, True
            known.down_until = float("-inf")

    def _order(self, digest: bytes, bound: float) -> list[str]:
        now = self._clock()
        ranked = sorted(
            self._endpoints.items(), key=lambda item: (_hash(digest, item[1].seed), item[0]), reverse=True
        )
        up = [(name, endpoint) for name, endpoint in ranked if endpoint.down_until <= now]
        down = [(name, endpoint) for name, endpoint in ranked if endpoint.down_until > now]
        below = [name for name, endpoint in up if endpoint.images < bound]
        above = [name for name, endpoint in up if endpoint.images >= bound]
        return below + above + [name for name, _ in sorted(down, key=lambda item: item[1].down_until)]

    def is_up(self, endpoint: str) -> bool:
        """Return whether the endpoint is known and not down. It is up once its backoff has passed."""
        known = self._endpoints.get(endpoint)
        return known is not None and known.down_until <= self._clock()


def _backoff_s(failures: int) -> float:
    return min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 16))


def _hash(data: bytes, seed: int) -> int:
    # Content digests are already BLAKE3 hashes, so this hash only has to spread them, not resist attacks.
    return xxh3_64_intdigest(data, seed)
