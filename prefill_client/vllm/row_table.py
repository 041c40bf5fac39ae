"""Tables of rows: each image is queried once for all requests that hold it, and kept until the last releases it."""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal

from encoder_contract.errors import EncoderError
from prefill_client.images import PutAnswer
from prefill_client.vllm.counts import Counts
from prefill_client.vllm.host_memory import Extent, HostMemory, Load, Save
from prefill_client.vllm.row_fetcher import AnyQuery, FetchQuery, Outcome, RowFetcher, RowSource
from prefill_client.vllm.shared_store import SharedStore, StoreQuery, same_image

Holder = tuple[str, int]
"""A request, and the index of the image in it."""


@dataclass(eq=False, slots=True)
class Entry(Generic[AnyQuery]):
    """The rows of one image that requests hold.

    `pending`: the query runs, or waits for memory. `here`: the rows are in host memory, or all workers have copied
    them. `own`: this engine's own tower makes them (only in an engine that shares rows).
    """

    identifier: str
    query: AnyQuery
    state: Literal["pending", "here", "own"] = "pending"
    loads: int = 0  # running steps that copy them into a worker
    holders: set[Holder] = field(default_factory=set)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where in host memory the rows are, will be, or would be if the workers had no copies."""
        return self.query.extents

    @property
    def load(self) -> Load:
        """What a worker does to have the rows."""
        return Load(self.identifier, self.extents, self.query.staged)


class RowTable(ABC, Generic[AnyQuery]):
    """The images that requests hold, by vLLM's identifier. Only for the scheduler's thread."""

    def __init__(
        self, memory: HostMemory, source: RowSource[AnyQuery], row_bytes: int, counts: Counts
    ) -> None:
        """`source` fetches rows into `memory`; a row has `row_bytes` bytes."""
        self._memory = memory
        self._source = source
        self._row_bytes = row_bytes
        self._counts = counts
        self._entries: dict[str, Entry[AnyQuery]] = {}
        # Queries without an outcome. Their memory is in use until it arrives, even if no request holds the image.
        self._running: dict[AnyQuery, Entry[AnyQuery]] = {}

    def __len__(self) -> int:
        return len({*self._entries.values(), *self._running.values()})

    @property
    def has_running(self) -> bool:
        """Whether a query runs."""
        return bool(self._running)

    def is_here(self, identifier: str) -> bool:
        """Whether an image's rows are in host memory, or all workers have copied them."""
        entry = self._entries.get(identifier)
        return entry is not None and entry.state == "here"

    def hold(self, identifier: str, holder: Holder, query: AnyQuery) -> None:
        """Keep an image's rows for `holder`; begin `query` unless the table has the image already."""
        entry = self._entries.get(identifier)
        if entry is None:
            entry = self._entries[identifier] = Entry(identifier, query)
            self._start(entry)
        entry.holders.add(holder)

    def release(self, identifier: str, holder: Holder) -> None:
        """Undo `hold`. Rows that failed in the meantime have left the table already."""
        entry = self._entries.get(identifier)
        if entry is not None:
            entry.holders.discard(holder)
            self._remove_unheld(entry)

    def begin_load(self, identifier: str) -> Entry[AnyQuery]:
        """Keep the rows of an image that has arrived until `end_load`, even if no request holds them."""
        entry = self._entries[identifier]
        assert entry.state == "here", "only rows that have arrived can be loaded"
        entry.loads += 1
        return entry

    def end_load(self, entry: Entry[AnyQuery]) -> None:
        """Undo `begin_load`: the workers have their copies."""
        entry.loads -= 1
        self._remove_unheld(entry)

    def collect(self) -> list[tuple[Holder, EncoderError]]:
        """Process the outcomes that have arrived.

        Return the holders of rows that failed, with the errors. Failures are not remembered.
        """
        failed: list[tuple[Holder, EncoderError]] = []
        for outcome in self._source.outcomes():
            entry = self._running.pop(outcome.query)
            self._counts.ended(outcome, entry.query.rows * self._row_bytes)
            if outcome.error is not None:
                failed += [(holder, outcome.error) for holder in entry.holders]
            self._end(entry, outcome)
        return failed

    @abstractmethod
    def _start(self, entry: Entry[AnyQuery]) -> None:
        """Begin the query of an entry, or decide that this engine makes the rows."""

    @abstractmethod
    def _end(self, entry: Entry[AnyQuery], outcome: Outcome[AnyQuery]) -> None:
        """Update an entry whose query has ended."""

    def _cancel(self, entry: Entry[AnyQuery]) -> None:
        """Cancel the query of a pending entry."""
        self._source.cancel(entry.query)

    def _reserve(self, entry: Entry[AnyQuery]) -> bool:
        """Reserve host memory for a query that is about to run. Return False if the memory is full."""
        extents = self._memory.allocate(entry.query.rows * self._row_bytes)
        if extents is None:
            return False
        entry.query.extents = extents
        self._running[entry.query] = entry
        return True

    def _remove_unheld(self, entry: Entry[AnyQuery]) -> None:
        if entry.holders or entry.loads:
            return
        if entry.state == "here":
            self._free(entry)
            return
        self._remove(entry)
        if entry.state == "pending":
            self._cancel(entry)

    def _free(self, entry: Entry[AnyQuery]) -> None:
        self._remove(entry)
        self._memory.release(entry.extents)

    def _remove(self, entry: Entry[AnyQuery]) -> None:
        """Remove an entry: a request that needs the image later queries it again."""
        if self._entries.get(entry.identifier) is entry:
            del self._entries[entry.identifier]


