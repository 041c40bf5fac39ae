"""Traces of requests: which spans they record, on which clock, and how they are drawn."""

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_contract.errors import InvalidImageError
from encoder_service.app import Server
from prefill_client import EncoderClient, Trace
from prefill_client.images import ServerClock
from prefill_client.trace import TimeSpan, read_spans
from prefill_reference.chat import Chat
from prefill_reference.timeline import COLOURS, draw
from testing.photos import photo
from tests.chats import chat_of
from tests.gate import Gate
from tests.operator_view import fetches_wait_for
from tests.waiting import PATIENCE_S

PHOTOS = [photo(300, 220, 31), photo(256, 400, 32, orientation=6)]
STAGES = ["queue", "decode", "preprocess", "vit", "copy_out"]


@pytest.fixture
def chat(client: EncoderClient, checkpoint: Path) -> Iterator[Chat]:
    with chat_of(client, checkpoint) as chat:
        yield chat


def question(*images: bytes) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image} for image in images]}]


def lane(trace: Trace, name: str) -> dict[str, TimeSpan]:
    return {span.name: span for span in trace.spans if span.lane == name}


async def test_a_new_image_shows_every_stage_in_order_on_one_clock(
    chat: Chat, server: Server, gate: Gate
) -> None:
    trace = Trace("first")
    with gate.closed():  # no image is made before it is asked for
        prefilling = asyncio.create_task(chat.prefill(question(*PHOTOS), trace=trace))
        await fetches_wait_for(server, len(PHOTOS))
    prefilled = await prefilling
    assert {"hash", "lay out", "submit"} == set(lane(trace, "request"))
    (clock,) = trace.to_json()["otherData"]["server_clocks"].values()
    # Both sides run in this process, so the true clock offset is zero.
    assert abs(clock["offset_ms"]) <= clock["error_ms"] < PATIENCE_S * 1000
    slack_s = clock["error_ms"] / 1000
    for number in range(len(PHOTOS)):
        spans = lane(trace, f"image {number}")
        assert set(spans) >= {"upload", "fetch", "transfer", *STAGES}
        stages = [spans[stage] for stage in STAGES]
        assert all(stage.side == "encoder" for stage in stages)
        assert all(a.ended_s <= b.began_s + 1e-6 for a, b in pairwise(stages))
        assert spans["upload"].began_s <= stages[0].began_s + slack_s
        assert stages[-1].ended_s <= spans["fetch"].ended_s + slack_s
    for run in prefilled.runs:
        spans = lane(trace, f"chunk {run.chunk.index}")
        assert spans["wait"].ended_s <= spans["prefill"].began_s


async def test_a_stored_image_has_a_hit_span_and_no_stages(chat: Chat, server: Server, gate: Gate) -> None:
    await chat.prefill(question(PHOTOS[0]))
    trace = Trace("second")
    with gate.closed():
        prefilling = asyncio.create_task(chat.prefill(question(PHOTOS[0], PHOTOS[1]), trace=trace))
        await fetches_wait_for(server, 1)
    await prefilling
    assert set(lane(trace, "image 0")) == {"hit"}
    assert "vit" in lane(trace, "image 1")


async def test_a_failed_request_keeps_its_earlier_spans(chat: Chat) -> None:
    trace = Trace("failed")
    with pytest.raises(InvalidImageError):
        await chat.prefill(question(PHOTOS[0], PHOTOS[1][:3000]), trace=trace)
    assert "hash" in lane(trace, "request")
    assert not [span for span in trace.spans if span.ended_s < span.began_s]


@given(st.floats(-1e6, 1e6), st.floats(0, 10), st.floats(0, 10), st.floats(0, 1e5))
def test_the_clock_estimate_is_within_its_error(
    offset: float, there: float, back: float, asked: float
) -> None:
    clock = ServerClock.estimate(asked, asked + there + offset, asked + there + back)
    assert abs(clock.offset_s - offset) <= clock.error_s + 1e-6
    assert abs(clock.to_local(asked + there + offset) - (asked + there)) <= clock.error_s + 1e-6


