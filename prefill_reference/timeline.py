"""Draws traces as timelines, one lane per image and per chunk: HTML and SVG without libraries, PNG by matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from encoder_contract.json_file import read_json_object
from prefill_client.trace import REQUEST, Span, place, read_spans

COLOURS = {
    "hash": "#9e9ac8",
    "lay out": "#cbc9e2",
    "submit": "#6a51a3",
    "upload": "#bcbddc",
    "fetch": "#ececec",
    "queue": "#d0d0d0",
    "decode": "#fdd0a2",
    "preprocess": "#fdae6b",
    "vit": "#e6550d",
    "copy_out": "#a63603",
    "transfer": "#756bb1",
    "hit": "#31a354",
    "wait": "#fdd0d0",
    "prefill": "#3182bd",
}
OTHER = "#969696"
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
    spans: tuple[Span, ...]

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
    spans = read_spans(trace)
    lanes = sorted({span.lane for span in spans}, key=place)
    request = trace.get("otherData", {})
    title = f"{REQUEST} {request.get('request_id', '')}"
    if request.get("trace_id"):
        title += f", trace {request['trace_id']}"
    order = {name: number for number, name in enumerate(BEHIND)}
    spans.sort(key=lambda span: order.get(span.name, len(BEHIND)))
    return Panel(title, tuple(lanes), tuple(spans))


def draw(traces: Sequence[Path], picture: Path) -> Path:
    """Draw trace files below each other into `picture` (.html, .svg or .png); return its path.

    Raises `ValueError` for another file extension, for a file that is not a trace, and for .png without matplotlib.
    Raises `OSError` if a file cannot be read or written.
    """
    panels = [panel(read_json_object(trace)) for trace in traces]
    if picture.suffix == ".svg":
        picture.write_text(svg(panels))
    elif picture.suffix == ".html":
        picture.write_text(html(panels))
    elif picture.suffix == ".png":
        _write_png(panels, picture)
    else:
        raise ValueError(f"{picture}: the file extension must be .html, .svg or .png")
    return picture


def html(panels: Sequence[Panel]) -> str:
    """Return a self-contained page. A bar shows its details under the pointer."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Timeline</title>\n'
        "<style>body{margin:16px;font-family:sans-serif}svg{max-width:100%;height:auto}"
        "rect:hover{stroke:#000;stroke-width:.7}</style></head>\n"
        f"<body>\n{svg(panels)}\n</body></html>\n"
    )


def svg(panels: Sequence[Panel]) -> str:
    """Return the panels as one SVG element."""
    height = LEGEND + sum(each.height for each in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"',
        f'height="{height}" font-family="sans-serif" font-size="10">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        *_legend({span.name for each in panels for span in each.spans}),
    ]
    top = LEGEND
    for each in panels:
        parts += _panel_svg(each, top)
        top += each.height
    return "\n".join([*parts, "</svg>"])


def _legend(shown: set[str]) -> list[str]:
    parts, x = [], LEFT
    for name, colour in COLOURS.items():
        if name in shown:
            parts.append(f'<rect x="{x}" y="6" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{x + 13}" y="15">{_shown(name)}</text>')
            x += 24 + 6 * len(_shown(name))
    return parts


def _panel_svg(each: Panel, top: int) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / each.end_ms
    lane_y = {lane: top + TITLE + LANE * number for number, lane in enumerate(each.lanes)}
    bottom = top + TITLE + LANE * len(each.lanes)
    parts = [f'<text x="{LEFT}" y="{top + TITLE - 9}" font-size="11">{escape(each.title)}</text>']
    for tick in _ticks(each.end_ms):
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
            f'fill="{COLOURS.get(span.name, OTHER)}"><title>{escape(_tip(span))}</title></rect>'
        )
    return parts


def _ticks(end_ms: float) -> list[float]:
    """Return the positions of at most `TICKS` ticks at round numbers, in milliseconds."""
    step = 1e-3
    while end_ms / step > TICKS:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    return [step * number for number in range(int(end_ms / step) + 1)]


def _ms(span: Span) -> tuple[float, float]:
    return span.began_s * 1000, (span.ended_s - span.began_s) * 1000


def _shown(name: str) -> str:
    return name.replace("_", " ")


def _tip(span: Span) -> str:
    began_ms, lasted_ms = _ms(span)
    details = "".join(f", {key} {value}" for key, value in span.details.items() if key != "digest")
    return f"{span.lane}: {_shown(span.name)}, {lasted_ms:.2f} ms from {began_ms:.2f} ms on{details}"


def _write_png(panels: Sequence[Panel], picture: Path) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError(f"{picture}: .png needs matplotlib; .html and .svg do not") from error
    inch = 96
    height = (LEGEND + sum(each.height for each in panels)) / inch
    figure = Figure(figsize=(WIDTH / inch, height + 0.4), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[each.height for each in panels])
    for each, area in zip(panels, axes[:, 0], strict=True):
        row = {lane: number for number, lane in enumerate(each.lanes)}
        for span in each.spans:
            began_ms, lasted_ms = _ms(span)
            shortest_ms = each.end_ms * SHORTEST / WIDTH
            colour = COLOURS.get(span.name, OTHER)
            area.barh(
                row[span.lane], max(lasted_ms, shortest_ms), left=began_ms, height=BAR / LANE, color=colour
            )
        area.set_title(each.title, loc="left", fontsize=8)
        area.set_yticks(range(len(each.lanes)), each.lanes, fontsize=6)
        area.tick_params(axis="x", labelsize=6)
        area.invert_yaxis()
        area.set_xlim(0, each.end_ms)
    axes[-1, 0].set_xlabel("ms", fontsize=7)
    shown = {span.name for each in panels for span in each.spans}
    patches = [Patch(color=COLOURS[name], label=_shown(name)) for name in COLOURS if name in shown]
    figure.legend(handles=patches, loc="outside upper center", ncols=8, fontsize=6, frameon=False)
    figure.savefig(picture, dpi=1.5 * inch)
