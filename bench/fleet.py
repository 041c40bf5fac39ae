"""What a fleet costs and what it saves; so far, its index. Prints tables, and a JSON object as the last line."""

import argparse
import json

from bench import index


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index-only", action="store_true", help="leave out what needs replicas")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=300, help="batches of 32 addresses timed")
    parser.add_argument("--entries", type=int, default=100_000, help="entries whose memory is measured")
    arguments = parser.parse_args()
    figures = index.report(arguments.rounds, arguments.entries)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
