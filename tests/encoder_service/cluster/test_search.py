"""Search: paced lookups at other replicas for images that were not submitted here."""

import asyncio
from collections.abc import Callable, Collection, Iterable

from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import Location, Locations
from encoder_service.cluster.waiting import REREAD_S, SEARCH_IMAGES, PeerWaiters
from encoder_service.keys import ImageKey
from tests.small_store import address
from tests.waiting import soon


class FakeIndex:
    """A fake index: where images are, the lookups it got, and the images that were reported as found."""

    def __init__(self) -> None:
        self.held: dict[bytes, Locations] = {}
        self.lookups: list[list[bytes]] = []
        self.found: dict[bytes, Locations] = {}

    async def find(self, keys: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Answer one lookup."""
        addresses = [key.address for key in keys]
        self.lookups.append(addresses)
        return {address: self.held[address] for address in addresses if address in self.held}

    def found_at(self, address: bytes, locations: Locations) -> None:
        assert address not in self.found, "a found image is not searched again"
        self.found[address] = locations


def searching(index: FakeIndex, has_peers: Callable[[], bool]) -> PeerWaiters:
    """Return waiters that only search."""

    async def subscribe(begun: Iterable[bytes], ceased: Iterable[bytes]) -> None:
        assert not {*begun, *ceased}

    async def read(addresses: Collection[bytes]) -> dict[bytes, Locations]:
        raise AssertionError(f"{addresses} are not waited for")

    return PeerWaiters(read, subscribe, index.find, has_peers)


async def test_paced_lookups_cover_all_searched_images() -> None:
    index, count = FakeIndex(), 4 * SEARCH_IMAGES
    waiters = searching(index, lambda: True)
    for n in range(count):
        waiters.start_search(ImageKey(address(n), bytes(32)), index.found_at)
    await soon(lambda: len(index.lookups) >= 4)
    assert all(len(lookups) == SEARCH_IMAGES for lookups in index.lookups)
    assert len({address for lookups in index.lookups[:4] for address in lookups}) == count
    where = (Location("r", "r:1", Grid(1, 2, 2)),)
    index.held = {address(7): where, address(8): ()}
    await soon(lambda: len(index.found) == 2)
    assert index.found == index.held
    for n in range(count):
        waiters.stop_search(address(n))
    lookups = len(index.lookups)
    await asyncio.sleep(2.5 * REREAD_S)
    assert len(index.lookups) <= lookups + 1, "no lookups without searches"
    await waiters.close()


async def test_the_index_is_not_asked_without_peers() -> None:
    index, peers = FakeIndex(), list[str]()
    waiters = searching(index, lambda: bool(peers))
    waiters.start_search(ImageKey(address(1), bytes(32)), index.found_at)
    await asyncio.sleep(2.5 * REREAD_S)
    assert not index.lookups
    index.held[address(1)] = ()
    peers.append("a")
    await soon(lambda: index.found == {address(1): ()})
    await waiters.close()
