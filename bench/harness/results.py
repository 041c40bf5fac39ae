"""Result files, the newest of each benchmark and kind of machine: figures with time, versions and command."""

import json
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results"
OK, NOT_RUN = "ok", "not run"
STOPPED = "stopped"  # before it ended
DIRTY = "-dirty"  # suffix of the commit of a result whose code had uncommitted changes
BUSY = 0.5  # load per core; with more at the start, other work makes the times too long
PACKAGES = ("torch", "transformers", "numpy", "grpcio", "blake3", "pillow", "redis", "nvidia-dali-cuda130")


@dataclass(frozen=True)
class Result:
    """The outcome of one benchmark. `status` is `OK`, `NOT_RUN`, `STOPPED` or how it failed; `error` is the reason."""

    benchmark: str
    hardware: str
    status: str
    command: str
    measured_at: str
    """When it ended, in UTC, as ISO 8601. Results before 2026-11-29 have only the day."""
    seconds: float = 0.0
    load: float = 0.0
    """The load per core when it began. Over `BUSY`, other work made the times longer."""
    figures: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def hardware() -> str:
    """Return a description of this machine: processor, cores, memory, GPU."""
    import torch  # takes seconds; not needed to keep a result

    info = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    processor = re.sub(r"\((R|TM)\)|CPU|@.*", "", name[1] if name else platform.machine())
    words = [" ".join(processor.split()), f"{os.cpu_count()} cores"]
    words.append(_bfloat16(info))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words.append(f"{memory_bytes / 2**30:.0f} GiB")
    words += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join(words)


def _bfloat16(info: str) -> str:
    """Return the bfloat16 instructions of the CPU, on which a tower's time depends most."""
    kinds = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 bf16"}
    return next((kind for name, kind in kinds.items() if name in info.split()), "no bf16")


def versions() -> dict[str, str]:
    """Return the versions that a figure depends on, with our own commit."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {"commit": _commit()}


def _commit() -> str:
    """Return the commit of the code that runs, marked if files differ from it; "unknown" without git."""
    commit = _git("rev-parse", "--short", "HEAD")
    if commit is None:
        return "unknown"
    return commit + (DIRTY if changed_files() else "")


def changed_files() -> list[str]:
    """Return the files with uncommitted changes, except pages and results, which change no figure."""
    changed = _git("status", "--porcelain", "--", ".", ":(exclude)*.md", ":(exclude)bench/results") or ""
    return [line[2:].strip() for line in changed.splitlines()]


def _git(*arguments: str) -> str | None:
    """Return the output of git; None if it fails or is not installed."""
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run([git, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.strip("\n")


def now() -> str:
    """Return the time as results have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def load() -> float:
    """Return the load per core during the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def path_of(result: Result, folder: Path = FOLDER) -> Path:
    """Return the path of the result of a benchmark on a kind of machine."""
    machine = re.sub(r"[^a-z0-9]+", "-", result.hardware.lower()).strip("-")
    return folder / f"{result.benchmark}.{machine}.json"


def store(result: Result, folder: Path = FOLDER) -> Path:
    """Write a result in the place of the older one of its benchmark and kind of machine; return its path."""
    path = path_of(result, folder)
    path.with_suffix(".tmp").write_text(json.dumps(vars(result), indent=1, sort_keys=True) + "\n")
    return path.with_suffix(".tmp").replace(path)  # a run that is killed leaves a whole file


def stored(folder: Path = FOLDER) -> list[Result]:
    """Return all results, the oldest first."""
    found = [Result(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda result: result.measured_at)


def earlier_figures(benchmark: str) -> dict[str, Any]:
    """Return the figures of the stored result of a benchmark on this kind of machine; none if there is no result."""
    machine = hardware()
    found = [each for each in stored() if (each.benchmark, each.hardware) == (benchmark, machine)]
    return found[-1].figures if found else {}


def newest(benchmark: str, folder: Path = FOLDER) -> Result:
    """Return the newest result of a benchmark, of whichever kind of machine. Raises `LookupError` if there is none."""
    found = [result for result in stored(folder) if result.benchmark == benchmark]
    if not found:
        raise LookupError(f"no result of {benchmark}: make bench ONLY={benchmark}")
    return found[-1]
