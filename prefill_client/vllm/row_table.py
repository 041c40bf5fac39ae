"""Tables of rows: each image is requested once for all requests that hold it, and kept until the last drops it."""

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
from prefill_client.vllm.image_name import same_image
from prefill_client.vllm.row_fetcher import AnyWish, Outcome, RowFetcher, RowSource, Wanted
from prefill_client.vllm.shared_store import Asked, Found, SharedStore

Holder = tuple[str, int]
"""A request, and the index of the image in it."""


@dataclass(eq=False, slots=True)
class Rows(Generic[AnyWish]):
    """The rows of one image that requests hold.

    `asked`: they are requested, or wait for memory. `here`: they are in host memory, or all workers have copied them.
    `ours`: this engine's own tower makes them (only in an engine that shares rows).
    """

    identifier: str
    wanted: AnyWish
    state: Literal["asked", "here", "ours"] = "asked"
    loads: int = 0  # running steps that copy them into a worker
    holders: set[Holder] = field(default_factory=set)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where in host memory the rows are, will be, or would be if no worker had its own copy."""
        return self.wanted.extents

    @property
    def load(self) -> Load:
        """What a worker does to have the rows."""
        return Load(self.identifier, self.extents, self.wanted.staged)


class RowTable(ABC, Generic[AnyWish]):
    """The images that requests hold, by vLLM's identifier. Only for the scheduler's thread."""

    def __init__(
        self, memory: HostMemory, source: RowSource[AnyWish, Any], row_bytes: int, counts: Counts
    ) -> None:
        """`source` fetches rows into `memory`; a row has `row_bytes` bytes."""
        self._memory = memory
        self._source = source
        self._row_bytes = row_bytes
        self._counts = counts
        self._rows: dict[str, Rows[AnyWish]] = {}
        self._asked: dict[
            AnyWish, Rows[AnyWish]
        ] = {}  # without an answer; their memory is in use until it arrives

    def __len__(self) -> int:
        return len({*self._rows.values(), *self._asked.values()})

    @property
    def fetching(self) -> bool:
        """Whether an answer is outstanding."""
        return bool(self._asked)

    def is_here(self, identifier: str) -> bool:
        """Whether an image's rows are in host memory, or all workers have copied them."""
        rows = self._rows.get(identifier)
        return rows is not None and rows.state == "here"

    def hold(self, identifier: str, holder: Holder, wanted: AnyWish) -> None:
        """Keep an image's rows for `holder`; request them, as `wanted` says, unless that has been done."""
        rows = self._rows.get(identifier)
        if rows is None:
            rows = self._rows[identifier] = Rows(identifier, wanted)
            self._ask(rows)
        rows.holders.add(holder)

    def drop(self, identifier: str, holder: Holder) -> None:
        """Release the hold of `holder`. Rows that failed in the meantime are gone already."""
        rows = self._rows.get(identifier)
        if rows is not None:
            rows.holders.discard(holder)
            self._forget_unheld(rows)

    def begin_load(self, identifier: str) -> Rows[AnyWish]:
        """Keep the rows of an image that has arrived until `end_load`, even if no request holds them."""
        rows = self._rows[identifier]
        assert rows.state == "here", "only rows that have arrived can be loaded"
        rows.loads += 1
        return rows

    def end_load(self, rows: Rows[AnyWish]) -> None:
        """Undo `begin_load`: the workers have their copies."""
        rows.loads -= 1
        self._forget_unheld(rows)

    @abstractmethod
    def collect(self) -> list[tuple[Holder, EncoderError]]:
        """Process the answers. Return the holders of rows that failed, with the errors; failures are not remembered."""

    @abstractmethod
    def _ask(self, rows: Rows[AnyWish]) -> None:
        """Request rows."""

    def _give_up(self, rows: Rows[AnyWish]) -> None:
        """Cancel the request for rows that are `asked`."""
        self._source.give_up(rows.wanted)

    def _reserve(self, rows: Rows[AnyWish]) -> bool:
        """Reserve host memory for rows, and count them as requested. Return False if the memory is full."""
        extents = self._memory.allocate(rows.wanted.tokens * self._row_bytes)
        if extents is None:
            return False
        rows.wanted.extents = extents
        self._asked[rows.wanted] = rows
        return True

    def _forget_unheld(self, rows: Rows[AnyWish]) -> None:
        if rows.holders or rows.loads:
            return
        if rows.state == "here":
            self._free(rows)
            return
        self._forget(rows)
        if rows.state == "asked":
            self._give_up(rows)

    def _free(self, rows: Rows[AnyWish]) -> None:
        self._forget(rows)
        self._memory.release(rows.extents)

    def _forget(self, rows: Rows[AnyWish]) -> None:
        """Forget the rows: a request that needs the image later asks for it again."""
        if self._rows.get(rows.identifier) is rows:
            del self._rows[rows.identifier]


