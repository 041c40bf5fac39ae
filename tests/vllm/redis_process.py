"""Runs a Redis from the service's environment, since vLLM's has none: `python -m tests.vllm.redis_process`."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.vllm.service import ROOT, SERVICE


@contextmanager
def redis_url() -> Iterator[str]:
    """Run a Redis for the duration of a `with` block; yield its URL."""
    command = [SERVICE.with_name("python"), "-m", "tests.vllm.redis_process"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def main() -> None:
    """Print its URL, and end it when standard input closes."""
    from testing.redis_servers import redis_server

    with redis_server() as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
