"""A Redis of the service's environment, which this one lacks: `python -m tests.vllm.redis_process` runs one."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.vllm.service import ROOT, SERVICE


@contextmanager
def redis_url() -> Iterator[str]:
    """Run one for the length of a `with` block; give its URL."""
    command = [SERVICE.with_name("python"), "-m", "tests.vllm.redis_process"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def main() -> None:
    """Say where it is, and end it with standard input."""
    from testing.redis_servers import redis_server

    with redis_server() as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
