"""Compares engines under load by their own load generators: own tower, own encoder disaggregation, with the service.

A cell is one kind of load on one kind of engine. Its sides have the same cores, which Linux shares among all processes
of a side and the generator; `spare` cells give what encodes one core more, `favoured` cells run the engines at a lower
priority. Sides take turns at each load. With several engines, one side runs at a time, for want of memory.

`vllm bench serve` and `sglang.bench_serving` send the requests, each with one image: new images, or with a share that
earlier requests had. The model is small; the `stages` cells say what encoding an image, prefilling as many tokens and
decoding a token take, to compare with models of real size.

A run measures the cells that were measured longest ago, as many as fit into its time. Its result has the other cells
as they were measured before, each with its day and commit. `make bench ONLY=engines` again measures the next ones.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.engines_parts.generators import OfferedLoad, send
from bench.engines_parts.sides import SIDES, Cores, Side, pinned, started
from bench.harness import results
from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, table
from bench.harness.budget import TimeBudget
from testing.checkpoints import write_checkpoint
from testing.engine_environments import SGLANG_PYTHON, VLLM_PYTHON
from testing.engine_flags import add_video_processor

PYTHONS = {"vllm": VLLM_PYTHON, "sglang": SGLANG_PYTHON}
REQUESTS = {1: 12, 8: 24, 32: 64, 128: 160}
"""The requests of a load, by its concurrency."""
RATED_S = 25.0
"""How long requests of a load with a rate arrive."""
# Encoding an image takes about as long as prefilling its tokens, as for Qwen3-VL-8B and photos of 1280×720 on one GPU.
VISION = {
    "depth": 2,
    "hidden_size": 288,
    "intermediate_size": 1080,
    "num_heads": 4,
    "deepstack_visual_indexes": [0, 1],
}
TEXT_LAYERS, TEXT = 12, {"intermediate_size": 1024}
SIZE = {"size": {"longest_edge": 512**2, "shortest_edge": 1024}}
BUDGET_S = 540.0
HEADS = ("requests_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "itl_ms", "e2e_p50_ms", "failed")


def closed(repeated: float, *concurrencies: int) -> dict[str, OfferedLoad]:
    """Return closed loops of so many callers."""
    return {f"c{each}": OfferedLoad(REQUESTS[each], each, repeated=repeated) for each in concurrencies}


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of load on so many engines of a kind."""

    engine: str
    loads: Mapping[str, OfferedLoad]
    engines: int = 1
    shares: tuple[float, ...] = ()
    """Request rates, as shares of what the own tower reached in the first load."""
    spare: bool = False
    """Whether what encodes has one more core than the engine alone."""
    favoured: bool = False
    """Whether what encodes comes first on the cores that it shares with engines."""
    sides: tuple[str, ...] = tuple(SIDES)
    seconds: float = 450.0
    """A run begins no cell that takes longer than the time that is left."""


def cells_of(engine: str) -> dict[str, Cell]:
    """Return the cells of a kind of engine, the most important ones first."""
    stages = {"image": OfferedLoad(REQUESTS[1], 1), "text": OfferedLoad(REQUESTS[1], 1, images=0)}
    kinds = {
        "new": Cell(engine, closed(0, 8, 32, 128)),
        "most": Cell(engine, closed(0.8, 8, 32, 128)),
        "fleet-most": Cell(engine, closed(0.8, 32), engines=3),
        "half": Cell(engine, closed(0.5, 8, 32, 128)),
        "fleet-new": Cell(engine, closed(0, 32), engines=3),
        "fleet-half": Cell(engine, closed(0.5, 32), engines=3),
        "rates": Cell(engine, closed(0, 32), shares=(0.5, 0.8, 1.0)),
        "spare": Cell(engine, closed(0, 32), spare=True, seconds=300.0),
        "fleet-favoured": Cell(engine, closed(0, 32), engines=3, favoured=True),
        "stages": Cell(engine, stages, sides=("own",), seconds=120.0),
    }
    return {f"{engine}-{kind}": cell for kind, cell in kinds.items()}


