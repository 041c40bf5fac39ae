"""Attackers: processes that take what they can of a server, each in one way, until they are stopped.

`python -m testing.attackers NAME HOST:PORT HTTP_HOST:PORT` makes its bytes, prints "ready", attacks from the first line
of its input on, and goes on until it is killed. It is nice: it yields the processor to server and victim, so that what
a victim feels is what the server lets happen, not what another busy process on the machine costs.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from testing.attacks import CALLERS, Target

NICE = 10


@contextmanager
def attacking(name: str, target: Target) -> Iterator[Callable[[], None]]:
    """Run an attacker's process, prepared; give a function that lets it loose. It is killed at the end."""
    command = [sys.executable, "-m", "testing.attackers", name, target.grpc, target.http]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said == "ready\n", f"the attacker {name} ended before it began"

        def go() -> None:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

        try:
            yield go
            assert process.poll() is None, f"the attacker {name} gave up"
        finally:
            process.kill()


async def _ready() -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attack", choices=list(CALLERS))
    parser.add_argument("grpc", help="host:port of the server")
    parser.add_argument("http", help="host:port of its metrics")
    given = parser.parse_args()
    os.nice(NICE)
    asyncio.run(CALLERS[given.attack](Target(given.grpc, given.http), _ready))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
