"""Position and rotary tables of the published tower of Qwen3-VL-8B, cached and computed, over a range of grids."""

from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.benchmark import table
from bench.harness.timing import median_s
from bench.harness.towers import load_ours
from testing.checkpoints import vision_config, write_checkpoint

SIZES = {
    "256×256": (256, 256),
    "640×480": (640, 480),
    "1280×720": (1280, 720),
    "1920×1080": (1920, 1080),
    "2560×1440": (2560, 1440),
}
COMPUTED, CACHED = 5, 200


def tables(folder: Path) -> dict[str, Any]:
    """Return the milliseconds for the tables of each grid, as medians. One block suffices: all blocks share them."""
    vision = vision_config("qwen3_vl", full=True) | {
        "depth": 1,
        "out_hidden_size": 128,
        "deepstack_visual_indexes": [0],
    }
    tower = load_ours(write_checkpoint(folder / "tables", vision=vision, text_layers=1), "float32")
    rows = []
    for name, size in SIZES.items():
        grid = tower.geometry.grid(*size)
        computed = 1e3 * median_s(partial(tower._make_tables, grid), COMPUTED)
        cached = 1e3 * median_s(partial(tower._tables, grid), CACHED)
        rows.append((name, computed, cached, computed / cached))
    return {
        "tables_computed_1440p_ms": rows[-1][1],
        "tables_cached_1440p_ms": rows[-1][2],
        "tables_least_computed_over_cached": min(row[3] for row in rows),
        "grid_tables": [table("Tables of a grid", ("image", "computed, ms", "cached, ms", "ratio"), rows)],
    }
