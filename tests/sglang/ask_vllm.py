"""Asks a vLLM in this process, which takes its images from the service, about image files; prints its answer's tokens.

Run by vLLM's own environment: `python -m tests.sglang.ask_vllm MODEL ENDPOINT FILE...`
"""

import json
import sys
from pathlib import Path

from testing.vllm_engine import VllmEngine


def main() -> None:
    model, endpoint, *files = sys.argv[1:]
    engine = VllmEngine(Path(model), endpoint)
    try:
        answer = engine.ask([*(Path(file).read_bytes() for file in files), "What is this?"])
    finally:
        engine.close()
    sys.stdout.write(json.dumps(answer.tokens) + "\n")


if __name__ == "__main__":
    main()
