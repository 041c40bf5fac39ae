"""Draws charts as SVG: what an order of eviction saves, an engine's throughput under load, and the spans of a trace."""

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bench.harness.results import Result
from testing.collector import CollectedSpan

# Text stays text, and a second drawing of the same numbers is the same file.
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "charts", "font.family": "sans-serif", "font.size": 9}
)
COLOURS = ("#3182bd", "#e6550d", "#31a354", "#756bb1")
ORDERS = {"offline": "#9e9e9e", "ours": "#e6550d", "LRU": "#3182bd", "LRU in equal shares": "#756bb1"}
SIDES = {"own": "the engine alone", "encoder": "its own encoder disaggregation", "ours": "with the service"}
SHARES = {"vllm-new": "new images", "vllm-most": "80 % repeated"}
LANE_INCHES = 0.24
INDENT = "\u00a0" * 4  # plain spaces at the start of a text collapse in SVG


def eviction(result: Result) -> str:
    """Draw the time of the tower that each order saves over the size of the store, from a result of the benchmark."""
    (table,) = [each for each in result.figures["tables"] if each["heads"][0] == "GiB"]
    sizes = [int(row[0]) for row in table["rows"]]
    figure, axes = _axes(7, 3.6)
    for column, head in enumerate(table["heads"]):
        if head.endswith(", %"):
            order = head.removesuffix(", %")
            saved = [float(row[column]) for row in table["rows"]]
            axes.plot(sizes, saved, marker="o", color=ORDERS[order], label=order)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size} GiB" for size in sizes])
    axes.set_ylim(0)
    axes.set_ylabel("time of the tower saved, %")
    axes.grid(alpha=0.3)
    axes.legend()
    return svg(figure, source(result))


def engines(result: Result) -> str:
    """Draw requests a second over the number of callers, a line for each side, from a result of the benchmark.

    There is a plot for new images, and one for repeated images if they were measured.
    """
    cells = {name: each for name, each in result.figures["cells"].items() if name in SHARES}
    figure = Figure((3.6 * len(cells), 3.4), layout="constrained")
    plots = figure.subplots(1, len(cells), sharey=True, squeeze=False)[0]
    for axes, (name, cell) in zip(plots, cells.items(), strict=True):
        axes.set_xscale("log", base=2)
        for (side, label), colour in zip(SIDES.items(), COLOURS, strict=False):
            loads = cell["sides"].get(side, {"loads": {}})["loads"]
            callers = sorted(int(load.removeprefix("c")) for load in loads)
            rates = [loads[f"c{each}"]["requests_per_s"] for each in callers]
            axes.plot(callers, rates, marker="o", color=colour, label=label)
            axes.set_xticks(callers, [str(each) for each in callers])
        axes.set_title(f"vLLM, {SHARES[name]}")
        axes.set_xlabel("callers")
        axes.set_ylim(0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    plots[0].set_ylabel("requests/s")
    plots[0].legend()
    return svg(figure, source(result))


def source(result: Result) -> str:
    """Return which run of a benchmark a chart shows."""
    return f"{result.command}, {result.measured_at[:10]}, commit {result.versions['commit']}"


def trace(spans: Sequence[CollectedSpan], names: Mapping[str, str]) -> str:
    """Draw the spans of one trace, each below its parent. `names` has the name of each `service.instance.id`."""
    began_ns = min(span.began_ns for span in spans)
    colours = dict(zip(names.values(), COLOURS, strict=False))
    lanes = list(_lanes(spans))
    figure, axes = _axes(10, 0.9 + LANE_INCHES * len(lanes))
    for lane, (_, span) in enumerate(lanes):
        begin_ms, lasted_ms = (span.began_ns - began_ns) / 1e6, (span.ended_ns - span.began_ns) / 1e6
        axes.barh(lane, lasted_ms, 0.7, begin_ms, color=colours[names[span.resource["service.instance.id"]]])
    axes.set_yticks(range(len(lanes)), [INDENT * depth + _label(span) for depth, span in lanes])
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
    axes.tick_params("y", length=0, pad=190)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.grid(axis="x", alpha=0.3)
    handles = [matplotlib.patches.Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), frameon=False)
    return svg(figure, f"trace {spans[0].trace_id}")


def _lanes(spans: Sequence[CollectedSpan]) -> Iterator[tuple[int, CollectedSpan]]:
    """Yield each span with its depth, after its parent and in the order of time."""
    children = defaultdict[str, list[CollectedSpan]](list)
    known = {span.span_id for span in spans}
    for span in sorted(spans, key=lambda span: span.began_ns):
        children[span.parent_id if span.parent_id in known else ""].append(span)

    def below(parent: str, depth: int) -> Iterator[tuple[int, CollectedSpan]]:
        for span in children[parent]:
            yield depth, span
            yield from below(span.span_id, depth + 1)

    return below("", 0)


def _label(span: CollectedSpan) -> str:
    images = span.attributes.get("encoder.images", "1")
    return span.name if images == "1" else f"{span.name} ({images} images)"


def _axes(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure((width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def svg(figure: Figure, description: str) -> str:
    """Return a figure as SVG, with a description in its metadata."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Description": description})
    return out.getvalue()
