"""An engine process whose tower never returns: python -m tests.vllm.stuck_engine MODEL ENDPOINT SEED."""

import sys
import time
from pathlib import Path
from typing import Any

from testing.vllm_sharing import SharingEngine
from tests.vllm.test_answers import prompt


def main(model: str, endpoint: str, seed: str) -> None:
    """Run a prompt, print a line when the tower is called, and hang there."""
    engine = SharingEngine(Path(model), endpoint)

    def stuck(**_: Any) -> None:
        print("encoding", flush=True)
        time.sleep(3600)

    engine.model.embed_multimodal = stuck
    engine.ask(prompt(int(seed), 1), own=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
