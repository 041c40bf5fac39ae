"""The rows of images: each image is fetched once for all requests that hold it, and kept until the last releases it."""

from collections import deque
from dataclasses import dataclass, field

from encoder_contract.errors import EncoderError
from encoder_contract.extents import Extent
from prefill_client.vllm.counts import Counts
from prefill_client.vllm.host_memory import HostMemory, RowLoad
from prefill_client.vllm.row_fetcher import FetchQuery, Outcome, RowFetcher

Holder = tuple[str, int]
"""A request, and the index of the image in it."""


@dataclass(eq=False, slots=True)
class RowSlot:
    """The rows of one image that requests hold.

    They are `here` once they are in host memory, or all workers have copied them. Until then the query runs, or waits
    for memory.
    """

    identifier: str
    query: FetchQuery
    here: bool = False
    loads: int = 0  # running steps that copy them into a worker
    holders: set[Holder] = field(default_factory=set)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where in host memory the rows are, will be, or would be if the workers had no copies."""
        return self.query.extents

    @property
    def load(self) -> RowLoad:
        """What a worker does to have the rows."""
        return RowLoad(self.identifier, self.extents, self.query.staged)


class RowTable:
    """The images that requests hold, by vLLM's identifier. Only for the scheduler's thread."""

    def __init__(self, memory: HostMemory, fetcher: RowFetcher, row_bytes: int, counts: Counts) -> None:
        """`fetcher` fetches rows into `memory`; a row has `row_bytes` bytes."""
        self._memory = memory
        self._fetcher = fetcher
        self._row_bytes = row_bytes
        self._counts = counts
        self._slots: dict[str, RowSlot] = {}
        # Queries without an outcome. Their memory is in use until it arrives, even if no request holds the image.
        self._running: dict[FetchQuery, RowSlot] = {}
        self._waiting: deque[RowSlot] = deque()  # for memory; first come, first served

    def __len__(self) -> int:
        return len({*self._slots.values(), *self._running.values()})

    @property
    def has_running(self) -> bool:
        """Whether a query runs."""
        return bool(self._running)

    def is_here(self, identifier: str) -> bool:
        """Whether an image's rows are in host memory, or all workers have copied them."""
        slot = self._slots.get(identifier)
        return slot is not None and slot.here

    def hold(self, identifier: str, holder: Holder, query: FetchQuery) -> None:
        """Keep an image's rows for `holder`. If the table does not have the image, the next `fetch` begins `query`."""
        slot = self._slots.get(identifier)
        if slot is None:
            slot = self._slots[identifier] = RowSlot(identifier, query)
            self._waiting.append(slot)
        slot.holders.add(holder)

    def release(self, identifier: str, holder: Holder) -> None:
        """Undo `hold`. Rows that failed in the meantime have left the table already."""
        slot = self._slots.get(identifier)
        if slot is not None:
            slot.holders.discard(holder)
            self._remove_unheld(slot)

    def fetch(self) -> None:
        """Begin all waiting queries at once, as far as memory is free. The scheduler calls this once a step."""
        started: list[FetchQuery] = []
        while self._waiting:
            query = self._waiting[0].query
            extents = self._memory.allocate(query.rows * self._row_bytes)
            if extents is None:
                break
            query.extents = extents
            self._running[query] = self._waiting.popleft()
            started.append(query)
        if started:
            self._fetcher.start(started)

    def begin_load(self, identifier: str) -> RowSlot:
        """Keep the rows of an image that has arrived until `end_load`, even if no request holds them."""
        slot = self._slots[identifier]
        assert slot.here, "only rows that have arrived can be loaded"
        slot.loads += 1
        return slot

    def end_load(self, slot: RowSlot) -> None:
        """Undo `begin_load`: the workers have their copies."""
        slot.loads -= 1
        self._remove_unheld(slot)

    def collect(self) -> list[tuple[Holder, EncoderError]]:
        """Process the outcomes that have arrived.

        Return the holders of rows that failed, with the errors. Failures are not remembered.
        """
        failed: list[tuple[Holder, EncoderError]] = []
        for outcome in self._fetcher.outcomes():
            slot = self._running.pop(outcome.query)
            self._counts.ended(outcome, slot.query.rows * self._row_bytes)
            if outcome.error is not None:
                failed += [(holder, outcome.error) for holder in slot.holders]
            self._end(slot, outcome)
        return failed

    def _end(self, slot: RowSlot, outcome: Outcome) -> None:
        """Update a slot whose query has ended."""
        if outcome.state == "here" and slot.holders:
            slot.here = True
        else:
            self._free(slot)

    def _remove_unheld(self, slot: RowSlot) -> None:
        if slot.holders or slot.loads:
            return
        if slot.here:
            self._free(slot)
            return
        self._remove(slot)
        if slot.query in self._running:
            self._fetcher.cancel(slot.query)
        elif slot in self._waiting:
            self._waiting.remove(slot)

    def _free(self, slot: RowSlot) -> None:
        self._remove(slot)
        self._memory.release(slot.extents)
        self._fetcher.release(slot.query)

    def _remove(self, slot: RowSlot) -> None:
        """Remove a slot: a request that needs the image later queries it again."""
        if self._slots.get(slot.identifier) is slot:
            del self._slots[slot.identifier]