class FetchTable(RowTable[FetchQuery]):
    """The table of an engine whose images the service encodes: entries are `pending` or `here`."""

    def __init__(self, memory: HostMemory, fetcher: RowFetcher, row_bytes: int, counts: Counts) -> None:
        super().__init__(memory, fetcher, row_bytes, counts)
        self._fetcher = fetcher
        self._waiting: deque[Entry[FetchQuery]] = deque()  # for memory; first come, first served

    def _start(self, entry: Entry[FetchQuery]) -> None:
        self._waiting.append(entry)
        self._start_waiting()

    def _end(self, entry: Entry[FetchQuery], outcome: Outcome[FetchQuery]) -> None:
        if outcome.state == "here" and entry.holders:
            entry.state = "here"
        else:
            self._free(entry)

    def _cancel(self, entry: Entry[FetchQuery]) -> None:
        if entry.query in self._running:
            super()._cancel(entry)
        elif entry in self._waiting:
            self._waiting.remove(entry)

    def _free(self, entry: Entry[FetchQuery]) -> None:
        super()._free(entry)
        self._fetcher.release(entry.query)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Begin waiting queries as far as memory is free."""
        while self._waiting and self._reserve(self._waiting[0]):
            self._source.start(self._waiting.popleft().query)


class SharedTable(RowTable[StoreQuery]):
    """The table of an engine that shares rows: this engine makes and puts the rows that no other engine makes.

    No image fails: rows that cannot be fetched become `own`.
    """

    def __init__(
        self, store: SharedStore, incoming: HostMemory, outgoing: HostMemory, row_bytes: int, counts: Counts
    ) -> None:  # fmt: skip
        super().__init__(incoming, store, row_bytes, counts)
        self._store = store
        self._outgoing = outgoing
        self._leases: dict[Entry[StoreQuery], PutAnswer] = {}  # of rows that the store expects
        self._saving: dict[int, tuple[Entry[StoreQuery], Save]] = {}  # rows that are being made and put
        self._save_numbers = itertools.count()

    def __len__(self) -> int:
        saving = (entry for entry, _ in self._saving.values())
        return len({*self._entries.values(), *self._running.values(), *saving})

    def is_decided(self, identifier: str) -> bool:
        """Whether a step may use an image: its rows have arrived, or this engine makes them."""
        entry = self._entries.get(identifier)
        return entry is None or entry.state != "pending"

    def clashes(self, identifier: str, rows: int) -> bool:
        """Whether `identifier` is an image with another number of rows: a caller gave two images the same `uuid`."""
        entry = self._entries.get(identifier)
        return entry is not None and entry.query.rows != rows

    def begin_save(self, identifier: str, data: Mapping[str, Any]) -> Save | None:
        """Return where to copy the rows that the tower makes from `data` in this step; None if they are not put.

        Abandons the lease if there is no space for the rows, since no step waits for memory. Abandons it, too, if the
        store was asked about other data because a caller gave two images the same `uuid`.
        """
        entry = self._entries.get(identifier)
        lease = self._leases.pop(entry, None) if entry is not None else None
        if entry is None or lease is None:
            return None
        is_right = same_image(entry.query.data, data)
        extents = self._outgoing.allocate(entry.query.rows * self._row_bytes) if is_right else None
        if extents is None:
            self._counts.put("no_room" if is_right else "another_image")
            self._store.abandon(lease)
            return None
        save = Save(extents, next(self._save_numbers))
        self._saving[save.number] = entry, save
        self._store.expect(save.number, lease, extents)
        return save

    def abandon_lease(self, identifier: str) -> None:
        """Let another engine make the rows of an image; this one then makes them only for itself."""
        entry = self._entries.get(identifier)
        if entry is not None and entry in self._leases:
            self._counts.put("waited")
            self._abandon(entry)

    def collect(self) -> list[tuple[Holder, EncoderError]]:
        """Process the outcomes of queries and of puts."""
        failed = super().collect()
        for put in self._store.puts():
            entry, save = self._saving.pop(put.number)
            self._outgoing.release(save.extents)
            self._counts.put("kept" if put.error is None else put.error.status.name.lower())
            self._remove(entry)  # a later request asks the store again
        return failed

    def _start(self, entry: Entry[StoreQuery]) -> None:
        if self._store.alone or not self._reserve(entry):
            entry.state = "own"
            self._counts.encoded(shared=False)
        else:
            self._store.start(entry.query)

    def _end(self, entry: Entry[StoreQuery], outcome: Outcome[StoreQuery]) -> None:
        if outcome.lease is not None:
            self._leases[entry] = outcome.lease
        if outcome.state == "here":
            entry.state = "here"
        else:
            entry.state = "own"
            self._memory.release(entry.extents)
        self._remove_unheld(entry)

    def _remove_unheld(self, entry: Entry[StoreQuery]) -> None:
        if any(entry is saved for saved, _ in self._saving.values()):
            return
        super()._remove_unheld(entry)
        if not entry.holders:
            self._abandon(entry)

    def _abandon(self, entry: Entry[StoreQuery]) -> None:
        if (lease := self._leases.pop(entry, None)) is not None:
            self._store.abandon(lease)
