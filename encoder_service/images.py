"""What happens to an image on the event loop: it is looked up, received and queued, and its rows are found.

A Submit names images. `Images.lookup` answers from what this replica knows, or else by the cluster. If this replica is
to encode an image, the call asks for the bytes; `receive` checks them and queues the image. The engine goes on from
there: decode, ViT, store. A Fetch gets `rows`: held here, encoded here, or fetched from a peer. `Waiters` has the
Fetches whose image nobody has submitted or put yet. A Put asks `PutLeases` which images its caller is to compute.

Nothing here touches a pixel.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from encoder_contract.errors import DigestMismatchError, EncoderError, OverloadedError, UnknownImageError
from encoder_contract.geometry import Grid
from encoder_contract.video import VideoInfo
from encoder_service.cluster.cluster import Acquired, Cluster, Locations
from encoder_service.engine.job_queue import JobQueue
from encoder_service.image.source import Source, VideoFile
from encoder_service.image.sources import SourceCache, Validator, confirmed_grid
from encoder_service.keys import ImageKey
from encoder_service.limits import Budget, Caller, Hold
from encoder_service.scheduler import Claim
from encoder_service.store import Pin, Store


class Retainer:
    """A caller that has the files of images for as long as its call is open."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        """Set when one of the two below has changed."""
        self.requested: dict[bytes, None] = {}
        """Addresses of images that a Fetch waits for, in the order of the Fetches."""
        self.error: EncoderError | None = None
        """Why they are to be submitted elsewhere."""


class Waiters:
    """Those who wait for images that are not submitted yet, and those who keep images. One event loop's."""

    def __init__(self, cluster: Cluster, awaited_images: Budget) -> None:
        self._cluster = cluster
        self._budget = awaited_images
        self._waiters: dict[bytes, set[asyncio.Future[Locations]]] = {}
        self._retainers: dict[bytes, dict[Retainer, None]] = {}
        self._error: EncoderError | None = None
        self._retaining_error: EncoderError | None = None

    async def wait(self, key: ImageKey, caller: Caller, until: float) -> Locations:
        """Return when the image is submitted here (then nothing) or elsewhere (then where, if it is held there).

        A caller that keeps the image is asked for it. Raises `UnknownImageError` at `until`, on the clock of the loop,
        or when `give_up` says so, `OverloadedError` when too many wait, and what `end` was told.
        """
        if self._error is not None:
            raise self._error
        unknown = UnknownImageError(key.unknown)
        if asyncio.get_running_loop().time() >= until:
            raise unknown
        with self._budget.hold(caller):
            waiter: asyncio.Future[Locations] = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(key.address, set()).add(waiter)
            self._cluster.search(key, self.wake)
            self._ask(key.address)
            try:
                async with asyncio.timeout_at(until):
                    return await waiter
            except TimeoutError:
                raise unknown from None
            finally:
                self._leave(key.address, waiter)

    def retain(self, address: bytes, retainer: Retainer) -> None:
        """Note that `retainer` has the file of an image."""
        self._retainers.setdefault(address, {})[retainer] = None
        retainer.error = self._retaining_error

    def release(self, address: bytes, retainer: Retainer) -> None:
        """Undo `retain`. If someone waits for the image, another retainer is asked."""
        if retainers := self._retainers.get(address):
            retainers.pop(retainer, None)
            if not retainers:
                del self._retainers[address]
            elif address in self._waiters:
                self._ask(address)

    def end(self, error: EncoderError) -> None:
        """End all waiters and retainers with `error`, and those that come later: nothing is submitted here any more."""
        self._error = error
        self.end_retaining(error)
        for waiter in [waiter for waiters in self._waiters.values() for waiter in waiters]:
            if not waiter.done():
                waiter.set_exception(error)

    def end_retaining(self, error: EncoderError) -> None:
        """Say to all who keep images, now or later, with `error`, that they are to submit them elsewhere."""
        self._retaining_error = error
        for retainer in {retainer for retainers in self._retainers.values() for retainer in retainers}:
            retainer.error = error
            retainer.changed.set()

    def wake(self, address: bytes, locations: Locations = ()) -> None:
        """Say that `address` is here, or at these locations."""
        self._cluster.end_search(address)
        for waiter in self._waiters.pop(address, ()):
            if not waiter.done():
                waiter.set_result(locations)

    def give_up(self, key: ImageKey) -> None:
        """Fail all waiters for this image: its producer gave up."""
        self._cluster.end_search(key.address)
        for waiter in self._waiters.pop(key.address, ()):
            if not waiter.done():
                waiter.set_exception(UnknownImageError(key.unknown))

    def _ask(self, address: bytes) -> None:
        if retainers := self._retainers.get(address):
            retainer = next(reversed(retainers))
            retainer.requested[address] = None
            retainer.changed.set()

    def _leave(self, address: bytes, waiter: "asyncio.Future[Locations]") -> None:
        waiting = self._waiters.get(address)
        if waiting is not None:
            waiting.discard(waiter)
            if not waiting:
                del self._waiters[address]
                self._cluster.end_search(address)


