"""Draws traces as timelines, one lane per image and one per chunk, as SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from encoder_contract.json_file import read_json_object
from prefill_client.trace import REQUEST, TimeSpan, place, read_spans

# The five kinds of bars, and the spans of each. Other spans (hash, upload, transfer, ...) are only in the trace file.
KINDS = {
    "waiting in the queue": ("#d0d0d0", ("queue",)),
    "decode": ("#fdae6b", ("decode", "preprocess")),
    "tower": ("#e6550d", ("vit", "copy_out")),
    "hit": ("#31a354", ("hit",)),
    "prefill": ("#3182bd", ("prefill",)),
}
COLOURS = {name: colour for colour, names in KINDS.values() for name in names}
# Bars that cover other stages, drawn behind them.
BEHIND = ("fetch", "hit", "queue")

WIDTH, LEFT, RIGHT = 1120, 76, 16  # pixels
LANE, BAR, TITLE, AXIS, LEGEND = 15, 11, 30, 26, 22
SHORTEST = 0.8  # pixels: a shorter bar would be invisible
TICKS = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """The drawing of one trace: its lanes from top to bottom, and its spans as bars."""

    title: str
    lanes: tuple[str, ...]
    spans: tuple[TimeSpan, ...]

    @property
    def end_ms(self) -> float:
        """End of the last bar, in milliseconds."""
        return max((span.ended_s for span in self.spans), default=0.0) * 1000 or 1.0

    @property
    def height(self) -> int:
        """Height in pixels."""
        return TITLE + LANE * len(self.lanes) + AXIS


def panel(trace: Mapping[str, Any]) -> Panel:
    """Return the panel of a trace. Raises `ValueError` if `trace` has another format."""
    spans = [span for span in read_spans(trace) if _colour(span)]
    lanes = sorted({span.lane for span in spans}, key=place)
    request = trace.get("otherData", {})
    title = f"{REQUEST} {request.get('request_id', '')}"
    if request.get("trace_id"):
        title += f", trace {request['trace_id']}"
    order = {name: number for number, name in enumerate(BEHIND)}
    spans.sort(key=lambda span: order.get(span.name, len(BEHIND)))
    return Panel(title, tuple(lanes), tuple(spans))


def draw(traces: Sequence[Path], picture: Path) -> Path:
    """Draw trace files below each other into the SVG file `picture`; return its path.

    A bar shows its details under the pointer. Raises `ValueError` for a file that is not a trace, and `OSError` if a
    file cannot be read or written.
    """
    picture.write_text(svg([panel(read_json_object(trace)) for trace in traces]))
    return picture


def svg(panels: Sequence[Panel]) -> str:
    """Return the panels as one SVG element. They share one scale of time, so that their lengths can be compared."""
    end_ms = max((each.end_ms for each in panels), default=1.0)
    height = LEGEND + sum(each.height for each in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"',
        f'height="{height}" font-family="sans-serif" font-size="10">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        *_legend({_colour(span) for each in panels for span in each.spans}),
    ]
    top = LEGEND
    for each in panels:
        parts += _panel_svg(each, top, end_ms)
        top += each.height
    return "\n".join([*parts, "</svg>"])


def _legend(shown: set[str]) -> list[str]:
    parts, x = [], LEFT
    for kind, (colour, _names) in KINDS.items():
        if colour in shown:
            parts.append(f'<rect x="{x}" y="6" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{x + 13}" y="15">{kind}</text>')
            x += 24 + 6 * len(kind)
    return parts


def _panel_svg(each: Panel, top: int, end_ms: float) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / end_ms
    lane_y = {lane: top + TITLE + LANE * number for number, lane in enumerate(each.lanes)}
    bottom = top + TITLE + LANE * len(each.lanes)
    parts = [f'<text x="{LEFT}" y="{top + TITLE - 9}" font-size="11">{escape(each.title)}</text>']
    for tick in _ticks(end_ms):
        x = LEFT + tick * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + TITLE}" y2="{bottom}" stroke="#eee"/>'
            f'<text x="{x:.1f}" y="{bottom + 13}" text-anchor="middle" fill="#666">{tick:g} ms</text>'
        )
    for lane, y in lane_y.items():
        parts.append(f'<text x="{LEFT - 6}" y="{y + BAR}" text-anchor="end">{escape(lane)}</text>')
    for span in each.spans:
        began_ms, lasted_ms = _ms(span)
        x, width = LEFT + began_ms * scale, max(SHORTEST, lasted_ms * scale)
        parts.append(
            f'<rect x="{x:.1f}" y="{lane_y[span.lane] + 2}" width="{width:.1f}" height="{BAR}" '
            f'fill="{_colour(span)}"><title>{escape(_tip(span))}</title></rect>'
        )
    return parts


def _colour(span: TimeSpan) -> str:
    """Return the colour of a bar, or "" if the span is not drawn. A Fetch that found stored rows is a hit."""
    stored = span.name == "fetch" and span.details.get("source") in ("device", "host", "peer")
    return COLOURS.get("hit" if stored else span.name, "")


def _ticks(end_ms: float) -> list[float]:
    """Return the positions of at most `TICKS` ticks at round numbers, in milliseconds."""
    step = 1e-3
    while end_ms / step > TICKS:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    return [step * number for number in range(int(end_ms / step) + 1)]


def _ms(span: TimeSpan) -> tuple[float, float]:
    return span.began_s * 1000, (span.ended_s - span.began_s) * 1000


def _tip(span: TimeSpan) -> str:
    began_ms, lasted_ms = _ms(span)
    name = span.name.replace("_", " ")
    details = "".join(f", {key} {value}" for key, value in span.details.items() if key != "digest")
    return f"{span.lane}: {name}, {lasted_ms:.2f} ms from {began_ms:.2f} ms on{details}"
