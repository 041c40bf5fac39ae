"""Updates the weights of a real vLLM and a real SGLang while 16 chats with images run, and compares every answer.

First the tower is frozen: updates write another language model and equal vision tensors, and no request may fail. Then
it is trained: `encoder-service reload` gives the service the other tower, before or after the engine gets it. Each
answer must be one of engines with their own tower, started on a version that the engine had at some time of the
request. The versions of the second part have one language model, so an answer made of stale rows is the other
version's. Several images in a row are one file, as in a group of GRPO, and no later request has that file.

vLLM is paused for each update, until its requests have ended, as trainers do it; SGLang waits by itself. In the second
part vLLM keeps its prefix cache. A run counts as many answers as fit into its time.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.harness.budget import TimeBudget
from bench.updates_parts.chats import CHATS, Chats, Outcomes, Prompts, check_that_versions_differ
from bench.updates_parts.engines import UpdatedEngine, started
from bench.updates_parts.versions import (
    FROZEN,
    START,
    TRAINED,
    Timeline,
    comparison_ms_per_gb,
    write_versions,
)
from testing.engine_environments import SGLANG_PYTHON, VLLM_PYTHON

PYTHONS = {"vllm": VLLM_PYTHON, "sglang": SGLANG_PYTHON}
BUDGET_S = 540.0
END_S = 15.0
"""What the last update and the end of an engine take."""
PATIENCE_S = 120.0
LOOK_S = 0.1
BETWEEN = 8 * CHATS

BENCHMARK = Benchmark(
    "updates",
    "Does an answer ever come from stale rows?",
    (
        Figure("answers", "answers that were compared, both engines", target=">= 10000"),
        Figure("stale", "of these, of a version that the engine no longer had, or not yet", target="<= 0"),
        Figure("mixed", "of these, of no version: farther from each than 0.00001", target="<= 0"),
        Figure("farthest", "farthest answer from its version / from the next version", target="<= 0.01"),
        Figure("failed_frozen", "requests that failed while a frozen tower was updated", target="<= 0"),
        Figure("own_tower_frozen", "images that SGLang's own tower encoded meanwhile", target="<= 0"),
        Figure("failed_trained", "requests that failed while tower and service were updated", target="<= 0"),
        Figure("refused", "503 with `Retry-After` meanwhile, by vLLM"),
        Figure("updates_frozen", "updates with a frozen tower"),
        Figure("updates_trained", "updates with a trained tower"),
        Figure("vllm.new_rows_s", "vLLM and service updated: first rows of the new tower after, worst", "s", "<= 5"),
        Figure("sglang.new_rows_s", "SGLang, the same", "s", "<= 5"),
        Figure("vllm.reload_s", "`encoder-service reload` beside vLLM, median", "s"),
        Figure("sglang.reload_s", "beside SGLang", "s"),
        Figure("vllm.update_s", "an update of vLLM with a frozen tower, median", "s"),
        Figure("sglang.update_s", "of SGLang", "s"),
        Figure("compare_ms_per_gb", "comparing the vision tensors of an update, a GB", "ms", "<= 50"),
    ),
    limit_s=595,
    dry_run=("--engine", "vllm", "--answers", "64", "--budget-s", "60"),
    why_not=lambda: "" if any(map(Path.exists, PYTHONS.values())) else "no .venv-vllm: make test-vllm",
)  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, budget_s=BUDGET_S)
    parser.add_argument("--engine", choices=PYTHONS, help="only this one")
    parser.add_argument("--answers", type=int, default=10_000, help="of all engines (default: %(default)s)")
    args = parser.parse_args()
    # Engines run in their own process groups, so they must be stopped before this process ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # vLLM has /pause and /collective_rpc only with it
    kinds = [args.engine] if args.engine else [kind for kind, python in PYTHONS.items() if python.exists()]
    budget = TimeBudget(args.budget_s)
    with tempfile.TemporaryDirectory() as folder:
        compared = {"compare_ms_per_gb": comparison_ms_per_gb(Path(folder) / "compared")}
        versions = write_versions(Path(folder))
        runs = []
        for number, kind in enumerate(kinds):
            seconds = budget.left_s / (len(kinds) - number)
            runs.append(measure(kind, versions, Path(folder), args.answers // len(kinds), seconds))
    print_figures({**figures_of(runs, args.answers), **compared}, args)


@dataclass
class Phase:
    """The outcomes of one kind of updates, and what these took."""

    outcomes: Outcomes
    update_s: list[float] = field(default_factory=list)
    reload_s: list[float] = field(default_factory=list)
    new_rows_s: list[float] = field(default_factory=list)


@dataclass
class EngineRun:
    """What was measured with one engine."""

    kind: str
    frozen: Phase
    trained: Phase
    own_tower_frozen: float

    def times(self) -> dict[str, float]:
        """Return its figures."""
        return {
            "update_s": round(median(self.frozen.update_s), 2),
            "reload_s": round(median(self.trained.reload_s), 2),
            "new_rows_s": round(max(self.trained.new_rows_s), 2),
            "answers": self.frozen.outcomes.answers + self.trained.outcomes.answers,
        }


def measure(kind: str, versions: Mapping[str, Path], folder: Path, answers: int, seconds: float) -> EngineRun:
    """Update an engine in both ways, for half of the time that is left after its start each."""
    budget, prompts = TimeBudget(seconds), Prompts()
    print(f"{kind}: {seconds:.0f} s for {answers} answers", file=sys.stderr, flush=True)
    with started(kind, versions, prompts, folder) as (engine, references):
        check_that_versions_differ(references)
        timeline = Timeline(START)
        chats = Chats(engine.url, prompts, references, timeline)
        updater = Updater(engine, versions, timeline, chats, between=min(BETWEEN, answers // 4))
        own_before = engine.images("own_tower_")
        frozen = updater.run(FROZEN, answers // 2, (budget.left_s - END_S) / 2)
        own = engine.images("own_tower_") - own_before
        trained = updater.run(TRAINED, answers - frozen.outcomes.answers, budget.left_s - END_S)
    return EngineRun(kind, frozen, trained, own)


@dataclass
class Updater:
    """Updates an engine, and the service beside it, while chats run."""

    engine: UpdatedEngine
    versions: Mapping[str, Path]
    timeline: Timeline
    chats: Chats
    between: int
    """The answers of a version before the next update."""

    def run(self, version: str, answers: int, seconds: float) -> Phase:
        """Update to a version and back, until there are so many answers, or the time is over.

        Raises `RuntimeError` if chats get no answer of a version within `PATIENCE_S` after its update.
        """
        until = time.monotonic() + seconds
        with self.chats.running(retry=version == TRAINED) as outcomes:
            phase = Phase(outcomes)
            self._wait_for_answers(phase, START)
            while not phase.update_s or (outcomes.answers < answers and time.monotonic() < until):
                for each in (version, START):
                    self._update(phase, each, serves_first=each == TRAINED, trained=version == TRAINED)
                    self._wait_for_answers(phase, each)
                    print(f"  {each}: {phase.outcomes.summary()}", file=sys.stderr, flush=True)
        return phase

    def _update(self, phase: Phase, version: str, *, serves_first: bool, trained: bool) -> None:
        """Update the engine; with a trained tower, also the service, before or after it."""
        if trained and serves_first:
            self._reload(phase, version)
        began_s = time.monotonic()
        with self.timeline.update(version):
            self.engine.load(self.versions[version], empties_caches=not trained)
        phase.update_s.append(time.monotonic() - began_s)
        if trained and not serves_first:
            self._reload(phase, version)
        if trained:
            began_s, before = time.monotonic(), self.engine.images()
            self._wait(phase, lambda: self.engine.images() > before, f"rows of {version}")
            phase.new_rows_s.append(time.monotonic() - began_s)

    def _reload(self, phase: Phase, version: str) -> None:
        began_s = time.monotonic()
        self.engine.reload_service(self.versions[version])
        phase.reload_s.append(time.monotonic() - began_s)

    def _wait_for_answers(self, phase: Phase, version: str) -> None:
        """Let chats run with a version."""
        wanted = phase.outcomes.right[version] + self.between
        self._wait(phase, lambda: phase.outcomes.right[version] >= wanted, f"answers of {version}")

    def _wait(self, phase: Phase, has_come: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not has_come():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} in {PATIENCE_S:.0f} s: {phase.outcomes.summary()}")
            time.sleep(LOOK_S)


def figures_of(runs: Sequence[EngineRun], wanted: int) -> dict[str, Any]:
    """Return the figures of all engines."""
    frozen, trained = [run.frozen for run in runs], [run.trained for run in runs]
    outcomes = [phase.outcomes for phase in (*frozen, *trained)]
    answers = sum(each.answers for each in outcomes)
    return {
        "answers": answers,
        "stale": sum(len(each.stale) for each in outcomes),
        "mixed": sum(len(each.mixed) for each in outcomes),
        "farthest": max(each.farthest for each in outcomes),
        "failed_frozen": sum(len(phase.outcomes.failed) for phase in frozen),
        "own_tower_frozen": sum(run.own_tower_frozen for run in runs),
        "failed_trained": sum(len(phase.outcomes.failed) for phase in trained),
        "refused": sum(phase.outcomes.refused for phase in trained),
        "updates_frozen": sum(len(phase.update_s) for phase in frozen),
        "updates_trained": sum(len(phase.update_s) for phase in trained),
        **{run.kind: run.times() for run in runs},
        "left_out": [f"{wanted - answers:,} of {wanted:,} answers"] if answers < wanted else [],
    }


if __name__ == "__main__":
    main()