# If requested bytes have not arrived after this time, the lease is released, so that a caller that stalls delays no
# other replica. If they arrive later, the lease is acquired again.
UPLOAD_WAIT_S = 5.0
DROPPED_RETRY_MS = 1000
LEASE_WAIT_S = 1.0  # to wait for another replica before looking again: its lease ends by itself if it dies


@dataclass(frozen=True, slots=True)
class SubmittedImage:
    """An image of a Submit call: the caller's index, grid and size (0: not said) of it, and the call's claim on it.

    If `is_video`, it is a video that the caller wants to know the frames of, and nothing is to be encoded.
    """

    index: int
    key: ImageKey
    claimed_grid: Grid | None
    size_bytes: int
    claim: Claim
    is_video: bool = False

    @property
    def file_is_video(self) -> bool:
        """Whether its file is a video."""
        return self.is_video or self.key.frames is not None


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What is known about a named image; without a `grid` and without a `video`, its bytes are needed."""

    grid: Grid | None
    cached: bool = False
    video: VideoInfo | None = None


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Pinned rows, and where they were found; if they were waited for, how long each stage took and when it began."""

    pin: Pin
    source: Literal["device", "host", "peer", "encoded"]
    stage_ms: Mapping[str, float] = field(default_factory=dict)
    stage_began_s: Mapping[str, float] = field(default_factory=dict)


