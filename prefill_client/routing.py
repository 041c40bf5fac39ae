"""Routing: which server an image goes to, so that it meets its cache, and which one next when that fails."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from time import monotonic

from xxhash import xxh3_64_intdigest

from encoder_contract.errors import UnavailableError

# A server may have a quarter more than its even share of what is under way: at 1.25 an image still meets its first
# choice nearly always, and one hot image cannot pile up on one server (Mirrokni et al., Consistent Hashing with Bounded
# Loads, arXiv 1608.01350).
LOAD_FACTOR = 1.25
# With little under way an even share means nothing: below this many images a server is not hot.
IDLE_IMAGES = 16
# A restart takes a second or so; a server that stays away is tried every half minute at the price of one call.
FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 30.0


@dataclass(slots=True)
class _Endpoint:
    seed: int
    images: int = 0
    failures: int = 0
    down_until: float = float("-inf")


class Router:
    """Rendezvous hashing over the live endpoints, with a bound on how much more than others one may have.

    Every process that knows the same endpoints prefers the same one for the same image, whatever their order; when
    one of them goes, only its own images move, evenly, and they move back when it returns. No I/O, one thread.
    """

    def __init__(
        self,
        endpoints: Iterable[str],
        *,
        load_factor: float = LOAD_FACTOR,
        idle_images: int = IDLE_IMAGES,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._load_factor = load_factor
        self._idle_images = idle_images
        self._clock = clock
        self._endpoints: dict[str, _Endpoint] = {}
        self.set_endpoints(endpoints)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Every endpoint known, up or down."""
        return tuple(self._endpoints)

    def set_endpoints(self, endpoints: Iterable[str]) -> None:
        """Replace the endpoints (a new answer of DNS); those that stay keep their load and their state."""
        before = self._endpoints
        self._endpoints = {name: before.get(name) or _Endpoint(_hash(name.encode(), 0)) for name in endpoints}

    def order(self, digest: bytes) -> list[str]:
        """Return all endpoints in the order in which to try them for the image with this content digest.

        First those that are up and below the bound, then those up and above it, each by preference; last those that
        are down, the soonest to be tried again first: a caller with no other choice may as well try.
        """
        now, bound = self._clock(), self.bound()
        ranked = sorted(
            self._endpoints.items(), key=lambda item: (_hash(digest, item[1].seed), item[0]), reverse=True
        )
        up = [(name, endpoint) for name, endpoint in ranked if endpoint.down_until <= now]
        down = [(name, endpoint) for name, endpoint in ranked if endpoint.down_until > now]
        below = [name for name, endpoint in up if endpoint.images < bound]
        above = [name for name, endpoint in up if endpoint.images >= bound]
        return below + above + [name for name, _ in sorted(down, key=lambda item: item[1].down_until)]

    def choose(self, digest: bytes) -> str:
        """Return the endpoint to try first, and count the image as under way there until `end`.

        Raises `UnavailableError` when no endpoint is known.
        """
        order = self.order(digest)
        if not order:
            raise UnavailableError("no encoder endpoint is known")
        self.begin(order[0])
        return order[0]

    def bound(self) -> int:
        """Return how many images one endpoint may have under way before others are preferred."""
        now = self._clock()
        up = [endpoint for endpoint in self._endpoints.values() if endpoint.down_until <= now]
        under_way = sum(endpoint.images for endpoint in up)
        return max(self._idle_images, ceil(self._load_factor * (under_way + 1) / max(1, len(up))))

    def begin(self, endpoint: str, images: int = 1) -> None:
        """Count images as under way at an endpoint."""
        if known := self._endpoints.get(endpoint):
            known.images += images

    def end(self, endpoint: str, images: int = 1) -> None:
        """Undo `begin`; an endpoint that is gone meanwhile is no error."""
        if known := self._endpoints.get(endpoint):
            known.images = max(0, known.images - images)

    def mark_down(self, endpoint: str) -> None:
        """Prefer others for a while: longer with every failure in a row; failures of the same outage count once."""
        known, now = self._endpoints.get(endpoint), self._clock()
        if known is None or known.down_until > now:
            return
        known.down_until = now + min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2**known.failures)
        known.failures = min(known.failures + 1, 16)

    def mark_up(self, endpoint: str) -> None:
        """A call got through, or the health check says that it serves."""
        if known := self._endpoints.get(endpoint):
            known.failures = 0
            known.down_until = float("-inf")

    def has_room(self, endpoint: str) -> bool:
        """Return whether the endpoint is below the bound."""
        known = self._endpoints.get(endpoint)
        return known is not None and known.images < self.bound()

    def is_up(self, endpoint: str) -> bool:
        """Return whether the endpoint is tried in its own place; one whose backoff is over is."""
        known = self._endpoints.get(endpoint)
        return known is not None and known.down_until <= self._clock()


def _hash(data: bytes, seed: int) -> int:
    # Content digests are BLAKE3 already: nothing is to be defended here, only spread.
    return xxh3_64_intdigest(data, seed)
