"""The demo's picture: one lane per image, one per chunk, on the clock of the prefill process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patches import Patch

Turn = Mapping[str, Any]

COLOURS = {
    "waiting for the server": "#d9d9d9",
    "encoded": "#e6550d",
    "cache hit": "#31a354",
    "chunk waits": "#fdd0a2",
    "chunk prefills": "#3182bd",
}
LANE_INCHES = 0.24


def draw(turns: Sequence[Turn], path: Path) -> Path:
    """Write the timeline of all turns as one self-contained SVG and return its path."""
    mpl.use("svg")
    from matplotlib import pyplot as plt

    lanes = [len(turn["images"]) + len(turn["runs"]) for turn in turns]
    figure, panels = plt.subplots(
        len(turns),
        1,
        squeeze=False,
        figsize=(11, 1.5 + LANE_INCHES * sum(lanes)),
        height_ratios=lanes,
        layout="constrained",
    )
    for number, (turn, panel) in enumerate(zip(turns, panels[:, 0], strict=True)):
        _draw_turn(panel, turn)
        panel.set_title(f"turn {number + 1}", loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("ms since the turn began")
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in COLOURS.items()],
        loc="outside upper center",
        ncols=len(COLOURS),
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path)
    plt.close(figure)
    return path


def _draw_turn(panel: Axes, turn: Turn) -> None:
    began_s = turn["began_s"]
    lane_of = {image["digest"]: lane for lane, image in enumerate(turn["images"])}
    held = {image["digest"] for image in turn["images"] if image["cached"]}
    labels = [f"image {lane}" for lane in range(len(turn["images"]))]
    for arrival in turn["arrivals"]:
        asked, arrived = ((arrival[key] - began_s) * 1000 for key in ("asked_s", "arrived_s"))
        _draw_arrival(panel, lane_of[arrival["digest"]], asked, arrived, arrival, held)
    for lane, run in enumerate(turn["runs"], start=len(labels)):
        labels.append(f"chunk {run['chunk']}")
        start = (run["began_s"] - began_s) * 1000
        _bar(panel, lane, start - run["waited_ms"], run["waited_ms"], "chunk waits")
        _bar(panel, lane, start, run["prefill_ms"], "chunk prefills")
    panel.set_yticks(range(len(labels)), labels, fontsize=7)
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    panel.grid(axis="x", alpha=0.3)


def _draw_arrival(
    panel: Axes, lane: int, asked: float, arrived: float, arrival: Mapping[str, Any], held: set[str]
) -> None:
    """Draw one fetch of an image: the wait, and at its end the server's work on it or a hit."""
    if arrival["digest"] in held:
        _bar(panel, lane, asked, arrived - asked, "cache hit")
        return
    _bar(panel, lane, asked, arrived - asked, "waiting for the server")
    worked = sum(ms for stage, ms in arrival["stage_ms"].items() if stage != "queue")
    _bar(panel, lane, arrived - worked, worked, "encoded")


def _bar(panel: Axes, lane: int, start: float, length: float, what: str) -> None:
    panel.barh(lane, max(length, 0.3), left=start, height=0.7, color=COLOURS[what])
