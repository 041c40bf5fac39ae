"""Checks and times every path on a CUDA machine, in parts; on a CPU, runs all parts without meaningful figures.

    python -m bench.gpu_check --part env attention --out DIR [--budget-s 600]
    python -m bench.gpu_check --first [1 2 3]       # the first quarter of an hour on a GPU, or some of its three calls
    python -m bench.gpu_check --dry-run             # every part on a tiny tower on the CPU
    python -m bench.gpu_check --keep DIR/gpu.jsonl  # store the results of another machine; name the files of its runs

Each measurement is written to DIR/gpu.jsonl at once, as a line of JSON; the output ends with a summary. Each part runs
in its own process, which is killed when its share of the time is used up, and needs only the packages that it measures.
Exits non-zero if something failed.
"""

import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from bench.harness.benchmark import Benchmark, Table, command_line, shown
from bench.harness.results import Result, store

# Part → its share of the time; the most important parts come first.
PARTS = {
    "env": 1,
    "driver": 2,
    "attention": 4,
    "products": 3,
    "tests": 5,
    "tower": 8,
    "group": 1,
    "decode": 4,
    "server": 5,
    "load": 3,
    "edge": 3,
    "sanitize": 4,
}
BUDGET_S = 1500.0
# What to run first on a machine that is lent for a quarter of an hour: the parts and the seconds of each call. `edge`
# needs no GPU, and `sanitize` takes minutes.
FIRST = (
    (("env", "driver", "attention", "products", "group", "tests"), 165.0),
    (("tower",), 225.0),
    (("load", "decode", "server"), 200.0),
)
DRY_BUDGET_S = 86_400.0  # a busy machine skips nothing
LATE_S = 60.0  # a part checks its budget between measurements; one that is this late hangs
MAX_SUMMARY = 8000  # characters
# Parts are forked from a process that has imported torch but has not used CUDA. In a dry run that process also imports
# what several parts need, to save time. On a GPU it does not, so that a broken library fails only its parts.
PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["bench.gpu_parts.probe"]
PRELOADED_DRY = [*PRELOADED, "bench.gpu_parts.server", "bench.gpu_parts.tower", "pytest"]

Lines = list[dict[str, Any]]


def _no_cuda() -> str:
    import torch  # not at the top: the process that runs all benchmarks does not need it

    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def _best_product(lines: Lines) -> float:
    """Return the TFLOP/s of the fastest product, an upper bound for a tower."""
    return max((line["tflops"] for line in _rows_of("products", lines) if "tflops" in line), default=math.nan)


def fastest_table(lines: Lines) -> Table:
    """Return the page's table: the fastest tower of each case beside `transformers`."""
    best_tflops = _best_product(lines)
    cases = [line for line in _rows_of("tower", lines) if "case" in line]
    ours: dict[str, dict[str, Any]] = {}
    theirs: dict[str, float] = {}
    for line in (line for line in cases if "ms" in line):
        if line["attention"] == "transformers":
            theirs[line["case"]] = line["ms"]
        elif line["case"] not in ours or line["ms"] < ours[line["case"]]["ms"]:
            ours[line["case"]] = line
    rows = [
        (
            name,
            f"{line['ms']:.2f}",
            f"{line['attention']}{', graphs' if line.get('graphs') else ''}",
            f"{line['tflops'] / best_tflops:.0%}",
            f"{theirs.get(name, math.nan):.2f}",
            f"{theirs.get(name, math.nan) / line['ms']:.2f}",
        )
        for name, line in ours.items()
    ]
    heads = (
        "images",
        "ours, ms",
        "attention",
        "of the best product",
        "`transformers`, ms",
        "ratio",
    )
    return {"title": "The fastest tower of each case", "heads": list(heads), "rows": rows}


