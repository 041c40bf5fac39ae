"""What a fleet costs and what it saves: its index, and three real replicas under faults."""

import argparse
import json

from bench.cluster import index, processes
from bench.harness.benchmark import Benchmark

BENCHMARK = Benchmark(
    "fleet",
    "How does it scale over replicas, and what do faults cost?",
    (*processes.FIGURES, *index.FIGURES),
    limit_s=240,
    quick=("--index-only", "--rounds", "20", "--entries", "2000"),
)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index-only", action="store_true", help="leave out what needs replicas")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=300, help="batches of 32 addresses timed")
    parser.add_argument("--entries", type=int, default=100_000, help="entries whose memory is measured")
    parser.add_argument(
        "--prompts", type=int, default=6, help="prompts of 32 images of each of three clients"
    )
    arguments = parser.parse_args()
    figures = index.report(arguments.rounds, arguments.entries)
    if not arguments.index_only:
        figures |= processes.report(arguments.prompts)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