class FetchTable(RowTable[Wanted]):
    """The table of an engine whose images the service encodes: rows are `here` or `asked`."""

    def __init__(self, memory: HostMemory, fetcher: RowFetcher, row_bytes: int, counts: Counts) -> None:
        super().__init__(memory, fetcher, row_bytes, counts)
        self._fetcher = fetcher
        self._starved: deque[Rows[Wanted]] = deque()  # they wait for memory; first come, first served

    def collect(self) -> list[tuple[Holder, EncoderError]]:
        """Process the answers. Return the holders of rows that failed, with the errors; failures are not remembered."""
        failed: list[tuple[Holder, EncoderError]] = []
        for outcome in self._source.answers():
            rows = self._asked.pop(outcome.wanted)
            if outcome.error is not None:
                failed += [(holder, outcome.error) for holder in rows.holders]
            if rows.holders and outcome.error is None:
                rows.state = "here"
            else:
                self._free(rows)
            self._count(outcome)
        return failed

    def _ask(self, rows: Rows[Wanted]) -> None:
        self._starved.append(rows)
        self._fetch_what_fits()

    def _give_up(self, rows: Rows[Wanted]) -> None:
        if rows.wanted in self._asked:
            super()._give_up(rows)
        elif rows in self._starved:
            self._starved.remove(rows)

    def _free(self, rows: Rows[Wanted]) -> None:
        super()._free(rows)
        self._fetcher.release(rows.wanted)
        self._fetch_what_fits()

    def _fetch_what_fits(self) -> None:
        while self._starved and self._reserve(self._starved[0]):
            self._source.ask(self._starved.popleft().wanted)

    def _count(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._counts.failed(outcome.error)
        elif not outcome.cancelled:
            self._counts.fetched(outcome, outcome.wanted.tokens * self._row_bytes)


class SharedTable(RowTable[Asked]):
    """The table of an engine that shares rows: rows that no other engine makes are `ours`, and are put."""

    def __init__(
        self, store: SharedStore, incoming: HostMemory, outgoing: HostMemory, row_bytes: int, counts: Counts
    ) -> None:  # fmt: skip
        super().__init__(incoming, store, row_bytes, counts)
        self._store = store
        self._outgoing = outgoing
        self._leases: dict[Rows[Asked], PutAnswer] = {}  # leases of rows that the store expects
        self._saving: dict[int, tuple[Rows[Asked], Save]] = {}  # rows that are being made and put
        self._numbers = itertools.count()

    def __len__(self) -> int:
        saving = (rows for rows, _ in self._saving.values())
        return len({*self._rows.values(), *self._asked.values(), *saving})

    def is_decided(self, identifier: str) -> bool:
        """Whether a step may use an image: its rows have arrived, or this engine makes them."""
        rows = self._rows.get(identifier)
        return rows is None or rows.state != "asked"

    def clashes(self, identifier: str, tokens: int) -> bool:
        """Whether `identifier` is an image with another number of rows: a caller gave two images the same `uuid`."""
        rows = self._rows.get(identifier)
        return rows is not None and rows.wanted.tokens != tokens

    def begin_save(self, identifier: str, data: Mapping[str, Any]) -> Save | None:
        """Return where to copy the rows that the tower makes from `data` in this step; None if they are not put.

        The lease is given back if there is no space for the rows, since no step waits for memory. It is also given back
        if the store was asked about other data, because a caller gave two images the same `uuid`.
        """
        rows = self._rows.get(identifier)
        lease = self._leases.pop(rows, None) if rows is not None else None
        if rows is None or lease is None:
            return None
        is_right = same_image(rows.wanted.data, data)
        extents = self._outgoing.allocate(rows.wanted.tokens * self._row_bytes) if is_right else None
        if extents is None:
            self._counts.put("no_room" if is_right else "another_image")
            self._store.give_back(lease)
            return None
        save = Save(extents, next(self._numbers))
        self._saving[save.number] = rows, save
        self._store.expect(save.number, lease, extents)
        return save

    def give_back(self, identifier: str) -> None:
        """Give back the lease of an image, so that another engine may make the rows; this one then makes its own."""
        rows = self._rows.get(identifier)
        if rows is not None and rows in self._leases:
            self._counts.put("waited")
            self._end_lease(rows)

    def collect(self) -> list[tuple[Holder, EncoderError]]:
        """Process what was found and put. No request fails: rows that cannot be fetched become `ours`."""
        for found in self._store.answers():
            self._take_found(self._asked.pop(found.wanted), found)
        for sent in self._store.sent():
            rows, save = self._saving.pop(sent.number)
            self._outgoing.release(save.extents)
            self._counts.put("kept" if sent.error is None else sent.error.status.name.lower())
            self._forget(rows)  # a later request asks the store again
        return []

    def _ask(self, rows: Rows[Asked]) -> None:
        if self._store.alone or not self._reserve(rows):
            rows.state = "ours"
            self._counts.encoded(shared=False)
        else:
            self._store.ask(rows.wanted)

    def _take_found(self, rows: Rows[Asked], found: Found) -> None:
        self._counts.found(found, rows.wanted.tokens * self._row_bytes)
        rows.state = "here" if found.outcome == "here" else "ours"
        if found.lease is not None:
            self._leases[rows] = found.lease
        if rows.state == "ours":
            self._memory.release(rows.extents)
        self._forget_unheld(rows)

    def _forget_unheld(self, rows: Rows[Asked]) -> None:
        if any(rows is saved for saved, _ in self._saving.values()):
            return
        super()._forget_unheld(rows)
        if not rows.holders:
            self._end_lease(rows)

    def _end_lease(self, rows: Rows[Asked]) -> None:
        if (lease := self._leases.pop(rows, None)) is not None:
            self._store.give_back(lease)
