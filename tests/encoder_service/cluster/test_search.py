"""Search: paced lookups at other replicas for images that were not submitted here."""

import asyncio
from collections.abc import Callable, Collection, Iterable

from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import Location, Locations
from encoder_service.cluster.waiting import REREAD_S, SEARCH_IMAGES, PeerWaiters
from encoder_service.keys import ImageKey
from tests.waiting import soon


class Elsewhere:
    """A fake index: where images are, the lookups it got, and the images that were reported as found."""

    def __init__(self) -> None:
        self.held: dict[bytes, Locations] = {}
        self.asked: list[list[bytes]] = []
        self.found: dict[bytes, Locations] = {}

    async def find(self, keys: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Answer one lookup."""
        addresses = [key.address for key in keys]
        self.asked.append(addresses)
        return {address: self.held[address] for address in addresses if address in self.held}

    def found_at(self, address: bytes, locations: Locations) -> None:
        assert address not in self.found, "a found image is not searched again"
        self.found[address] = locations


def searching(elsewhere: Elsewhere, has_peers: Callable[[], bool]) -> PeerWaiters:
    """Return waiters that only search."""

    async def subscribe(begun: Iterable[bytes], ceased: Iterable[bytes]) -> None:
        assert not {*begun, *ceased}

    async def read(addresses: Collection[bytes]) -> dict[bytes, Locations]:
        raise AssertionError(f"{addresses} are not waited for")

    return PeerWaiters(read, subscribe, elsewhere.find, has_peers)


def address(number: int) -> bytes:
    return number.to_bytes(32, "big")


async def test_paced_lookups_cover_every_searched_image() -> None:
    elsewhere, count = Elsewhere(), 4 * SEARCH_IMAGES
    waiters = searching(elsewhere, lambda: True)
    for n in range(count):
        waiters.start_search(ImageKey(address(n), bytes(32)), elsewhere.found_at)
    await soon(lambda: len(elsewhere.asked) == 4)
    assert all(len(asked) == SEARCH_IMAGES for asked in elsewhere.asked)
    assert len({address for asked in elsewhere.asked for address in asked}) == count
    where = (Location("r", "r:1", Grid(1, 2, 2)),)
    elsewhere.held = {address(7): where, address(8): ()}
    await soon(lambda: len(elsewhere.found) == 2)
    assert elsewhere.found == elsewhere.held
    for n in range(count):
        waiters.stop_search(address(n))
    asked = len(elsewhere.asked)
    await asyncio.sleep(2.5 * REREAD_S)
    assert len(elsewhere.asked) <= asked + 1, "no lookups without searches"
    await waiters.close()


async def test_the_index_is_not_asked_without_peers() -> None:
    elsewhere, peers = Elsewhere(), list[str]()
    waiters = searching(elsewhere, lambda: bool(peers))
    waiters.start_search(ImageKey(address(1), bytes(32)), elsewhere.found_at)
    await asyncio.sleep(2.5 * REREAD_S)
    assert not elsewhere.asked
    elsewhere.held[address(1)] = ()
    peers.append("a")
    await soon(lambda: elsewhere.found == {address(1): ()})
    await waiters.close()
