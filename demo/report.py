"""Prints the demo's table: for each chunk, the images that overlap it, the source of their rows, and its times."""

from collections.abc import Mapping
from typing import Any

HEADINGS = ("chunk", "tokens", "images", "rows", "cached", "encoded", "wait ms", "prefill ms")


def print_turn(number: int, turn: Mapping[str, Any]) -> None:
    """Print the table of a turn. A cached row was stored before the turn; an encoded row was computed in it."""
    held = [image["cached"] for image in turn["images"]]
    rows = [chunk_row(run, held) for run in turn["runs"]]
    total = (
        "all",
        str(len(turn["prompt_ids"])),
        str(len(turn["images"])),
        *(str(sum(int(row[column]) for row in rows)) for column in (3, 4, 5)),
        *(f"{sum(float(row[column]) for row in rows):.1f}" for column in (6, 7)),
    )
    table = [HEADINGS, *rows, total]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADINGS))]
    print(f"\nturn {number + 1}: {held.count(False)} images new, {held.count(True)} held from before")
    for row in table:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def chunk_row(run: Mapping[str, Any], held: list[bool]) -> tuple[str, ...]:
    """Return the cells of a chunk."""
    counts = {True: 0, False: 0}
    for window in run["windows"]:
        counts[held[window["image"]]] += window["row_end"] - window["row_begin"]
    return (
        str(run["chunk"]),
        f"{run['begin']}-{run['end']}",
        ", ".join(f"{w['image']}[{w['row_begin']}:{w['row_end']}]" for w in run["windows"]) or "-",
        str(counts[True] + counts[False]),
        str(counts[True]),
        str(counts[False]),
        f"{run['waited_ms']:.1f}",
        f"{run['prefill_ms']:.1f}",
    )
