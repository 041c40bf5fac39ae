"""Hand-over: before a replica leaves, its peers fetch what it alone holds, what was asked for last first."""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator

from encoder_contract.errors import EncoderError
from encoder_service.address import ImageKey
from encoder_service.cluster.index import Index

log = logging.getLogger(__name__)

REMEMBERED = 4096  # images; at 29 MB each more than a store holds, at some 500 bytes each two megabytes here
AT_ONCE = 4  # transfers: enough to fill a link, few enough to leave room for the calls that still run

# (endpoint of a peer, image): has the peer fetch it; raises an `EncoderError`.
Offer = Callable[[str, ImageKey], Awaitable[None]]


class RecentRequests:
    """The images asked for last, by address. One event loop's."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, ImageKey] = OrderedDict()

    def asked(self, key: ImageKey) -> None:
        """Note that someone wants the rows of an image."""
        self._keys[key.address] = key
        self._keys.move_to_end(key.address)
        if len(self._keys) > REMEMBERED:
            self._keys.popitem(last=False)

    def hottest(self) -> list[ImageKey]:
        """Return the images, the last one asked for first."""
        return list(reversed(self._keys.values()))


async def hand_over(
    hot: RecentRequests, holds: Callable[[bytes], bool], index: Index, offer: Offer, within_s: float
) -> int:
    """Have peers fetch what this replica `holds` alone, for at most `within_s`; return how many images they took."""
    if within_s == 0:
        return 0
    peers = sorted(index.peers(), key=lambda peer: peer.load)
    held = [key for key in hot.hottest() if holds(key.address)]
    located = await index.locate([key.address for key in held])
    alone = iter([key for key in held if key.address not in located])
    taken: list[ImageKey] = []

    async def carry(endpoints: Iterator[str]) -> None:
        for key in alone:
            endpoint = next(endpoints)
            try:
                await offer(endpoint, key)
                taken.append(key)
            except EncoderError as error:
                log.info("the peer %s did not take an image over: %s", endpoint, error)

    if peers:
        endpoints = itertools.cycle([peer.endpoint for peer in peers])
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(carry(endpoints) for _ in range(AT_ONCE)))
        except TimeoutError:
            log.info("the hand-over ended after %g s", within_s)
    log.info("handed over %d images of %d that were asked for", len(taken), len(held))
    return len(taken)