CELLS = cells_of("vllm") | cells_of("sglang")


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of one side over that of another, in one load of a cell."""

    cell: str
    load: str
    figure: str
    above: str
    below: str

    def of(self, cells: Mapping[str, Any]) -> float | None:
        """Return the ratio; None if a side was not measured."""
        sides = cells.get(self.cell, {}).get("sides", {})
        found = [
            sides.get(side, {}).get("loads", {}).get(self.load, {}).get(self.figure)
            for side in (self.above, self.below)
        ]
        return round(found[0] / found[1], 3) if all(found) else None


RATIOS = {
    "new_requests": Ratio("vllm-new", "c32", "requests_per_s", "ours", "own"),
    "new_p99": Ratio("vllm-new", "c32", "ttft_p99_ms", "own", "ours"),
    "most_requests": Ratio("vllm-most", "c32", "requests_per_s", "ours", "own"),
    "most_p99": Ratio("vllm-most", "c32", "ttft_p99_ms", "own", "ours"),
    "fleet_requests": Ratio("vllm-fleet-most", "c32", "requests_per_s", "ours", "own"),
    "fleet_encoder": Ratio("vllm-fleet-most", "c32", "requests_per_s", "ours", "encoder"),
    "new_encoder": Ratio("vllm-new", "c32", "requests_per_s", "ours", "encoder"),
    "spare_requests": Ratio("vllm-spare", "c32", "requests_per_s", "ours", "own"),
    "sglang_new_requests": Ratio("sglang-new", "c32", "requests_per_s", "ours", "own"),
    "sglang_new_p99": Ratio("sglang-new", "c32", "ttft_p99_ms", "own", "ours"),
    "sglang_fleet_requests": Ratio("sglang-fleet-most", "c32", "requests_per_s", "ours", "own"),
    "sglang_fleet_encoder": Ratio("sglang-fleet-most", "c32", "requests_per_s", "ours", "encoder"),
}

BENCHMARK = Benchmark(
    "engines",
    "What does an engine gain under load?",
    (
        Figure(
            "new_requests",
            "vLLM, new images, 32 callers: requests/s, ours / own tower",
            target=">= 0.95",
            summary="vLLM, 32 callers, new images, same cores: requests/s with the service ÷ with its own tower",
            part=RATIOS["new_requests"].cell,
        ),
        Figure(
            "new_p99",
            "the same: p99 of the time to first token, own tower / ours",
            target=">= 1.0",
            summary="the same: p99 of the time to first token, its own tower ÷ the service",
            part=RATIOS["new_p99"].cell,
        ),
        Figure(
            "most_requests",
            "vLLM, 80 % repeated images, 32 callers: requests/s, ours / own tower",
            summary="vLLM, 32 callers, 80 % repeated images, same cores: requests/s, the service ÷ its own tower",
            part=RATIOS["most_requests"].cell,
        ),
        Figure(
            "most_p99",
            "the same: p99 of the time to first token, own tower / ours",
            summary="the same: p99 of the time to first token, its own tower ÷ the service",
            part=RATIOS["most_p99"].cell,
        ),
        Figure("fleet_requests", "three vLLM, 80 % repeated: requests/s, ours / own towers", target=">= 1.5"),
        Figure("fleet_encoder", "the same: ours / vLLM's encoder disaggregation", target=">= 1.2"),
        Figure("new_encoder", "vLLM, new images: requests/s, ours / its encoder disaggregation"),
        Figure("spare_requests", "vLLM, new images, its own core: requests/s, ours / own tower"),
        Figure("sglang_new_requests", "SGLang, new images, 32 callers: requests/s, ours / own tower"),
        Figure("sglang_new_p99", "the same: p99 of the time to first token, own tower / ours"),
        Figure("sglang_fleet_requests", "three SGLang, 80 % repeated: requests/s, ours / own towers"),
        Figure("sglang_fleet_encoder", "the same: ours / SGLang's encoder server", target=">= 1.2"),
        Figure("waiting_core_percent", "vLLM, its only request waits for an image", "% of a core", "<= 10"),
        Figure("failed_at_128", "failed requests with the service, 128 callers", target="<= 0"),
    ),
    limit_s=595,
    dry_run=("--cells", "vllm-new", "--sides", "own", "ours", "--loads", "c8", "--requests", "4"),
    why_not=lambda: "" if any(map(Path.exists, PYTHONS.values())) else "no .venv-vllm: make test-vllm",
    parts="cells",
)  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, budget_s=BUDGET_S)
    parser.add_argument(
        "--cells", nargs="+", choices=CELLS, metavar="CELL", help=f"only these: {', '.join(CELLS)}"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES], metavar="SIDE")
    parser.add_argument("--loads", nargs="+", metavar="LOAD", help="only these, such as c8 c32")
    parser.add_argument("--requests", type=int, help="in each load (default: twice its callers or more)")
    args = parser.parse_args()
    # Engines run in their own process groups, so they must be stopped before this process ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    known = results.earlier_figures("engines").get("cells", {})
    budget = TimeBudget(args.budget_s)
    order = args.cells or oldest_first(known)
    restricted = {name: restrict(CELLS[name], args.sides, args.loads, args.requests) for name in order}
    cells = dict(known)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        for number, (name, cell) in enumerate(restricted.items()):
            if number and not budget.affords(name, cell.seconds):
                break
            cells[name] = measure(name, cell, model, Path(folder))
            show(name, cells[name])
    print_figures(figures_of(cells), args)


def oldest_first(known: Mapping[str, Any]) -> list[str]:
    """Return the cells that can be measured here; first those not measured yet, then by their age."""
    here = [name for name, cell in CELLS.items() if PYTHONS[cell.engine].exists()]
    return sorted(here, key=lambda name: known[name]["measured_at"] if name in known else "")


def restrict(cell: Cell, sides: Collection[str], loads: Collection[str] | None, requests: int | None) -> Cell:
    """Return a cell with some of its sides and loads, and so many requests in each."""
    chosen = {
        name: replace(load, requests=requests or load.requests)
        for name, load in cell.loads.items()
        if loads is None or name in loads
    }
    return replace(cell, loads=chosen, sides=tuple(side for side in cell.sides if side in sides))


def write_model(folder: Path) -> Path:
    """Write the checkpoint that both engines load."""
    model = write_checkpoint(
        folder / "model", vision=VISION, text_layers=TEXT_LAYERS, text=TEXT, preprocessor=SIZE
    )
    return add_video_processor(model, "qwen3_vl")


def cores_for(cell: Cell) -> Cores:
    """Return the cores of a cell: all of the machine for every process, or the last one for what encodes only."""
    every = frozenset(os.sched_getaffinity(0))
    if not cell.spare:
        return Cores(every, every, 10 if cell.favoured else 0)
    return Cores(every - {max(every)}, frozenset({max(every)}))


def measure(name: str, cell: Cell, model: Path, folder: Path) -> dict[str, Any]:
    """Return what was measured of a cell."""
    first_seed = 1 + int(datetime.now(UTC).timestamp()) % 10**6  # no other run's images
    (folder / name).mkdir()
    found = MeasuredCell(name, cell, model, folder / name)
    together = [cell.sides] if cell.engines == 1 else [(side,) for side in cell.sides]
    for names in together:
        with started(cell.engine, names, model, cores_for(cell), cell.engines, folder / name) as sides:
            for number, (load_name, load) in enumerate(found.loads()):
                seed = first_seed + number  # all sides get the same requests, at the same times
                for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                    found.send(side, load_name, load, seed)
            for side in sides:
                found.end(side)
    return found.as_json()


@dataclass
class MeasuredCell:
    """What was measured of a cell so far."""

    name: str
    cell: Cell
    model: Path
    folder: Path
    sides: dict[str, dict[str, Any]] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)

    def loads(self) -> Iterator[tuple[str, OfferedLoad]]:
        """Yield the loads by name; those with rates once the capacity is known."""
        yield from self.cell.loads.items()
        for share in self.cell.shares:
            first = next(iter(self.sides.values()))["loads"][next(iter(self.cell.loads))]
            rate = round(share * first["requests_per_s"], 3)
            yield f"r{round(100 * share)}", OfferedLoad(round(rate * RATED_S), rate=rate)

    def send(self, side: Side, name: str, load: OfferedLoad, seed: int) -> None:
        """Send a load to a side."""
        began = perf_counter()
        with pinned(side.cores.every):
            answered = send(self.cell.engine, side.url, self.model, load, seed=seed, folder=self.folder)
        side.distinct += load.distinct
        self.commands[name] = answered.command
        figures = {**answered.figures, "steps": side.steps(), "cpu_s": side.cpu_s()}
        self.sides.setdefault(side.name, {"loads": {}})["loads"][name] = figures
        print(
            f"{self.name} {side.name} {name}: {figures} ({perf_counter() - began:.0f} s)",
            file=sys.stderr,
            flush=True,
        )

    def end(self, side: Side) -> None:
        """Add what is known at the end of a side. Raises `RuntimeError` if a process may use other cores."""
        used = side.used_cores()
        if not used <= side.cores.every:
            raise RuntimeError(f"{self.name}: {side.name} may use the cores {sorted(used)}")
        self.sides[side.name] |= {
            "cores": len(used),
            "peak_mib": side.peak_mib(),
            "encodes_per_image": side.encodes_per_image(),
            "waiting_core_percent": side.waiting_core_percent(),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the cell as the result stores it."""
        return {
            "measured_at": results.now(),
            "commit": results.versions()["commit"],
            "engines": self.cell.engines,
            "sides": self.sides,
            "commands": self.commands,
        }


