"""Runs seeded cases of every target and counts failures.

Parsers run in this process. Calls go to a real server with a tiny model, sixteen at a time. Each failure is printed
with the command that repeats it. At the end the server must answer, be idle, and have no more open files than before.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import Any

import grpc
import psutil
import transformers

from testing.checkpoints import write_checkpoint
from testing.fuzz import calls, parsers
from testing.server_process import ServerProcess, running

TARGETS = (*parsers.PARSERS, *calls.CASES)
# The targets' shares of all cases. A call costs as much as a hundred parses.
SHARES = {
    "header": 0.26,
    "frames": 0.2,
    "requests": 0.2,
    "urls": 0.1,
    "submit": 0.06,
    "fetch": 0.06,
    "images": 0.06,
    "videos": 0.02,
    "crowds": 0.02,
    "rows": 0.02,
}
AT_A_TIME = 16
IDLE_S = 60.0
# An idle server may have these more: connections of the probe, the last thread of a pool.
SPARE_FILES = 4
# Small enough that cases reach every bound. Images are resized to 16 patches, so that the tower costs little.
SETTINGS: dict[str, Any] = {
    "store_host_gib": 0.02,
    "source_gib": 0.01,
    "max_queued_images": 64,
    "rows_listen": "127.0.0.1:0",
}
PREPROCESSOR = {"size": {"shortest_edge": 1024, "longest_edge": 4096}}


@dataclass
class Verdict:
    """The cases that ran, and their failures."""

    cases: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    crashes: int = 0
    hangs: int = 0
    leaked: dict[str, int] = field(default_factory=dict)

    def failed(self, name: str, seed: int, error: BaseException) -> None:
        """Add a failure with the command that repeats it."""
        if isinstance(error, TimeoutError):
            self.hangs += 1
        else:
            self.crashes += 1
        again = f"python -m testing.fuzz --targets {name} --seed {seed} --cases 1"
        self.failures.append(f"{type(error).__name__}: {str(error)[:300]}\n    {again}")

    @property
    def is_good(self) -> bool:
        """Whether nothing failed or leaked."""
        return not self.failures and not any(self.leaked.values())

    def figures(self) -> dict[str, object]:
        """Return the counts, for a line of JSON."""
        return {
            "cases": self.cases.total(),
            **{f"cases_{name}": count for name, count in self.cases.items()},
            "crashes": self.crashes,
            "hangs": self.hangs,
            **{f"leaked_{what}": count for what, count in self.leaked.items()},
        }


def fuzz_parsers(names: list[str], cases: dict[str, int], seed: int, verdict: Verdict) -> None:
    """Run the cases of parsers."""
    for name in names:
        for number in range(seed, seed + cases[name]):
            try:
                parsers.run(name, number)
            except Exception as error:  # noqa: BLE001 - any error is a finding
                verdict.failed(name, number, error)
            verdict.cases[name] += 1
            if verdict.cases[name] % 1000 == 0:
                _progress(verdict)


async def fuzz_calls(names: list[str], cases: dict[str, int], seed: int, verdict: Verdict) -> None:
    """Run the cases of calls on a server, and check what it still holds."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(folder, preprocessor=PREPROCESSOR)
        with running(model, **SETTINGS) as server:
            async with grpc.aio.insecure_channel(server.endpoint) as channel:
                # Fill pools and start the processes for videos.
                warm = [name for name in names if name in (names[0], "videos")]
                await _calls(warm, dict.fromkeys(names, AT_A_TIME), seed, channel, Verdict())
                before = await _idle_files(server)
                await _calls(names, cases, seed, channel, verdict)
            after = await _idle_files(server, before + SPARE_FILES)
            now = server.metrics()
            verdict.leaked = {
                "pins": int(now.total("store_pins")),
                "uploads": int(now.total("upload_bytes")),
                "calls": int(now.total("calls_in_progress")),
                "fds": max(0, after - before - SPARE_FILES),
            }
            if server.process.poll() is not None:
                verdict.failed(names[-1], seed, RuntimeError(f"the server ended: {server.lines[-1]}"))


async def _calls(
    names: list[str], cases: dict[str, int], seed: int, channel: grpc.aio.Channel, verdict: Verdict
) -> None:
    work = [(name, number) for name in names for number in range(seed, seed + cases[name])]
    work.reverse()

    async def worker() -> None:
        while work:
            name, number = work.pop()
            try:
                await calls.run(name, channel, number)
            except Exception as error:  # noqa: BLE001 - any error is a finding
                verdict.failed(name, number, error)
            verdict.cases[name] += 1
            if verdict.cases[name] % 100 == 0:
                _progress(verdict)

    await asyncio.gather(*(worker() for _ in range(AT_A_TIME)))


async def _idle_files(server: ServerProcess, most: float = inf) -> int:
    """Wait until a server is idle, and return how many files it has open, without the videos that it keeps.

    If there are more than `most`, wait for less: it may not have noticed yet that its callers have hung up.
    """
    deadline = time.monotonic() + IDLE_S
    while True:
        now = server.metrics()
        busy = (
            now.total(name) for name in ("calls_in_progress", "store_pins", "upload_bytes", "queue_images")
        )
        files = int(psutil.Process(server.process.pid).num_fds() - now.total("videos"))
        if time.monotonic() > deadline or (not any(busy) and files <= most):
            return files
        await asyncio.sleep(0.2)


def _progress(verdict: Verdict) -> None:
    if sys.stderr.isatty():
        counts = ", ".join(f"{name} {count}" for name, count in verdict.cases.items())
        print(f"\r{counts}: {len(verdict.failures)} found", end="", file=sys.stderr, flush=True)


def fuzz(targets: list[str], cases: int, seed: int) -> Verdict:
    """Run `cases` cases in total, divided among the targets, with seeds from `seed` on."""
    verdict = Verdict()
    total = sum(SHARES[name] for name in targets)
    shares = {name: max(1, round(cases * SHARES[name] / total)) for name in targets}
    fuzz_parsers([name for name in targets if name in parsers.PARSERS], shares, seed, verdict)
    if live := [name for name in targets if name in calls.CASES]:
        asyncio.run(fuzz_calls(live, shares, seed, verdict))
    return verdict


def main() -> int:
    """Run the command line: print failures, then one JSON object; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m testing.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=50_000, help="in all (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each target")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    began = time.monotonic()
    verdict = fuzz(args.targets, args.cases, args.seed)
    for failure in verdict.failures[:20]:
        print(failure)
    print(json.dumps(verdict.figures() | {"seed": args.seed, "seconds": round(time.monotonic() - began, 1)}))
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
