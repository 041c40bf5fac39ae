"""Measures the tables that the work before this project reported, each as a small section: what happens with 64 images.

- `prompts`: time to first token for 1 to 64 images, encode first and overlapped; a chat of eight rounds.
- `memory`: the most images of 2560×1440 under a limit of memory, and the peak memory for 64 of them.
- `ranks`: rows of 32 images of 1280×720 for four tensor-parallel ranks; hits with the hash on the request's path.
- `tables`: position and rotary tables, cached and computed.

The reference engine is the prefill side, on this machine's CPU. Sections for which no time is left are skipped.
"""

import asyncio
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, step
from bench.harness.budget import TimeBudget
from bench.seeds_parts.memory import IMAGES, LIMIT_GIB, memory
from bench.seeds_parts.prompts import CHAT_ROUNDS, COUNTS, TIMES, prompts
from bench.seeds_parts.ranks import IMAGES as RANK_IMAGES
from bench.seeds_parts.ranks import ranks
from bench.seeds_parts.tables import tables

BENCHMARK = Benchmark(
    "seeds",
    "What happens with many images?",
    (
        *(
            Figure(
                f"ttft_ratio.images_{count}",
                f"time to first token of {count} new images: encode first / overlapped",
                target=">= 1.6" if count == 16 else "",
            )
            for count in (1, 16, 64)
        ),
        Figure("chat_tower_last_over_first", "chat, one new image a round: tower's time, round 8 / 1", target="<= 1.2"),
        Figure("chat_most_encodes_a_round", "the same: most images encoded in a round", target="<= 1"),
        Figure("chat_ttft_ms.round_1", "the same: time to first token, round 1", "ms"),
        Figure("chat_ttft_ms.round_8", "round 8", "ms"),
        Figure("most_images", "most of 64 images of 2560×1440 with 2 GiB more than at start", target=">= 64"),
        Figure("most_images_transformers", "the same: `transformers`, all in one forward"),
        Figure("memory_64_over_1", "peak memory of the server: 64 images of 2560×1440 / one", target="<= 1.1"),
        Figure("ranks_handles_ms", "32 images of 1280×720 for four ranks: handles", "ms", "<= 20"),
        Figure("ranks_rows_over_handles", "the same: rows / handles"),
        Figure("tables_least_computed_over_cached", "position and rotary tables: computed / cached", target=">= 10"),
        Figure("hits_hashed_over_known", "hits/s: hash of the file on the path / off the path", target=">= 0.9"),
        Figure("hits_hashed_over_pixels", "hits/s: hash of the file / of the pixels"),
    ),
    limit_s=595,
    # However slow the machine, all sections run.
    dry_run=(
        *("--counts", "1", "2", "--rounds", "2", "--times", "1", "--images", "2"),
        *("--seconds", "0.2", "--budget-s", "3600"),
    ),
)  # fmt: skip
BUDGET_S = 540.0
# What a section takes on two cores.
SECTION_S = {"tables": 30.0, "prompts": 150.0, "ranks": 120.0, "memory": 200.0}


def main() -> None:
    parser = command_line(__doc__, budget_s=BUDGET_S)
    parser.add_argument("--sections", nargs="+", choices=SECTION_S, default=[*SECTION_S])
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="images of the prompts")
    parser.add_argument("--rounds", type=int, default=CHAT_ROUNDS, help="of a chat")
    parser.add_argument(
        "--times", type=int, default=TIMES, help="that prompts of few images, and chats, are measured"
    )
    parser.add_argument("--images", type=int, default=IMAGES, help="most images in the other sections")
    parser.add_argument("--limit-gib", type=float, default=LIMIT_GIB, help="what a process may grow by")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each kind of hits")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    budget, figures = TimeBudget(args.budget_s), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run: dict[str, Callable[[], dict[str, Any]]] = {
            "tables": partial(tables, folder),
            "prompts": lambda: asyncio.run(prompts(folder, args.counts, args.rounds, args.times)),
            "memory": lambda: asyncio.run(memory(folder, args.images, args.limit_gib)),
            "ranks": lambda: asyncio.run(ranks(folder, min(RANK_IMAGES, args.images), args.seconds)),
        }
        for section in args.sections:
            if budget.affords(section, SECTION_S[section]):
                with step(section):
                    figures |= run[section]()
    print_figures({**figures, "left_out": budget.left_out}, args)


if __name__ == "__main__":
    main()
