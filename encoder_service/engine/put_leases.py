"""Leases on rows that callers compute themselves: who is at which image, so that cold names converge on one encode."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Grid
from encoder_service.address import ImageKey
from encoder_service.cluster.contract import Acquired, Cluster
from encoder_service.engine.submit_waiters import SubmitWaiters
from encoder_service.image.validation import Validator, confirm
from encoder_service.scheduler.shares import Shares
from encoder_service.store import Store

# Images followed at a time that another replica's caller computes: whoever waits for more of them hears at the end of
# its grace that nothing came, instead of at once.
MAX_FOLLOWED = 4096


@dataclass(frozen=True, slots=True)
class PutImage:
    """An image that a caller of Put names, and the grid its rows are of."""

    key: ImageKey
    grid: Grid


@dataclass(eq=False, slots=True)
class Lease:
    """What one caller may put, until `ends_at` on the clock of the loop; `open` until then, or until it is settled."""

    image: PutImage
    holders: Sequence[str]
    ends_at: float
    open: bool = True
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class PutAnswer:
    """The answer to a name: a lease if it is `yours`; how long the other's lasts at most if it is to `wait`."""

    holding: Literal["held", "yours", "wait"]
    lease: Lease | None = None
    wait_s: float = 0.0


class PutLeases:
    """One lease for each address, here and, through the cluster, at all replicas. One event loop's."""

    def __init__(
        self,
        validator: Validator,
        store: Store,
        cluster: Cluster,
        waiters: SubmitWaiters,
        *,
        lease_s: float,
        max_leases: int,
    ) -> None:
        self.lease_s = lease_s
        self._validator = validator
        self._store = store
        self._cluster = cluster
        self._waiters = waiters
        self._room = Shares(max_leases, "leases to put rows")
        self._leases: dict[bytes, Lease] = {}
        self._following: dict[bytes, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Leases held by callers of this replica."""
        return len(self._leases)

    async def ask(self, images: Sequence[PutImage], holders: Sequence[str]) -> list[PutAnswer | EncoderError]:
        """Answer names: held, to be computed by this caller, or being computed. Asks the cluster once, for all.

        A lease counts against `holders` until it is settled. Whoever is cancelled has got none.
        """
        answers: list[PutAnswer | EncoderError | None] = []
        taken: dict[int, Lease] = {}
        try:
            for place, image in enumerate(images):
                answers.append(self._known_here(image))
                if answers[place] is None:
                    try:
                        taken[place] = self._take(image, holders)
                    except EncoderError as error:
                        answers[place] = error
            acquired = await self._cluster.acquire([lease.image.key.address for lease in taken.values()])
        except BaseException:  # cancelled too: the caller never hears of its leases
            for lease in taken.values():
                self.give_up(lease)
            raise
        for place, lease in taken.items():
            answers[place] = self._asked(lease, acquired)
        return [answer for answer in answers if answer is not None]

    def kept(self, lease: Lease) -> None:
        """Say that the rows of a lease are in the store."""
        address = lease.image.key.address
        if lease.open:
            self.settle(lease)
        self._cluster.publish(address, lease.image.grid)
        self._waiters.wake(address)

    def give_up(self, lease: Lease) -> None:
        """End a lease whose rows do not come; who waits for them hears it now. Once it is not open, nothing happens."""
        if lease.open:
            self.settle(lease)
            self._cluster.release(lease.image.key.address)
            self._waiters.give_up(lease.image.key)

    def settle(self, lease: Lease) -> None:
        """Count a lease no more."""
        lease.open = False
        if lease.timer is not None:
            lease.timer.cancel()
        self._room.give_back(lease.holders)
        del self._leases[lease.image.key.address]

    def _known_here(self, image: PutImage) -> PutAnswer | EncoderError | None:
        try:
            self._validator.check_name(image.key, image.grid)
            if (pin := self._store.pin(image.key.address)) is not None:
                with pin:
                    confirm(Grid(*pin.grid), image.grid)
                return PutAnswer("held")
        except EncoderError as error:
            return error
        if (lease := self._leases.get(image.key.address)) is not None:
            left_s = lease.ends_at - asyncio.get_running_loop().time()
            return PutAnswer("wait", wait_s=max(left_s, 0.0))
        return None

    def _take(self, image: PutImage, holders: Sequence[str]) -> Lease:
        """Give this caller the lease, before the cluster is asked: nobody else here shall ask meanwhile.

        Raises `OverloadedError`.
        """
        self._room.take(holders)
        loop = asyncio.get_running_loop()
        lease = Lease(image, holders, loop.time() + self.lease_s)
        lease.timer = loop.call_later(self.lease_s, self.give_up, lease)
        self._leases[image.key.address] = lease
        return lease

    def _asked(self, lease: Lease, acquired: Acquired) -> PutAnswer:
        """Answer a name as the cluster did."""
        key = lease.image.key
        if not lease.open:  # its time passed while the cluster was asked
            if key.address not in self._leases:
                self._cluster.release(key.address)
            return PutAnswer("wait")
        if key.address in acquired.granted:
            if not self._store.contains(key.address):
                return PutAnswer("yours", lease)
            self.settle(lease)  # it was brought over while the cluster was asked
            self._cluster.release(key.address)
            self._waiters.wake(key.address)
            return PutAnswer("held")
        self.settle(lease)
        if located := acquired.located.get(key.address):
            self._waiters.wake(key.address, located)
            return PutAnswer("held")
        self._begin_to_follow(key)
        return PutAnswer("wait", wait_s=self.lease_s)

    def _begin_to_follow(self, key: ImageKey) -> None:
        """Another replica's caller has the lease: have those who wait here hear how that ends."""
        if key.address not in self._following and len(self._following) < MAX_FOLLOWED:
            task = asyncio.create_task(self._follow(key), name="put-follow")
            self._following[key.address] = task
            task.add_done_callback(lambda _: self._following.pop(key.address, None))

    async def _follow(self, key: ImageKey) -> None:
        located = await self._cluster.wait_published(key.address, self.lease_s)
        if located:
            self._waiters.wake(key.address, located)
        else:
            self._waiters.give_up(key)