def rows_of(cell: Mapping[str, Any]) -> list[list[str | float]]:
    """Return a row of figures for each load and side of a cell."""
    loads = dict.fromkeys(load for side in cell["sides"].values() for load in side["loads"])
    return [
        [load, side, *(measured["loads"][load][figure] for figure in HEADS)]
        for load in loads
        for side, measured in cell["sides"].items()
        if load in measured["loads"]
    ]


def show(name: str, cell: Mapping[str, Any]) -> None:
    """Print a cell."""
    table(name, ("load", "side", *HEADS), rows_of(cell))
    for side, measured in cell["sides"].items():
        print(
            f"{side}: {measured['cores']} cores, encodes per distinct image {measured['encodes_per_image']}, "
            f"peak MiB {measured['peak_mib']}, waiting {measured['waiting_core_percent']} % of a core"
        )
    for load, command in cell["commands"].items():
        print(f"{load}: {command}")


def encoder_cores(cells: Mapping[str, Any], engine: str) -> float | None:
    """Return the cores that encode for each core of an engine, if every request has a new image; None if not measured.

    It is the time to encode an image over the time to prefill and decode as many tokens of text.
    """
    loads = cells.get(f"{engine}-stages", {}).get("sides", {}).get("own", {}).get("loads", {})
    if not {"image", "text"} <= loads.keys():
        return None
    image, text = loads["image"], loads["text"]
    return round(float((image["ttft_p50_ms"] - text["ttft_p50_ms"]) / text["e2e_p50_ms"]), 2)


def figures_of(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a result: the ratios of all cells, and the cells."""
    ratios = {name: ratio.of(cells) for name, ratio in RATIOS.items()}
    ratios |= {f"{engine}_encoder_cores": encoder_cores(cells, engine) for engine in PYTHONS}
    figures: dict[str, Any] = {name: value for name, value in ratios.items() if value is not None}
    failed = [
        side["loads"]["c128"]["failed"]
        for cell in cells.values()
        for name, side in cell["sides"].items()
        if name == "ours" and "c128" in side["loads"]
    ]
    if failed:
        figures["failed_at_128"] = sum(failed)
    waiting = cells.get("vllm-new", {}).get("sides", {}).get("ours", {}).get("waiting_core_percent")
    if waiting is not None:
        figures["waiting_core_percent"] = waiting
    return {**figures, "cells": dict(cells)}


if __name__ == "__main__":
    main()