class Images:
    """Looks images up, receives their bytes, and finds or makes their rows. Belongs to one event loop."""

    def __init__(
        self,
        validator: Validator,
        sources: SourceCache,
        videos: SourceCache,
        jobs: JobQueue,
        store: Store,
        cluster: Cluster,
        awaited_images: Budget,
        *,
        encodes: bool = True,
    ) -> None:
        """Without a tower, `encodes` is False: rows are held, come from peers, or are put."""
        self._validator = validator
        self._sources = sources
        self._videos = videos
        self._jobs = jobs
        self._store = store
        self._cluster = cluster
        self._encodes = encodes
        self.waiters = Waiters(cluster, awaited_images)

    # What a Submit needs

    async def lookup(self, images: Sequence[SubmittedImage]) -> list[LookupResult | EncoderError]:
        """Answer each submitted name: cached, queued, an error, or (grid None) bytes needed.

        Asks the cluster about everything that is not known here in one step.
        """
        answers = [self._known_here(image) for image in images]
        unknown = [
            image
            for image, answer in zip(images, answers, strict=True)
            if answer is None and not image.is_video
        ]
        acquired = await self._cluster.acquire([image.key.address for image in unknown])
        return [
            answer or (LookupResult(None) if image.is_video else self._known_there(image, acquired))
            for image, answer in zip(images, answers, strict=True)
        ]

    async def receive_video(self, image: SubmittedImage, file: VideoFile) -> LookupResult:
        """Check the file of a video against its name and the limits, keep it, and queue its frames if they are named.

        Raises as `receive` does.
        """
        source = await self._validator.validate_video(image.key, file, image.claim.holder)
        self._videos.put(source, image.claim.holder)
        if image.is_video:
            return LookupResult(None, video=source.video)
        [known] = await self.lookup([image])
        if isinstance(known, EncoderError):
            raise known
        if known.grid is None:
            raise OverloadedError(
                "other videos took the place of this one: retry", retry_after_ms=DROPPED_RETRY_MS
            )
        return known

    async def receive(self, image: SubmittedImage, data: bytes) -> LookupResult:
        """Check the bytes of an image against its name and the limits, and queue it.

        Raises `DigestMismatchError`, `InvalidImageError`, `ImageLimitError` or `OverloadedError`.
        """
        key = image.key
        source = await self._validator.validate(key, data, image.claim.holder)
        grid = self._validator.grid(key, source, image.claimed_grid)
        if not self._jobs.knows(key):
            # This replica usually has the lease already, unless another caller gave it up or the bytes took too long.
            acquired = await self._cluster.acquire([key.address])
            if key.address not in acquired.granted:  # a peer holds it or encodes it
                self._sources.put(source, image.claim.holder)
                self.waiters.wake(key.address)
                self._cluster.share_source(key, data)
                return LookupResult(grid, cached=key.address in acquired.located)
        queued = self._queue(key, source, grid, image.claim)
        self._sources.put(source, image.claim.holder)  # not before: a refused file pushes out no other
        self._cluster.share_source(key, data)
        return LookupResult(grid, cached=not queued)

    def withdraw(self, claim: Claim) -> None:
        """Give up a claim; an image without claims is dropped unless its batch has started."""
        self._jobs.withdraw(claim)

    def forget(self, key: ImageKey) -> None:
        """Release the lease of an image that is not queued: its requested bytes will not come, or were refused."""
        if key not in self._jobs:
            self._cluster.release(key.address)

    # What a Fetch needs

    async def locate(self, images: Sequence[ImageKey]) -> dict[bytes, Locations]:
        """Return where peers hold those of the images that are not known here; as `Cluster.find`."""
        unknown = [key for key in images if not self._jobs.knows(key)]
        return await self._cluster.find(unknown) if unknown else {}

    async def rows_here(self, key: ImageKey, claim: Claim) -> FetchResult | None:
        """Return the rows of an image if they are held or being encoded here, else None."""
        self._cluster.asked(key)
        if (pin := self._store.pin(key.address)) is not None:
            return FetchResult(pin, pin.tier)
        if (job := self._jobs.join(key, claim)) is None:
            return None
        pin = await self._jobs.wait(job, claim)
        return FetchResult(pin, "encoded", job.stage_ms, job.stage_began_s)

    async def rows(
        self,
        key: ImageKey,
        claim: Claim,
        caller: Caller,
        grace_s: float,
        located: Mapping[bytes, Locations],
    ) -> FetchResult:
        """Return the rows of an image, pinned: held here, encoded here, or fetched from a peer.

        `located` is a fresh answer of `locate`. Waits for an encoding that is under way or can be started. For an image
        that is not submitted yet, waits at most `grace_s`, then raises `UnknownImageError`. Cancelling withdraws the
        claim.
        """
        deadline = asyncio.get_running_loop().time() + grace_s
        elsewhere = located.get(key.address)
        failed: set[str] = set()
        while True:
            if (found := await self.rows_here(key, claim)) is not None:
                return found
            live = tuple(location for location in elsewhere or () if location.replica_id not in failed)
            if live and self._begun_as_cheaper(key, claim):
                continue
            if live:
                peer = await self._cluster.fetch_from_peer(key, live, claim.holder)
                if peer is not None and (pin := self._store.pin(key.address)) is not None:
                    return FetchResult(pin, "peer")
                failed.update(location.replica_id for location in live)
                elsewhere = (await self._cluster.find([key])).get(key.address)
            elif (
                source := await self._source_of(key, claim, is_elsewhere=elsewhere is not None)
            ) is not None:
                elsewhere = await self._begin(key, source, claim, failed)
            elif self._jobs.knows(key):
                elsewhere = ()  # it came while the cluster was asked
            else:
                elsewhere = await self.waiters.wait(key, caller, deadline)

    def known_error(self, error: Exception) -> EncoderError:
        """Return the error to report to callers that wait for rows; a lost device ends everything."""
        return self._jobs.known_error(error)

    def knows(self, key: ImageKey) -> bool:
        """Whether an image is on its way here, or its rows are held."""
        return self._jobs.knows(key)

    # What a Put needs

    def holds(self, key: ImageKey) -> bool:
        """Whether the rows of an image are held here."""
        return self._store.contains(key.address)

    def held_grid(self, key: ImageKey, claimed: Grid | None) -> Grid | None:
        """Return the grid of an image whose rows are held here, else None.

        Raises `ImageLimitError`, or `InvalidRequestError` if the caller computed another grid or one that cannot be.
        """
        self._validator.check_name(key, claimed)
        if (pin := self._store.pin(key.address)) is None:
            return None
        with pin:
            return confirmed_grid(Grid(*pin.grid), claimed)

    # Inside

    def _file_of(self, key: ImageKey, *, is_video: bool = False) -> Source | None:
        """Return the file of an image or of frames, if it is here, and renew its lifetime."""
        files = self._videos if is_video or key.frames is not None else self._sources
        return files.get(key.source_key)

    def _known_here(self, image: SubmittedImage) -> LookupResult | EncoderError | None:
        if image.is_video:
            source = self._file_of(image.key, is_video=True)
            return LookupResult(None, video=source.video) if source is not None else None
        try:
            if (grid := self.held_grid(image.key, image.claimed_grid)) is not None:
                return LookupResult(grid, cached=True)
            if (job := self._jobs.join(image.key, image.claim)) is not None:
                return LookupResult(confirmed_grid(job.grid, image.claimed_grid))
        except EncoderError as error:
            return error
        return None

    def _known_there(self, image: SubmittedImage, acquired: Acquired) -> LookupResult | EncoderError:
        """Answer a name by what the cluster said: this replica is to encode the image, or peers hold or encode it.

        Bytes that are here already are not asked for again: if that peer dies, a Fetch encodes the image here.
        """
        if image.key.address in acquired.granted:
            return self._granted(image)
        locations = acquired.located.get(image.key.address, ())
        grid = self._validator.agreed_grid((location.grid for location in locations), image.claimed_grid)
        if image.key.frames is not None:  # their grid needs no file, which is asked for if the others fail
            grid = image.key.frames.grid
        try:
            if grid is None and (source := self._file_of(image.key)) is not None:
                grid = self._validator.grid(image.key, source, image.claimed_grid)
        except EncoderError as error:
            return error
        return LookupResult(grid, cached=bool(locations))

    def _granted(self, image: SubmittedImage) -> LookupResult | EncoderError:
        """Answer a name whose lease this replica has: queue the image if its bytes are here, else ask for them."""
        if (known := self._known_here(image)) is not None:  # it came while the cluster was asked
            self.forget(image.key)
            return known
        try:
            if (source := self._file_of(image.key)) is not None:
                grid = self._validator.grid(image.key, source, image.claimed_grid)
                self._queue(image.key, source, grid, image.claim)
                return LookupResult(grid)
            if image.claimed_grid is not None:  # a full queue refuses before bytes are sent
                self._jobs.check_room(image.claim.holder, image.claimed_grid.patches)
        except EncoderError as error:
            self.forget(image.key)
            return error
        asyncio.get_running_loop().call_later(UPLOAD_WAIT_S, self.forget, image.key)
        return LookupResult(None)

    async def _begin(self, key: ImageKey, source: Source, claim: Claim, failed: set[str]) -> Locations:
        """Start encoding, or wait for the replica that does, unless it `failed`; return where the image is then."""
        grid = self._validator.grid(key, source)
        acquired = await self._cluster.acquire([key.address], failed)
        if key.address not in acquired.granted:
            located = acquired.located.get(key.address)
            return located or await self._cluster.wait_published(key.address, LEASE_WAIT_S, failed)
        try:
            self._queue(key, source, grid, claim)
        except EncoderError:
            self.forget(key)
            raise
        return ()

    def _queue(self, key: ImageKey, source: Source, grid: Grid, claim: Claim) -> bool:
        """Queue an image whose lease this replica has; return False if its rows came while the cluster was asked."""
        job = self._jobs.submit(key, source, grid, claim)
        if job is None:
            self._cluster.release(key.address)
        self.waiters.wake(key.address)
        return job is not None

    def _begun_as_cheaper(self, key: ImageKey, claim: Claim) -> bool:
        """Encode bytes that are here, without a lease, if that should be faster than a transfer; return whether."""
        if (source := self._file_of(key)) is None:
            return False
        grid = self._validator.grid(key, source)
        encode_s = self._jobs.encode_s(grid.patches)
        if not 0 < encode_s < self._cluster.transfer_s(self._validator.geometry.tokens(grid)):
            return False
        try:
            self._jobs.submit(key, source, grid, claim)
        except OverloadedError:
            return False  # nothing is faster in a queue that is full
        self.waiters.wake(key.address)
        return True

    async def _source_of(self, key: ImageKey, claim: Claim, *, is_elsewhere: bool) -> Source | None:
        """Return the source of an image if it is here or another replica shared it, and there is a tower for it."""
        if not self._encodes:
            return None
        source = self._file_of(key)
        if source is not None or not is_elsewhere or key.frames is not None:
            return source  # the files of videos are not shared
        if (data := await self._cluster.find_source(key)) is None:
            return None
        try:
            source = await self._validator.validate(key, data, claim.holder)
        except DigestMismatchError:
            return None  # any writer of Redis could have stored these bytes: never encode them as this image
        self._sources.put(source, claim.holder)
        return source


