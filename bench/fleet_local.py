"""A fleet on this machine: a Redis and any number of replicas on free loopback ports, until Ctrl-C."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import transformers

from bench.checkpoints import write_checkpoint
from bench.demo import DRAIN_S, FOLDER, endpoints_of
from tests.redis_servers import redis_server

THREADS = os.cpu_count() or 2


def run(replicas: int, model: Path | None, folder: Path) -> int:
    """Run until a signal asks to stop; return 0 when every replica drained and left with 0."""
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = model or write_checkpoint(folder / "checkpoint")
    codes: list[int] = []
    with redis_server() as redis, ExitStack() as stack:
        print(f"redis      {redis.url}", flush=True)
        processes = [
            stack.enter_context(
                _replica(checkpoint, redis.url, folder / f"replica-{n + 1}.log", replicas, codes)
            )
            for n in range(replicas)
        ]
        endpoints, pages = [], []
        for number, (process, log) in enumerate(processes, 1):
            endpoint, page = endpoints_of(process, log)
            endpoints.append(endpoint)
            pages.append(page)
            print(f"replica {number}  {endpoint}  {page}  pid {process.pid}, log {log}", flush=True)
        print(f"\nconnect:   EncoderClient.connect({endpoints})")
        print(f"watch:     encoder-service top {' '.join(pages)}")
        print("stop:      Ctrl-C", flush=True)
        _wait([process for process, _ in processes])
        print("\nstopping: each replica leaves the index, finishes what runs, and exits", flush=True)
    return 0 if codes == [0] * replicas else 1


@contextmanager
def _replica(
    model: Path, index: str, log: Path, replicas: int, codes: list[int]
) -> "Iterator[tuple[subprocess.Popen[bytes], Path]]":
    """Run one replica; on leaving, it drains, and its exit code is added to `codes`."""
    command: list[str | Path] = [Path(sys.executable).with_name("encoder-service"), "serve", "--model", model]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--index", index]
    command += ["--store-host-gib", "0.5", "--torch-threads", str(max(1, THREADS // replicas))]
    with log.open("w") as stream:
        # A group of its own: Ctrl-C is for us, who stop the replicas before their Redis.
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process, log
    finally:
        process.terminate()
        try:
            code = process.wait(timeout=DRAIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        print(f"{log.stem}: exit {code}", flush=True)
        codes.append(code)


def _wait(processes: "list[subprocess.Popen[bytes]]") -> None:
    """Wait for Ctrl-C; say when a replica dies, which is what a fleet is for."""
    with suppress(KeyboardInterrupt):
        while alive := [process for process in processes if process.poll() is None]:
            time.sleep(0.2)
            for process in alive:
                if process.poll() is not None:
                    print(f"the replica with pid {process.pid} is gone: {process.returncode}", flush=True)


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="make fleet", description=__doc__)
    parser.add_argument("--replicas", type=int, default=3, help="how many (%(default)s)")
    parser.add_argument("--model", type=Path, help="checkpoint folder; a small random one is written without")
    args = parser.parse_args()
    if args.replicas < 1:
        parser.error("--replicas must be positive")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    with suppress(KeyboardInterrupt):  # one that comes before all are up
        return run(args.replicas, args.model, FOLDER / "fleet")
    return 0


if __name__ == "__main__":
    sys.exit(main())
