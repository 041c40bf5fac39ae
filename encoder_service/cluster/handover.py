"""Handover: before a replica leaves, its peers fetch the images that it alone holds, most recently requested first."""

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence

from encoder_contract.errors import EncoderError
from encoder_service.address import ImageKey
from encoder_service.cluster.index import RedisIndex
from encoder_service.cluster.peers import Peers

log = logging.getLogger(__name__)

AT_ONCE = 4  # transfers: enough to fill a gigabit, few enough to leave room for the calls that still run


async def hand_over(held: Sequence[ImageKey], index: RedisIndex, peers: Peers, within_s: float) -> None:
    """Have peers fetch those of the images `held` that no peer holds, for at most `within_s`.

    The images go to the peers in turn, beginning with the least loaded.
    """
    located = await index.locate([key.address for key in held])
    alone = iter([key for key in held if key.address not in located])
    taken: list[ImageKey] = []

    async def offer(endpoints: Iterator[str]) -> None:
        for key in alone:
            endpoint = next(endpoints)
            try:
                await peers.offer(endpoint, key)
                taken.append(key)
            except EncoderError as error:
                log.info("the peer %s did not take an image over: %s", endpoint, error)

    if ready := sorted(index.peers(), key=lambda peer: peer.load):
        endpoints = itertools.cycle([peer.endpoint for peer in ready])
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(offer(endpoints) for _ in range(AT_ONCE)))
        except TimeoutError:
            log.info("the handover ended after %g s", within_s)
    log.info("handed over %d images of %d that were asked for", len(taken), len(held))