# Images that callers of other replicas compute, and that are followed at the same time. Callers that wait for further
# ones learn only at the end of their grace that no rows came.
MAX_FOLLOWED = 4096


@dataclass(frozen=True, slots=True)
class PutImage:
    """An image that a caller of Put names: the caller's index of it, and the grid its rows are of."""

    index: int
    key: ImageKey
    grid: Grid


@dataclass(eq=False, slots=True)
class Lease:
    """What one caller may put, until `ends_at` on the clock of the loop; `open` until then, or until it is settled."""

    image: PutImage
    place: Hold
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
        images: Images,
        cluster: Cluster,
        *,
        lease_s: float,
        budget: Budget,
    ) -> None:
        self.lease_s = lease_s
        self._images = images
        self._cluster = cluster
        self._waiters = images.waiters
        self._budget = budget
        self._leases: dict[bytes, Lease] = {}
        self._following: dict[bytes, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Leases held by callers of this replica."""
        return len(self._leases)

    async def ask(self, images: Sequence[PutImage], caller: Caller) -> list[PutAnswer | EncoderError]:
        """Answer names: held, to be computed by this caller, or being computed. Asks the cluster once, for all.

        A lease counts against `caller` until it is settled. A cancelled caller holds no lease.
        """
        answers: list[PutAnswer | EncoderError | None] = []
        taken: dict[int, Lease] = {}
        try:
            for place, image in enumerate(images):
                answers.append(self._known_here(image))
                if answers[place] is None:
                    try:
                        taken[place] = self._take(image, caller)
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
        """End a lease whose rows do not come, and tell the callers that wait for them. A closed lease is left alone."""
        if lease.open:
            self.settle(lease)
            self._cluster.release(lease.image.key.address)
            self._waiters.give_up(lease.image.key)

    def settle(self, lease: Lease) -> None:
        """Count a lease no more."""
        lease.open = False
        if lease.timer is not None:
            lease.timer.cancel()
        lease.place.release()
        del self._leases[lease.image.key.address]

    def _known_here(self, image: PutImage) -> PutAnswer | EncoderError | None:
        try:
            if self._images.held_grid(image.key, image.grid) is not None:
                return PutAnswer("held")
        except EncoderError as error:
            return error
        if (lease := self._leases.get(image.key.address)) is not None:
            left_s = lease.ends_at - asyncio.get_running_loop().time()
            return PutAnswer("wait", wait_s=max(left_s, 0.0))
        return None

    def _take(self, image: PutImage, caller: Caller) -> Lease:
        """Give this caller the lease before the cluster is asked, so that no other caller here asks at the same time.

        Raises `OverloadedError`.
        """
        loop = asyncio.get_running_loop()
        lease = Lease(image, self._budget.hold(caller), loop.time() + self.lease_s)
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
            if not self._images.holds(key):
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
