"""The gateway: submits the images of a request's part to the encoder service, and sends their rows to SGLang.

A video becomes one image per pair of frames. Its rows are those of the pairs, one pair after the other.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import numpy as np
from cachetools import TTLCache
from numpy.typing import NDArray

from encoder_contract.errors import DeadlineError, EncoderError, ImageLimitError
from encoder_contract.geometry import Grid
from encoder_contract.turns import Room
from encoder_contract.video import VideoSettings
from prefill_client import (
    Description,
    FetchedRows,
    FetchStream,
    RowRequest,
    Submitted,
    read,
)
from prefill_client.images import raise_first
from prefill_client.plugin.door import Door, Medium, clips_of, names_of, stills
from prefill_client.sglang_gateway.delivery import Delivery
from prefill_client.sglang_gateway.frames import Modality, embedding_frame
from prefill_client.sglang_gateway.metrics import GatewayMetrics
from prefill_client.sglang_gateway.model_check import MERGE_SIZE, grid_of_patches
from prefill_client.sglang_gateway.parts import Address, AllowedReceivers, Part
from prefill_client.sglang_gateway.together import together
from prefill_client.sglang_gateway.videos import shown, times
from prefill_client.transport.rows import element_type

log = logging.getLogger(__name__)

# Pause after a failed attempt.
RETRY_S = 0.25
# How often the gateway checks whether a replica of the service serves.
WATCH_S = 1.0
# How long a part whose caller hung up may take to be written completely. SGLang hangs up once it has all parts.
LAST_BYTES_S = 0.5
# How long SGLang's ranks may take to register their receivers for a part once its rows are ready.
RANKS_S = 30.0
# Images of one part whose rows are fetched at the same time, while the others are being encoded.
_FETCHES_OF_A_PART = 16
# Bound on the parts with registered receivers, and how long they are remembered without a call to /encode.
_MAX_WAITING_PARTS, _WAITING_PART_S = 65536, 600.0
# More tokens than the context of any served model: the longest has 1,010,000.
TOO_MANY_TOKENS = 1 << 20


@dataclass(slots=True)
class _RankReceivers:
    """The receivers of one part, one for each rank of an SGLang server. `complete` is set once all are known."""

    addresses: list[Address] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class PartRows:
    """The rows of a part: [rows, width], C-contiguous, of torch's type `dtype`, and the grid of each image or video.

    `times` has the timestamps of its videos, under SGLang's names.
    """

    grids: list[Grid]
    array: NDArray[np.generic]
    dtype: str
    times: Mapping[str, Sequence[object]] = field(default_factory=dict)


class Gateway:
    """Serves parts. Not thread-safe: use it from one event loop.

    `videos` has the video settings of SGLang's checkpoint, or the error of parts with videos. `part_s` is how long the
    images of a part may take, with all retries. The rows of one part have at most `part_row_bytes`, and those of all
    parts at most `row_bytes`: more parts wait.
    """

    def __init__(
        self,
        door: Door,
        delivery: Delivery,
        metrics: GatewayMetrics,
        *,
        videos: VideoSettings | EncoderError,
        allowed: AllowedReceivers,
        max_images: int,
        part_row_bytes: int,
        row_bytes: int,
        part_s: float,
    ) -> None:
        self._door = door
        self._client = door.client
        self._videos = videos
        self._delivery = delivery
        self._metrics = metrics
        self._allowed = allowed
        self._max_images = max_images
        self._part_row_bytes = part_row_bytes
        self._row_memory = Room(row_bytes, "bytes of rows of all parts (--rows-gib)")
        self._part_s = part_s
        metrics.service_up.set_function(lambda: float(self.is_healthy))
        self._rank_receivers: TTLCache[str, _RankReceivers] = TTLCache(_MAX_WAITING_PARTS, _WAITING_PART_S)
        self._warned = False

    @property
    def is_healthy(self) -> bool:
        """Whether at least one replica of the service may be up."""
        return self._client.any_serves

    @property
    def why_unhealthy(self) -> str:
        """The last error of each replica that does not serve."""
        return "; ".join(f"{endpoint}: {why}" for endpoint, why in sorted(self._client.why_down.items()))

    async def watch_service(self) -> None:
        """Log when the last replica of the service stops to serve, and when one serves again. Never returns."""
        was_healthy = True
        while True:
            if self.is_healthy != was_healthy:
                was_healthy = self.is_healthy
                if was_healthy:
                    log.info("the encoder service serves again")
                else:
                    log.warning("no replica of the encoder service serves: %s", self.why_unhealthy)
            await asyncio.sleep(WATCH_S)

    def add_receiver(self, req_id: str, count: int, address: Address) -> None:
        """Register the receiver of one of `count` ranks for a part (zmq_to_scheduler). Raises `ForbiddenError`."""
        self._allowed.check(address)
        self._warn_of_scheduler()
        receivers = self._rank_receivers.setdefault(req_id, _RankReceivers())
        if address not in receivers.addresses and not receivers.complete.is_set():
            receivers.addresses.append(address)
        if len(receivers.addresses) >= count:
            receivers.complete.set()

    async def encode(self, part: Part) -> None:
        """Send the rows of a part to SGLang, and return once they are sent. Cancelling withdraws the images.

        Raises the error of the first image that failed, or of a receiver that is not allowed or cannot be reached. With
        zmq_to_scheduler, an image's error would end SGLang. The gateway logs it and sends rows that SGLang refuses.
        """
        began = monotonic()
        for address in part.receivers or ():
            self._allowed.check(address)
        delivered = False
        try:
            async with AsyncExitStack() as held:
                rows, outcome = await self._rows_or_stand_in(part, held)
                await self._deliver_whole(part, rows)
                delivered = True
                took_s = monotonic() - began
                self._metrics.served(outcome, rows.array.nbytes, took_s)
                told = (part.req_id, outcome, len(part.items), part.kind, len(rows.array), 1000 * took_s)
                log.info("part %s: %s, %d %ss, %d rows, %.1f ms", *told)
        except asyncio.CancelledError:
            if not delivered:
                self._metrics.parts.labels("left").inc()
            raise

    async def _rows_or_stand_in(self, part: Part, held: AsyncExitStack) -> tuple[PartRows, str]:
        """Return what to send, valid until `held` is closed, and the outcome. Raises an error that may reach SGLang."""
        try:
            return await self._rows(part, held), "served"
        except EncoderError as error:
            if part.receivers is not None:
                raise
            log.error("part %s: SGLang gets rows that it refuses: %s", part.req_id, error.message)
            return stand_in(part, self._client.description), "stand_in"

    async def _rows(self, part: Part, held: AsyncExitStack) -> PartRows:
        """Return the rows of a part, valid until `held` is closed. Retries temporary errors until `part_s`."""
        deadline = monotonic() + self._part_s
        last: EncoderError = DeadlineError(f"the images were not encoded within {self._part_s:g} s")
        try:
            async with asyncio.timeout(self._part_s):
                urls = part.urls(self._max_images)
                if part.modality is Modality.VIDEO and isinstance(self._videos, EncoderError):
                    raise self._videos
                files = await self._door.load(part.kind, urls)
                while True:
                    try:
                        async with AsyncExitStack() as attempt:
                            rows = await self._attempt(part, files, deadline, attempt)
                            held.push_async_exit(attempt.pop_all())
                            return rows
                    except EncoderError as error:
                        if not error.retryable:
                            raise
                        last = error.with_traceback(None)  # its frames hold the rows of this attempt
                    self._metrics.retries.inc()
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise last from None

    async def _attempt(
        self, part: Part, files: Sequence[bytes], deadline: float, held: AsyncExitStack
    ) -> PartRows:
        left_s = max(deadline - monotonic(), 0.001)
        # Keep the images submitted: hanging up withdraws them, and they survive the loss of a server.
        media = await self._media(part, files, left_s)
        names, clips = names_of(media), clips_of(media)
        kept = await self._door.keep(media, request_id=part.call_id, timeout_s=left_s, again_s=left_s)
        await held.enter_async_context(kept)
        size = self._client.description.row_bytes * sum(answer.tokens for answer in kept.answers)
        if size > self._part_row_bytes:
            raise ImageLimitError(
                f"the rows of the part have {size} bytes, and the limit is {self._part_row_bytes} (--part-rows-gib)"
            )
        await held.enter_async_context(self._row_memory.taken(amount=size))
        if len(names) == 1:
            rows = await self._in_place(part, names[0], kept.answers[0], left_s, held)
        else:
            rows = await self._together(part, names, kept.answers, left_s)
        if clips:
            grids = [clip.grid._replace(t=len(clip.pairs)) for clip in clips]
            return PartRows(grids, *rows, times(clips))
        description = self._client.description
        grids = [grid_of_patches(answer.grid, description) for answer in kept.answers if answer.grid]
        return PartRows(grids, *rows)

    async def _media(self, part: Part, files: Sequence[bytes], left_s: float) -> list[Medium]:
        """Return the images or videos of a part. Probes videos at the service, and selects their pairs of frames."""
        if part.modality is not Modality.VIDEO or isinstance(self._videos, EncoderError):
            return stills(files)
        clip = partial(shown, self._videos)
        return await self._door.videos(
            files, self._videos, clip=clip, request_id=part.call_id, timeout_s=left_s
        )

    async def _in_place(
        self, part: Part, name: str, image: Submitted, left_s: float, held: AsyncExitStack
    ) -> tuple[NDArray[np.generic], str]:
        """Return the rows of an image in place, valid until `held` is closed, and their type."""
        stream = await held.enter_async_context(self._fetch(part, image, left_s))
        fetched = await self._outcome(stream, name)
        # Entered last, so that it exits first: it checks the rows again before the call that holds them ends.
        lent = await asyncio.to_thread(held.enter_context, fetched.in_place())
        return lent.array, lent.dtype

    async def _together(
        self, part: Part, names: Sequence[str], images: Sequence[Submitted], left_s: float
    ) -> tuple[NDArray[np.generic], str]:
        """Return the rows of several images as one block, as SGLang takes them, and their type.

        Each image has its own call, which ends once the rows are copied, so that a large part does not exceed what a
        caller may pin.
        """
        dtype = self._client.description.dtype
        ends = np.cumsum([image.tokens for image in images])
        block = np.empty((ends[-1], self._client.description.width), element_type(dtype))
        slots = Room(_FETCHES_OF_A_PART)

        async def copy(index: int, image: Submitted) -> None:
            window = block[ends[index] - image.tokens : ends[index]]
            async with slots.taken(), self._fetch(part, image, left_s) as stream:
                fetched = await self._outcome(stream, names[index])
                await read([fetched], lambda rows: np.copyto(window, rows[0].array))

        await together(copy(index, image) for index, image in enumerate(images))
        return block, dtype

    def _fetch(self, part: Part, image: Submitted, left_s: float) -> FetchStream:
        request = RowRequest(image.digest, submitted_to=image.endpoint, frames=image.frames)
        return self._client.fetch([request], request_id=part.call_id, timeout_s=left_s, kept=True)

    async def _outcome(self, stream: FetchStream, name: str) -> FetchedRows:
        fetched = await anext(aiter(stream))
        raise_first([fetched.error], [name])
        self._metrics.images.labels(fetched.source).inc()
        return fetched

    async def _deliver_whole(self, part: Part, rows: PartRows) -> None:
        """Deliver a part. If the caller hangs up, a message that is complete in a moment still counts as delivered."""
        delivering = asyncio.create_task(self._deliver(part, rows))
        try:
            await asyncio.shield(delivering)
        except asyncio.CancelledError:
            await asyncio.wait({delivering}, timeout=LAST_BYTES_S)
            if not delivering.done() or delivering.exception() is not None:
                delivering.cancel()
                await asyncio.gather(delivering, return_exceptions=True)
                raise
        finally:
            del delivering  # an error refers to this frame, which would keep the rows through its task

    async def _deliver(self, part: Part, rows: PartRows) -> None:
        receivers = part.receivers if part.receivers is not None else await self._ranks(part.req_id)
        height, width = rows.array.shape
        frame = embedding_frame(
            part.req_id,
            part.num_parts,
            part.part_idx,
            grids=rows.grids,
            shape=(height, width),
            dtype=rows.dtype,
            modality=part.modality,
            times=rows.times,
        )
        await self._delivery.deliver(receivers, frame, rows.array)

    async def _ranks(self, req_id: str) -> list[Address]:
        """Return the receivers of a part once all ranks have registered. Raises `DeadlineError`."""
        self._warn_of_scheduler()
        receivers = self._rank_receivers.setdefault(req_id, _RankReceivers())
        try:
            async with asyncio.timeout(RANKS_S):
                await receivers.complete.wait()
        except TimeoutError:
            raise DeadlineError(
                f"SGLang's schedulers did not all register their receivers for {req_id} within {RANKS_S:g} s"
            ) from None
        finally:
            self._rank_receivers.pop(req_id, None)
        return receivers.addresses

    def _warn_of_scheduler(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "SGLang uses the back end zmq_to_scheduler. With it, SGLang up to 0.5.23 ends when a caller hangs up "
                "while images are encoded, with any encoder. Start SGLang with --encoder-transfer-backend "
                "zmq_to_tokenizer (docs/sglang.md)"
            )


def stand_in(part: Part, description: Description) -> PartRows:
    """Return replacement rows for a failed part, because an error would end SGLang's scheduler.

    If the request has one part, it gets more tokens than any context, so that SGLang answers it with 400. Its rows have
    one element each, because nothing computes with them. If the request has several parts, the rows must fit those of
    the other parts, so the images are blank.
    """
    count = len(part.items)
    grids = [Grid(1, MERGE_SIZE, MERGE_SIZE)] * count
    timestamps = times([None] * count) if part.modality is Modality.VIDEO else {}
    if part.num_parts > 1:
        blank = np.zeros((count, description.width), element_type(description.dtype))
        return PartRows(grids, blank, description.dtype, timestamps)
    side = MERGE_SIZE * int(TOO_MANY_TOKENS**0.5)
    grids[0] = Grid(1, side, side)
    return PartRows(grids, np.zeros((TOO_MANY_TOKENS + count - 1, 1), np.uint8), "uint8", timestamps)