def example() -> Trace:
    trace = Trace("<request>")
    at = trace.began_s
    trace.add("request", "hash", at, at + 0.002)
    for number in range(12):
        trace.add(f"image {number}", "hit" if number % 2 else "fetch", at, at + 0.1 + number / 100, chunk=1)
        trace.add(f"image {number}", "vit", at + 0.01, at + 0.05)
        trace.add(f"chunk {number}", "prefill", at + 0.1 * number, at + 0.1 * number + 0.08)
    return trace


def test_a_trace_file_has_every_span_once() -> None:
    trace = example()
    read = read_spans(json.loads(json.dumps(trace.to_json())))
    assert len(read) == len(trace.spans)
    for ours, theirs in zip(trace.spans, read, strict=True):
        assert (ours.lane, ours.name, ours.side, ours.details) == (
            theirs.lane, theirs.name, theirs.side, theirs.details,
        )  # fmt: skip
        assert theirs.began_s == pytest.approx(ours.began_s, abs=1e-9)
        assert theirs.ended_s == pytest.approx(ours.ended_s, abs=1e-9)


async def test_complete_events_of_a_track_never_overlap_partially(chat: Chat) -> None:
    """A viewer nests such events, and would draw partial overlaps incorrectly."""
    trace = Trace("nested")
    await chat.prefill(question(photo(640, 480, 33), *PHOTOS), trace=trace)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace.to_json()["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    assert len(tracks) > 6
    for spans in tracks.values():
        assert all(first[1] <= second[0] + 1e-3 for first, second in pairwise(sorted(spans)))


def test_pictures_are_self_contained_and_show_every_lane_in_order(tmp_path: Path) -> None:
    longer = example()
    longer.add("chunk 11", "prefill", longer.began_s + 2, longer.began_s + 4)
    files = [trace.write(tmp_path / f"{number}.json") for number, trace in enumerate((example(), longer))]
    page = draw(files, tmp_path / "timeline.svg").read_text()
    assert "href" not in page
    assert "src=" not in page
    assert "image 3: vit, 40.00 ms from 10.00 ms on" in page
    drawn = ElementTree.fromstring(page)
    texts = [element.text for element in drawn.iter() if element.tag.endswith("text")]
    lanes = [text for text in texts if text and text.startswith(("image", "chunk"))]
    assert lanes == 2 * [f"{kind} {number}" for kind in ("image", "chunk") for number in range(12)]
    assert texts.count("request <request>") == 2
    bars = [element for element in drawn.iter() if element.findall("{*}title")]
    assert len(bars) == 2 * 30 + 1  # hits, tower and prefill; the hash and the Fetch calls are not drawn
    assert sum(bar.get("fill") == COLOURS["hit"] for bar in bars) == 2 * 6
    assert len({bar.get("fill") for bar in bars}) == 3
    # Both requests have the same scale: the bar of 80 ms is as long in the short one as in the long one.
    widths = {bar.get("width") for bar in bars if bar.find("{*}title").text.startswith("chunk 3: ")}  # type: ignore[union-attr]
    assert len(widths) == 1


@pytest.mark.parametrize(("source", "drawn"), [("host", "hit"), ("encoded", "")])
def test_a_fetch_is_drawn_as_a_hit_only_if_its_rows_were_stored(
    source: str, drawn: str, tmp_path: Path
) -> None:
    trace = Trace("one")
    trace.add("image 0", "fetch", trace.began_s, trace.began_s + 1, source=source)
    page = draw([trace.write(tmp_path / "trace.json")], tmp_path / "timeline.svg").read_text()
    assert ("image 0: fetch" in page) == bool(drawn)
    assert (COLOURS["hit"] in page) == bool(drawn)


@pytest.mark.parametrize("content", ["no json", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}'])
def test_a_file_that_is_no_trace_is_refused(content: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(content)
    with pytest.raises(ValueError):
        draw([wrong], tmp_path / "timeline.svg")
