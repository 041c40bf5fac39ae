"""Traces of requests at the client and its servers, in the format of Chrome and Perfetto."""

import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encoder_contract.traceparent import trace_id
from prefill_client.images import FetchedRows, RowRequest, ServerClock, Submitted

REQUEST = "request"
KINDS = (REQUEST, "image", "chunk")  # kinds of lanes, in display order
SIDES = {"prefill": 1, "encoder": 2}  # the processes of the trace
# Spans that may overlap others of their lane. Viewers draw them on separate tracks.
_OVERLAPPING = {"fetch", "hit", "transfer"}

Fetch = Callable[..., AbstractAsyncContextManager[AsyncIterable[FetchedRows]]]


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A time interval, in seconds since the request began. `lane` is `request`, `image N` or `chunk N`."""

    lane: str
    name: str
    began_s: float
    ended_s: float
    side: str = "prefill"
    details: Mapping[str, Any] = field(default_factory=dict)


class Trace:
    """Collects the time spans of one request. All arguments that are times are in seconds of `time.monotonic`."""

    def __init__(self, request_id: str, *, traceparent: str = "") -> None:
        self.request_id = request_id
        self.trace_id = trace_id(traceparent)
        self.began_s = time.monotonic()
        self.spans: list[TimeSpan] = []
        self._names: list[bytes] = []
        self._lanes: dict[bytes, str] = {}
        self._encoded: set[bytes] = set()
        self._held: set[bytes] = set()
        self._clocks: dict[str, ServerClock] = {}

    def add(self, lane: str, name: str, began_s: float, ended_s: float, **details: Any) -> None:
        """Add a span of this process."""
        self.spans.append(
            TimeSpan(lane, name, began_s - self.began_s, ended_s - self.began_s, "prefill", details)
        )

    @contextmanager
    def span(self, name: str, lane: str = REQUEST) -> Iterator[None]:
        """Add a span for the duration of the block, unless the block fails."""
        began_s = time.monotonic()
        yield
        self.add(lane, name, began_s, time.monotonic())

    def images(self, names: Sequence[bytes]) -> None:
        """Give every image a lane. `names` has the `Image.name` of each; an image that occurs twice has one lane."""
        self._names = list(names)
        for number, name in enumerate(names):
            self._lanes.setdefault(name, f"image {number}")

    def submitted(self, answers: Mapping[int, Submitted]) -> None:
        """Add the uploads, and record which images the servers already had. `answers` are by number of the image."""
        for number, answer in answers.items():
            name = self._names[number] if number < len(self._names) else answer.digest
            if answer.cached:
                self._held.add(name)
            if answer.upload_s is not None:
                self.add(self._lane(name), "upload", *answer.upload_s)

    def watch(self, fetch: Fetch) -> Fetch:
        """Wrap `fetch` so that it adds a span for every image, from the request to the arrival of its rows."""

        @asynccontextmanager
        async def watched(
            requests: Sequence[RowRequest], **options: Any
        ) -> AsyncIterator[AsyncIterable[FetchedRows]]:
            requested_s = time.monotonic()
            async with fetch(requests, **options) as outcomes:
                yield self._traced(outcomes, requests, requested_s)

        return watched

    async def _traced(
        self, outcomes: AsyncIterable[FetchedRows], requests: Sequence[RowRequest], requested_s: float
    ) -> AsyncIterator[FetchedRows]:
        async for outcome in outcomes:
            self._arrived(outcome, requests[outcome.index], requested_s, time.monotonic())
            yield outcome

    def _arrived(
        self, outcome: FetchedRows, request: RowRequest, requested_s: float, arrived_s: float
    ) -> None:
        lane = self._lane(request.name)
        self.add(
            lane,
            "hit" if request.name in self._held else "fetch",
            requested_s,
            arrived_s,
            chunk=request.chunk,
            rows=[request.row_begin, request.row_end],
            source=outcome.source if outcome.error is None else type(outcome.error).__name__,
            transport=outcome.transport,
            digest=outcome.digest.hex(),
        )
        if outcome.clock is not None:
            self._clocks[outcome.endpoint] = outcome.clock
        if not outcome.stage_began_s:
            return
        stages = _stages(outcome)
        self.add(lane, "transfer", min(stages[-1][2], arrived_s), arrived_s, chunk=request.chunk)
        if request.name not in self._encoded:  # each fetch of an image reports the same stages
            self._encoded.add(request.name)
            for name, began_s, ended_s in stages:
                at = (began_s - self.began_s, ended_s - self.began_s)
                self.spans.append(TimeSpan(lane, name, *at, "encoder", {"server": outcome.endpoint}))

    def _lane(self, digest: bytes) -> str:
        return self._lanes.setdefault(digest, f"image {len(self._lanes)}")

    def to_json(self) -> dict[str, Any]:
        """Return the trace in the format of `chrome://tracing` and Perfetto: microseconds since the request began."""
        clocks = {
            endpoint: {"offset_ms": clock.offset_s * 1000, "error_ms": clock.error_s * 1000}
            for endpoint, clock in self._clocks.items()
        }
        request = {"request_id": self.request_id, "trace_id": self.trace_id, "server_clocks": clocks}
        return {"displayTimeUnit": "ms", "otherData": request, "traceEvents": _events(self.spans)}

    def write(self, path: Path) -> Path:
        """Write the trace file and return its path."""
        path.write_text(json.dumps(self.to_json()))
        return path


def _stages(outcome: FetchedRows) -> list[tuple[str, float, float]]:
    """Return name, begin and end of each stage, in order. Durations are rounded, so cut each at the next begin."""
    begins = sorted(outcome.stage_began_s.items(), key=lambda stage: stage[1])
    nexts = [began_s for _, began_s in begins[1:]] + [float("inf")]
    return [
        (name, began_s, min(began_s + outcome.stage_ms.get(name, 0.0) / 1000, next_s))
        for (name, began_s), next_s in zip(begins, nexts, strict=True)
    ]


def _events(spans: Sequence[TimeSpan]) -> list[dict[str, Any]]:
    lanes = list(dict.fromkeys((span.side, span.lane) for span in sorted(spans, key=lambda s: place(s.lane))))
    thread = {lane: number for number, lane in enumerate(lanes, start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": side}} for side, pid in SIDES.items()
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": SIDES[lane[0]], "tid": tid, "args": {"name": lane[1]}}
        for lane, tid in thread.items()
    ]
    for number, span in enumerate(spans):
        where = {"pid": SIDES[span.side], "tid": thread[span.side, span.lane]}
        what = {**where, "name": span.name, "cat": span.lane, "ts": span.began_s * 1e6}
        if span.name in _OVERLAPPING:
            end = {**what, "ph": "e", "id": number, "ts": span.ended_s * 1e6}
            events += [{**what, "ph": "b", "id": number, "args": dict(span.details)}, end]
        else:
            lasted_us = (span.ended_s - span.began_s) * 1e6
            events.append({**what, "ph": "X", "dur": lasted_us, "args": dict(span.details)})
    return events


def place(lane: str) -> tuple[int, int]:
    """Return the sort key of a lane: request, images, chunks. Raises `ValueError` for other names."""
    kind, _, number = lane.partition(" ")
    return KINDS.index(kind), int(number or 0)


def read_spans(trace: Mapping[str, Any]) -> list[TimeSpan]:
    """Return the spans of a trace. Raises `ValueError` if it has another format."""
    sides = {pid: side for side, pid in SIDES.items()}
    spans: list[TimeSpan] = []
    open_spans: dict[Any, Mapping[str, Any]] = {}
    try:
        for event in trace["traceEvents"]:
            if event["ph"] == "b":
                open_spans[event["id"]] = event
            elif event["ph"] in ("X", "e"):
                first = open_spans.pop(event["id"]) if event["ph"] == "e" else event
                ended_us = event["ts"] + event.get("dur", 0)
                at = (first["ts"] / 1e6, ended_us / 1e6)
                spans.append(
                    TimeSpan(first["cat"], first["name"], *at, sides[first["pid"]], first.get("args", {}))
                )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a trace of a request: {type(error).__name__} {error}") from error
    return spans
