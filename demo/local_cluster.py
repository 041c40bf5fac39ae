"""Runs a fleet on this machine until Ctrl-C: a Redis and any number of replicas, on free loopback ports."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import transformers

from demo.command_line import FOLDER
from testing.checkpoints import write_checkpoint
from testing.processes import StartError
from testing.redis_servers import redis_server
from testing.server_process import ServerProcess


def run(replicas: int, model: Path | None, folder: Path) -> int:
    """Run until a signal arrives; return 0 if every replica drained and exited with 0."""
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = model or write_checkpoint(folder / "checkpoint")
    codes: list[int] = []
    with redis_server() as redis, ExitStack() as stack:
        print(f"redis      {redis.url}", flush=True)
        settings = {"index": redis.url, "threads": max(1, (os.cpu_count() or 2) // replicas)}
        logs = [folder / f"replica-{number}.log" for number in range(1, replicas + 1)]
        servers = [stack.enter_context(_replica(checkpoint, log, codes, **settings)) for log in logs]
        for number, server in enumerate(servers, 1):
            server.wait_until_it_listens()
            where = f"{server.endpoint}  {server.metrics_url}  pid {server.process.pid}, log {server.log}"
            print(f"replica {number}  {where}", flush=True)
        print(f"\nconnect:   EncoderClient.connect({[server.endpoint for server in servers]})")
        print(f"watch:     encoder-service top {' '.join(server.metrics_url for server in servers)}")
        print("stop:      Ctrl-C", flush=True)
        _wait([server.process for server in servers])
        print("\nstopping: each replica leaves the index, finishes what runs, and exits", flush=True)
    return 0 if codes == [0] * replicas else 1


@contextmanager
def _replica(model: Path, log: Path, codes: list[int], **settings: Any) -> Iterator[ServerProcess]:
    """Run a replica. At the end of the block it drains, and its exit code is added to `codes`."""
    # In its own process group it does not get Ctrl-C: this process must stop the replicas before their Redis.
    server = ServerProcess(model, log=log, own_group=True, store_host_gib=0.5, **settings)
    try:
        yield server
    finally:
        code = server.terminate()
        print(f"{log.stem}: exit {code}", flush=True)
        codes.append(code)


def _wait(processes: "list[subprocess.Popen[bytes]]") -> None:
    """Wait for Ctrl-C; print a line when a replica ends. Users of the demo may kill replicas."""
    with suppress(KeyboardInterrupt):
        while alive := [process for process in processes if process.poll() is None]:
            time.sleep(0.2)
            for process in alive:
                if process.poll() is not None:
                    print(f"the replica with pid {process.pid} is gone: {process.returncode}", flush=True)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="make fleet", description=__doc__)
    parser.add_argument("--replicas", type=int, default=3, help="how many (%(default)s)")
    parser.add_argument("--model", type=Path, help="checkpoint folder; a small random one is written without")
    args = parser.parse_args()
    if args.replicas < 1:
        parser.error("--replicas must be positive")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    with suppress(KeyboardInterrupt):  # before all replicas have started
        try:
            return run(args.replicas, args.model, FOLDER / "fleet")
        except StartError as error:
            raise SystemExit(f"fleet: {error}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
