"""What happens to an image on the event loop: look it up, receive and queue it, find its rows.

A Submit names images. `Images.lookup` answers from what this replica knows, or else asks the cluster. If this replica
is to encode an image, the call requests the bytes; `receive` checks them and queues the image. The devices do the
rest: decode, ViT, store. A Fetch gets `rows`: held here, encoded here, or fetched from a peer. `UnsubmittedImages` has
the Fetches whose image was not submitted yet.

Nothing here touches a pixel.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from encoder_contract.errors import EncoderError, ImageLimitError, OverloadedError, UnknownImageError
from encoder_contract.geometry import Grid
from encoder_contract.video import VideoInfo
from encoder_service.cluster.cluster import Acquired, Cluster, Locations
from encoder_service.devices.job_queue import JobQueue
from encoder_service.image.source import Source, VideoFile
from encoder_service.image.sources import SourceCache, Validator, confirmed_grid
from encoder_service.keys import ImageKey
from encoder_service.limits import Budget, Caller
from encoder_service.scheduler import Claim
from encoder_service.store import Pin, Store


class KeepingCall:
    """A Submit call with `kept` names: it stays open, and its caller can send the files again."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        """Set when `requested` or `error` has changed."""
        self.requested: dict[bytes, None] = {}
        """Addresses of images that a Fetch waits for, in the order of the Fetches. An ordered set."""
        self.error: EncoderError | None = None
        """Why the caller must submit its images to another server."""


class UnsubmittedImages:
    """Fetches whose images nobody has submitted yet, and the Submit calls that keep images and can send them again.

    Not thread-safe: use from one event loop.
    """

    def __init__(self, cluster: Cluster, awaited_images: Budget) -> None:
        self._cluster = cluster
        self._budget = awaited_images
        self._waiters: dict[bytes, set[asyncio.Future[Locations]]] = {}
        self._keeping: dict[bytes, dict[KeepingCall, None]] = {}
        self._error: EncoderError | None = None
        self._keeping_error: EncoderError | None = None

    async def wait(self, key: ImageKey, caller: Caller, until: float) -> Locations:
        """Wait until the image is submitted here or elsewhere; return the peers that hold it, none if it is here.

        Requests the image from a call that keeps it, if there is one. Raises `UnknownImageError` at `until` (event loop
        time), `OverloadedError` when too many callers wait, and the error that `end` was called with.
        """
        if self._error is not None:
            raise self._error
        unknown = UnknownImageError(key.unknown)
        if asyncio.get_running_loop().time() >= until:
            raise unknown
        with self._budget.hold(caller):
            waiter: asyncio.Future[Locations] = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(key.address, set()).add(waiter)
            self._cluster.start_search(key, self.wake)
            self._request(key.address)
            try:
                async with asyncio.timeout_at(until):
                    return await waiter
            except TimeoutError:
                raise unknown from None
            finally:
                self._remove(key.address, waiter)

    def keep(self, address: bytes, call: KeepingCall) -> None:
        """Register `call` as keeping an image."""
        self._keeping.setdefault(address, {})[call] = None
        call.error = self._keeping_error

    def release(self, address: bytes, call: KeepingCall) -> None:
        """Undo `keep`. If a Fetch waits for the image, request it from another one."""
        if keeping := self._keeping.get(address):
            keeping.pop(call, None)
            if not keeping:
                del self._keeping[address]
            elif address in self._waiters:
                self._request(address)

    def end(self, error: EncoderError) -> None:
        """Fail all waiters and keeping calls with `error`, present and future: this server takes no more submits."""
        self._error = error
        self.end_keeping(error)
        for waiter in [waiter for waiters in self._waiters.values() for waiter in waiters]:
            if not waiter.done():
                waiter.set_exception(error)

    def end_keeping(self, error: EncoderError) -> None:
        """Tell all keeping calls, present and future, to submit their images elsewhere, because of `error`."""
        self._keeping_error = error
        for call in {call for keeping in self._keeping.values() for call in keeping}:
            call.error = error
            call.changed.set()

    def wake(self, address: bytes, locations: Locations = ()) -> None:
        """End all waits for `address`: it is here, or at these locations."""
        self._cluster.stop_search(address)
        for waiter in self._waiters.pop(address, ()):
            if not waiter.done():
                waiter.set_result(locations)

    def _request(self, address: bytes) -> None:
        if keeping := self._keeping.get(address):
            call = next(reversed(keeping))
            call.requested[address] = None
            call.changed.set()

    def _remove(self, address: bytes, waiter: "asyncio.Future[Locations]") -> None:
        waiting = self._waiters.get(address)
        if waiting is not None:
            waiting.discard(waiter)
            if not waiting:
                del self._waiters[address]
                self._cluster.stop_search(address)


# If requested bytes have not arrived after this time, the lease is released, so that a stalled caller does not delay
# other replicas. If the bytes arrive later, the lease is acquired again.
UPLOAD_WAIT_S = 5.0
DROPPED_RETRY_MS = 1000
# Wait this long for another replica before looking again. If that replica dies, its lease expires.
LEASE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class SubmittedImage:
    """An image of a Submit call: its index, grid and size (0: unknown) as the caller gave them, and the call's claim.

    With `is_video`, it is a whole video: the caller asks what its container says, and nothing is encoded. With
    `known_only`, the caller has no file.
    """

    index: int
    key: ImageKey
    claimed_grid: Grid | None
    size_bytes: int
    claim: Claim
    is_video: bool = False
    known_only: bool = False

    @property
    def file_is_video(self) -> bool:
        """Whether the file is a video."""
        return self.is_video or self.key.frames is not None


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What the server knows about a named image. Without `grid` and `video`, it needs the bytes."""

    grid: Grid | None
    cached: bool = False
    video: VideoInfo | None = None

    @property
    def needs_bytes(self) -> bool:
        """Whether the caller is to send the file."""
        return self.grid is None and self.video is None


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Pinned rows, and where they were found; for rows encoded now, how long each stage took and when it began."""

    pin: Pin
    source: Literal["device", "host", "peer", "encoded"]
    stage_ms: Mapping[str, float] = field(default_factory=dict)
    stage_began_s: Mapping[str, float] = field(default_factory=dict)


class Images:
    """Looks images up, receives their bytes, and finds or makes their rows.

    Not thread-safe: use from one event loop.
    """

    def __init__(
        self,
        validator: Validator,
        sources: SourceCache,
        videos: SourceCache,
        jobs: JobQueue,
        store: Store,
        cluster: Cluster,
        awaited_images: Budget,
    ) -> None:
        self._validator = validator
        self._sources = sources
        self._videos = videos
        self._jobs = jobs
        self._store = store
        self._cluster = cluster
        self.unsubmitted = UnsubmittedImages(cluster, awaited_images)

    @property
    def patches_per_s(self) -> float:
        """The rate at which this replica encodes; 0 until it is known."""
        return self._jobs.scheduler.recent_patches_per_s

    # What a Submit needs

    async def lookup(self, images: Sequence[SubmittedImage]) -> list[LookupResult | EncoderError]:
        """Answer each submitted name: cached, queued, an error, or (grid None) bytes needed.

        Asks the cluster once, about all images that are not known here.
        """
        answers = [self._local_answer(image) for image in images]
        unknown = [
            image
            for image, answer in zip(images, answers, strict=True)
            if answer is None and not image.is_video
        ]
        if not unknown:
            return [answer or LookupResult(None) for answer in answers]
        acquired = await self._cluster.acquire([image.key.address for image in unknown])
        return [
            answer or (LookupResult(None) if image.is_video else self._cluster_answer(image, acquired))
            for image, answer in zip(images, answers, strict=True)
        ]

    async def lookup_known(self, images: Sequence[SubmittedImage]) -> list[LookupResult | EncoderError]:
        """Answer names whose caller has no files: as `lookup` does, but `UnknownImageError` where it needs bytes.

        Asks the cluster once about images whose files are here, and once about the others. Those get no lease, for
        which other replicas would wait.
        """
        answers = {image.index: self._local_answer(image) for image in images}
        missing = [image for image in images if answers[image.index] is None]
        with_file = [image for image in missing if self._file_of(image.key, is_video=image.is_video)]
        sought = [image.key for image in missing if image not in with_file and not image.is_video]
        located = await self._cluster.find(sought) if sought else {}
        answers |= zip((image.index for image in with_file), await self.lookup(with_file), strict=True)
        for image in missing:
            if (locations := located.get(image.key.address)) is not None:
                answers[image.index] = self._located_answer(image, locations)
        return [self._without_file(image, answers[image.index]) for image in images]

    def _without_file(
        self, image: SubmittedImage, answer: LookupResult | EncoderError | None
    ) -> LookupResult | EncoderError:
        """Return the answer to a name whose caller has no file."""
        if answer is None:
            answer = self._local_answer(image)  # it may have arrived while the cluster answered
        if answer is not None and not (isinstance(answer, LookupResult) and answer.needs_bytes):
            return answer
        self.release_lease(image.key)
        return UnknownImageError(image.key.unknown)

    async def receive_video(self, image: SubmittedImage, file: VideoFile) -> LookupResult:
        """Check the file of a video against its name and the limits, and keep it; queue frames if the name has them.

        Raises the errors that `receive` returns.
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
                "the video was evicted by other videos: retry", retry_after_ms=DROPPED_RETRY_MS
            )
        return known

    async def receive(self, files: Sequence[tuple[SubmittedImage, bytes]]) -> list[LookupResult | Exception]:
        """Check the files of images against their names and the limits, and queue them.

        Return `DigestMismatchError`, `InvalidImageError`, `ImageLimitError`, `OverloadedError` or an unexpected error
        for an image that fails. Asks the cluster once, about all images that are not known here.
        """
        holder = files[0][0].claim.holder
        sources = await self._validator.validate([(image.key, data) for image, data in files], holder)
        # This replica usually has the leases already. Another caller may have released one, or the bytes were late.
        acquired = await self._cluster.acquire(
            [
                image.key.address
                for (image, _), source in zip(files, sources, strict=True)
                if isinstance(source, Source) and not self._jobs.knows(image.key)
            ]
        )
        return [
            source if isinstance(source, Exception) else self._receive(image, source, acquired)
            for (image, _), source in zip(files, sources, strict=True)
        ]

    def _receive(self, image: SubmittedImage, source: Source, acquired: Acquired) -> LookupResult | Exception:
        key = image.key
        try:
            grid = self._validator.grid(key, source, image.claimed_grid)
            if self._jobs.knows(key) or key.address in acquired.granted:
                cached = not self._queue(key, source, grid, image.claim)
            else:  # a peer holds it or encodes it
                self.unsubmitted.wake(key.address)
                cached = key.address in acquired.located
        except Exception as error:  # noqa: BLE001 - only this image fails
            return error
        self._sources.put(source, image.claim.holder)  # only now: a refused file must not evict others
        return LookupResult(grid, cached=cached)

    def withdraw(self, claim: Claim) -> None:
        """End a claim. An image without claims is dropped, unless its batch has started."""
        self._jobs.withdraw(claim)

    def withdraw_all(
        self, images: Sequence[SubmittedImage], refusal: OverloadedError, *, by_queue: bool
    ) -> EncoderError:
        """Withdraw images that were to be queued together, because of `refusal`; return the error of each of them.

        If the queue refused them (`by_queue`) although it is empty without them, a retry does not help.
        """
        for image in images:
            self.withdraw(image.claim)
            self.release_lease(image.key)
        if not by_queue or self._jobs.scheduler.queued.images:
            return refusal
        return ImageLimitError(
            f"{len(images)} images together do not fit into the empty queue ({refusal.message}): submit fewer at a "
            "time, or without `all_or_nothing`"
        )

    def release_lease(self, key: ImageKey) -> None:
        """Release the lease of an image that is not queued: its bytes will not arrive, or were refused."""
        if key not in self._jobs:
            self._cluster.release(key.address)

    # What a Fetch needs

    async def locate(self, images: Sequence[ImageKey]) -> dict[bytes, Locations]:
        """Ask `Cluster.find` about those of the images that are not known here."""
        unknown = [key for key in images if not self._jobs.knows(key)]
        return await self._cluster.find(unknown) if unknown else {}

    def held(self, key: ImageKey, *, again: bool = False) -> FetchResult | None:
        """Return the rows of an image if they are held here, else None. `again`: the same call has asked before."""
        if not again:
            self._cluster.note_request(key)
        pin = self._store.pin(key.address, again=again)
        return FetchResult(pin, pin.tier) if pin is not None else None

    def watch(
        self, key: ImageKey, claim: Claim, found: Callable[[FetchResult | EncoderError], None]
    ) -> Callable[[], None] | None:
        """Call `found` once, with the rows of an image that is being encoded here, or its error.

        Return a function that undoes it and withdraws the claim; None if the image is not being encoded here. Raises as
        `JobQueue.join` does.
        """
        if (job := self._jobs.join(key, claim)) is None:
            return None

        def ended(outcome: Pin | EncoderError) -> None:
            self._jobs.withdraw(claim)
            if isinstance(outcome, Pin):
                found(FetchResult(outcome, "encoded", job.stage_ms, job.stage_began_s))
            else:
                found(outcome)

        def leave() -> None:
            self._jobs.unwatch(job, ended)
            self._jobs.withdraw(claim)

        self._jobs.watch(job, ended)
        return leave

    async def rows_here(self, key: ImageKey, claim: Claim) -> FetchResult | None:
        """Return the rows of an image if they are held or being encoded here, else None. Call `held` before."""
        if (found := self.held(key, again=True)) is not None:
            return found
        if (loading := self._store.moves.load_later(key.address, claim.holder)) is not None:
            pin = await asyncio.wrap_future(loading)
            if pin is not None:
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

        `located` is a fresh result of `locate`. Starts an encoding if this replica has the file, and waits for its
        end. Waits at most `grace_s` for an image that is not submitted yet, then raises `UnknownImageError`.
        Cancelling withdraws the claim. Call `held` before.
        """
        deadline = asyncio.get_running_loop().time() + grace_s
        elsewhere = located.get(key.address)
        failed: set[str] = set()
        while True:
            if (found := await self.rows_here(key, claim)) is not None:
                return found
            live = tuple(location for location in elsewhere or () if location.replica_id not in failed)
            if live and self._encode_if_cheaper(key, claim):
                continue
            if live:
                shared = await self._cluster.fetch_from_peer(key, live, claim.holder)
                if shared is not None and (pin := self._store.pin(key.address, again=True)) is not None:
                    return FetchResult(pin, "peer")
                failed.update(location.replica_id for location in live)
                elsewhere = (await self._cluster.find([key])).get(key.address)
            elif (source := self._file_of(key)) is not None:
                elsewhere = await self._start_encoding(key, source, claim, failed)
            elif self._jobs.knows(key):
                elsewhere = None  # it arrived while the cluster answered
            elif elsewhere == ():  # a peer encodes it
                elsewhere = await self._cluster.wait_published(key.address, LEASE_WAIT_S, failed)
                elsewhere = elsewhere or (await self._cluster.find([key])).get(key.address)
            else:
                elsewhere = await self.unsubmitted.wait(key, caller, deadline)
                failed.clear()  # peers that are found again are tried again: nobody else has the image

    def known_error(self, error: Exception) -> EncoderError:
        """Translate an error for callers that wait for rows. If the device is lost, end all jobs."""
        return self._jobs.known_error(error)

    def knows(self, key: ImageKey) -> bool:
        """Whether this replica has a job for the image, or holds its rows."""
        return self._jobs.knows(key)

    # Internals

    def _file_of(self, key: ImageKey, *, is_video: bool = False) -> Source | None:
        """Return the file of an image or of frames, if this replica has it, and renew its lifetime."""
        files = self._videos if is_video or key.frames is not None else self._sources
        return files.get(key.source_key)

    def _local_answer(
        self, image: SubmittedImage, *, again: bool = False
    ) -> LookupResult | EncoderError | None:
        if image.is_video:
            source = self._file_of(image.key, is_video=True)
            return LookupResult(None, video=source.video) if source is not None else None
        try:
            self._validator.check_name(image.key, image.claimed_grid)
            if (grid := self._store.grid(image.key.address, again=again)) is not None:
                return LookupResult(confirmed_grid(grid, image.claimed_grid), cached=True)
            if (job := self._jobs.join(image.key, image.claim)) is not None:
                return LookupResult(confirmed_grid(job.grid, image.claimed_grid))
        except EncoderError as error:
            return error
        return None

    def _cluster_answer(self, image: SubmittedImage, acquired: Acquired) -> LookupResult | EncoderError:
        """Answer a name as the cluster did: this replica is to encode the image, or peers hold or encode it.

        Bytes that this replica has are not requested again: if the peer dies, a Fetch encodes the image from them.
        """
        if image.key.address in acquired.granted:
            return self._answer_with_lease(image)
        return self._located_answer(image, acquired.located.get(image.key.address, ()))

    def _located_answer(self, image: SubmittedImage, locations: Locations) -> LookupResult | EncoderError:
        grid = self._validator.agreed_grid((location.grid for location in locations), image.claimed_grid)
        if image.key.frames is not None:  # the name has their grid; the file is requested if the peers fail
            grid = image.key.frames.grid
        if grid is None and image.known_only and not locations:  # a peer encodes it
            grid = image.claimed_grid
        try:
            if grid is None and (source := self._file_of(image.key)) is not None:
                grid = self._validator.grid(image.key, source, image.claimed_grid)
        except EncoderError as error:
            return error
        return LookupResult(grid, cached=bool(locations))

    def _answer_with_lease(self, image: SubmittedImage) -> LookupResult | EncoderError:
        """Answer a name whose lease this replica has: queue the image if its bytes are here, else request them."""
        if (
            known := self._local_answer(image, again=True)
        ) is not None:  # it arrived while the cluster answered
            self.release_lease(image.key)
            return known
        try:
            if (source := self._file_of(image.key)) is not None:
                grid = self._validator.grid(image.key, source, image.claimed_grid)
                self._queue(image.key, source, grid, image.claim)
                return LookupResult(grid)
            # Refuse before the bytes are sent.
            patches = image.claimed_grid.patches if image.claimed_grid is not None else 0
            self._jobs.check_room(image.key, patches, image.size_bytes, image.claim)
        except EncoderError as error:
            self.release_lease(image.key)
            return error
        asyncio.get_running_loop().call_later(UPLOAD_WAIT_S, self.release_lease, image.key)
        return LookupResult(None)

    async def _start_encoding(
        self, key: ImageKey, source: Source, claim: Claim, failed: set[str]
    ) -> Locations:
        """Take a lease and queue the image: return (). If another replica has the lease, return where its rows are.

        Waits for that replica, unless it is in `failed`.
        """
        grid = self._validator.grid(key, source)
        acquired = await self._cluster.acquire([key.address], failed)
        if key.address not in acquired.granted:
            located = acquired.located.get(key.address)
            return located or await self._cluster.wait_published(key.address, LEASE_WAIT_S, failed)
        try:
            self._queue(key, source, grid, claim)
        except EncoderError:
            self.release_lease(key)
            raise
        return ()

    def _queue(self, key: ImageKey, source: Source, grid: Grid, claim: Claim) -> bool:
        """Queue an image whose lease this replica has. Return False if its rows arrived while the cluster answered."""
        job = self._jobs.submit(key, source, grid, claim)
        if job is None:
            self._cluster.release(key.address)
        self.unsubmitted.wake(key.address)
        return job is not None

    def _encode_if_cheaper(self, key: ImageKey, claim: Claim) -> bool:
        """Queue an image without a lease if encoding should be faster than a transfer; return whether it is queued."""
        if (source := self._file_of(key)) is None:
            return False
        grid = self._validator.grid(key, source)
        encode_s = self._jobs.encode_s(grid.patches)
        if not 0 < encode_s < self._cluster.transfer_s(self._validator.geometry.tokens(grid)):
            return False
        try:
            self._jobs.submit(key, source, grid, claim)
        except OverloadedError:
            return False  # the queue is full
        self.unsubmitted.wake(key.address)
        return True