BENCHMARK = Benchmark("gpu_check", "How fast is the tower on a GPU?", limit_s=1700, why_not=_no_cuda)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if something failed, 2 if there is no device."""
    parser = command_line(__doc__)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--out", type=Path, help="folder for what is found; by default one that is gone afterwards"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        help=f"seconds for all parts together (default {BUDGET_S:g}, in a dry run a day)",
    )
    parser.add_argument(
        "--first",
        type=int,
        nargs="*",
        choices=range(1, len(FIRST) + 1),
        metavar="CALL",
        help=f"in place of --part and --budget-s: the parts for the first {sum(s for _, s in FIRST):.0f} s on a GPU",
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, in tiny sizes")
    parser.add_argument(
        "--keep",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="put what is in these files, of one machine and day, into bench/results/, and end",
    )
    args = parser.parse_args(arguments)
    if args.keep:
        return _keep(args.keep)
    if not args.dry_run and (why := _no_cuda()):
        print(f"bench.gpu_check: {why}; --dry-run walks every part on the CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        out: Path = args.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        calls = [(args.part, args.budget_s or BUDGET_S)]
        if args.first is not None:
            calls = [FIRST[number - 1] for number in args.first or range(1, len(FIRST) + 1)]
        PROCESSES.set_forkserver_preload(PRELOADED_DRY if args.dry_run else PRELOADED)
        for parts, budget_s in calls:
            left_s = DRY_BUDGET_S if args.dry_run and args.budget_s is None else budget_s
            _run(parts, out, time.monotonic() + left_s, dry=args.dry_run)
        lines = read(out / "gpu.jsonl")
        (out / "summary.txt").write_text(text := summary(lines))
    print(json.dumps(_figures(lines)) if args.json else text, flush=True)
    return int(any(_has_failed(line) for line in lines))


def _run(parts: Sequence[str], out: Path, ends: float, *, dry: bool) -> None:
    """Run the parts one by one, each for its share of the remaining time."""
    for number, part in enumerate(parts):
        share = PARTS[part] / sum(PARTS[each] for each in parts[number:])
        budget_s = max(ends - time.monotonic(), 0) * share
        began = time.monotonic()
        print(f"[{number + 1}/{len(parts)}] {part} ", end="", flush=True)
        how = _run_part(part, out, budget_s, dry)
        print(f"{time.monotonic() - began:.0f} s{how and f', {how}'}", flush=True)
        line = {
            "part": part,
            "seconds": round(time.monotonic() - began, 3),
            **({"failed": how} if how else {}),
        }
        with (out / "gpu.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _run_part(part: str, out: Path, budget_s: float, dry: bool) -> str:
    """Run a part in a process with its own session; return how it failed, or an empty string."""
    process = PROCESSES.Process(target=_part, args=(part, out, budget_s, dry))
    process.start()
    process.join(budget_s + LATE_S)
    late = process.is_alive()
    assert process.pid
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the part and any servers that it has left
    process.kill()  # if it hung before it had its own session
    process.join()
    if late:
        return f"ended {LATE_S:.0f} s after its time"
    return f"exit code {process.exitcode}" if process.exitcode else ""


def _part(part: str, out: Path, budget_s: float, dry: bool) -> None:
    os.setsid()
    import torch

    from bench.gpu_parts.probe import Probe

    if dry:
        torch.set_num_threads(1)  # on a busy machine, two threads wait for each other
    module = importlib.import_module(f"bench.gpu_parts.{part}")
    with tempfile.TemporaryDirectory() as scratch:
        module.run(Probe(part, out, Path(scratch), budget_s=budget_s, dry=dry))


def read(path: Path) -> Lines:
    """Return the lines of a file. The last line of a killed process may be truncated."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            lines.append({"part": "env", "failed": f"half a line: {line[:80]}"})
    return lines


def summary(lines: Lines) -> str:
    """Return a summary of at most `MAX_SUMMARY` characters: failures first, then as much of each part as fits."""
    parts = [part for part in PARTS if any(line["part"] == part for line in lines)]
    text = _failures(lines)[: MAX_SUMMARY // 4]
    for number, part in enumerate(parts):
        room = (MAX_SUMMARY - len(text)) // (len(parts) - number)
        rows = "\n".join([f"\n\n== {part}", *(_in_short(row) for row in _rows_of(part, lines))])
        text += (
            rows if len(rows) <= room else f"{rows[: room - 40].rpartition(chr(10))[0]}\n… more in gpu.jsonl"
        )
    return text


def _failures(lines: Lines) -> str:
    failed = [line for line in lines if _has_failed(line)]
    skipped = sum("skipped" in line for line in lines)
    head = f"{len(lines)} measurements, {len(failed)} failed, {skipped} left out for lack of time."
    return "\n".join([head, *(f"- {line['part']}: {_in_short(line)}" for line in failed)])


def _has_failed(line: Mapping[str, Any]) -> bool:
    return "failed" in line or line.get("passed") is False or line.get("outcome") in ("failed", "error")


def _rows_of(part: str, lines: Lines) -> Lines:
    return [
        line for line in lines if line["part"] == part and not _has_failed(line) and "skipped" not in line
    ]


def _in_short(line: Mapping[str, Any]) -> str:
    return "  ".join(f"{name}={_cell(value)}" for name, value in line.items() if name != "part")


def _cell(value: object) -> str:
    return shown(value) if isinstance(value, float) else str(value).replace("|", "/")


def _figures(lines: Lines) -> dict[str, Any]:
    return {"tables": [fastest_table(lines)], "lines": lines}


def _keep(paths: Sequence[Path]) -> int:
    """Store the results of one machine, from one run or several, in bench/results/ under its name and versions."""
    lines = [line for path in paths for line in read(path)]
    found = [line for line in lines if "hardware" in line]
    if not found or any(line.get("dry") for line in found):
        names = ", ".join(map(str, paths))
        print(
            f"bench.gpu_check: {names}: no figures of a machine; they need part env, and no dry run",
            file=sys.stderr,
        )
        return 2
    if len(machines := {line["hardware"] for line in found}) > 1:
        print(
            f"bench.gpu_check: these are figures of several machines ({'; '.join(sorted(machines))}): keep those of "
            "each by themselves",
            file=sys.stderr,
        )
        return 2
    about = found[0]
    seconds = sum(line.get("seconds", 0.0) for line in lines)
    day = date.fromtimestamp(max(path.stat().st_mtime for path in paths)).isoformat()
    result = Result(
        *("gpu_check", about["hardware"], "ok", "python -m bench.gpu_check", day, seconds),
        figures=_figures(lines),
        versions=about["versions"],
    )
    print(f"wrote {store(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
