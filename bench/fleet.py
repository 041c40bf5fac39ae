"""What a fleet costs and what it saves: its index, three real replicas, and more of them in simulation and on paper."""

import argparse
import json

from bench import fleet_processes, fleet_scale, index


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
    figures |= fleet_scale.throughput(figures["index_ms_32"] / 1000)
    figures |= fleet_scale.on_paper(figures)
    if not arguments.index_only:
        figures |= fleet_processes.report(arguments.prompts)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
