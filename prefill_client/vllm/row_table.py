"""Which images' rows are here: fetched once however many requests hold them, kept until the last one lets go."""

from collections import deque
from dataclasses import dataclass, field

from encoder_contract.errors import EncoderError
from prefill_client.vllm.counts import Counts
from prefill_client.vllm.host_memory import Extent, HostMemory
from prefill_client.vllm.row_fetcher import Outcome, RowFetcher, Wanted

Holder = tuple[str, int]
"""A request, and the number of the image in it."""


@dataclass(eq=False, slots=True)
class Rows:
    """The rows of one image: waiting for memory, being fetched, or here."""

    identifier: str
    wanted: Wanted
    here: bool = False
    loads: int = 0  # steps under way that copy them into a worker
    holders: set[Holder] = field(default_factory=set)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where they are, or will be."""
        return self.wanted.extents


class RowTable:
    """For the scheduler's thread."""

    def __init__(self, memory: HostMemory, fetcher: RowFetcher, row_bytes: int, counts: Counts) -> None:
        self._memory = memory
        self._fetcher = fetcher
        self._row_bytes = row_bytes
        self._counts = counts
        self._rows: dict[str, Rows] = {}
        self._fetching: dict[Wanted, Rows] = {}
        self._starved: deque[Rows] = deque()  # no memory yet; first come, first served

    def __len__(self) -> int:
        return len({*self._rows.values(), *self._fetching.values()})

    @property
    def fetching(self) -> bool:
        """Whether rows are on their way."""
        return bool(self._fetching)

    def is_here(self, identifier: str) -> bool:
        """Whether an image's rows are in host memory."""
        rows = self._rows.get(identifier)
        return rows is not None and rows.here

    def hold(self, identifier: str, holder: Holder, wanted: Wanted) -> None:
        """Keep an image's rows for `holder`; fetch them, as `wanted` says, unless that has begun."""
        rows = self._rows.get(identifier)
        if rows is None:
            rows = self._rows[identifier] = Rows(identifier, wanted)
            self._starved.append(rows)
            self._fetch_what_fits()
        rows.holders.add(holder)

    def drop(self, identifier: str, holder: Holder) -> None:
        """Let go of what `holder` held; what has failed meanwhile is gone already."""
        rows = self._rows.get(identifier)
        if rows is not None:
            rows.holders.discard(holder)
            self._forget_unheld(rows)

    def begin_load(self, identifier: str) -> Rows:
        """Keep the rows of an image that is here until `end_load`, whoever holds it."""
        rows = self._rows[identifier]
        assert rows.here, "only what is here is loaded"
        rows.loads += 1
        return rows

    def end_load(self, rows: Rows) -> None:
        """The workers have their copies."""
        rows.loads -= 1
        self._forget_unheld(rows)

    def collect(self) -> list[tuple[Holder, EncoderError]]:
        """Take in what has arrived; return who waited for what has failed. A failure is not remembered."""
        failed: list[tuple[Holder, EncoderError]] = []
        for outcome in self._fetcher.outcomes():
            rows = self._fetching.pop(outcome.wanted)
            if outcome.error is not None:
                failed += [(holder, outcome.error) for holder in rows.holders]
            rows.here = bool(rows.holders) and outcome.error is None
            if not rows.here:
                self._free(rows)
            self._count(outcome)
        return failed

    def _forget_unheld(self, rows: Rows) -> None:
        if rows.holders or rows.loads:
            return
        if rows.here:
            self._free(rows)
            return
        if self._rows.get(rows.identifier) is rows:
            del self._rows[rows.identifier]  # whoever wants it from now on asks anew
        if rows.wanted in self._fetching:
            self._fetcher.cancel(rows.wanted)  # its memory is in use until its outcome
        elif rows in self._starved:
            self._starved.remove(rows)

    def _free(self, rows: Rows) -> None:
        if self._rows.get(rows.identifier) is rows:
            del self._rows[rows.identifier]
        self._memory.release(rows.wanted.extents)
        self._fetch_what_fits()

    def _fetch_what_fits(self) -> None:
        while self._starved:
            wanted = self._starved[0].wanted
            extents = self._memory.allocate(wanted.tokens * self._row_bytes)
            if extents is None:
                return
            wanted.extents = extents
            self._fetching[wanted] = self._starved.popleft()
            self._fetcher.fetch(wanted)

    def _count(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._counts.failed(outcome.error)
        elif not outcome.cancelled:
            self._counts.fetched(outcome, outcome.wanted.tokens * self._row_bytes)
