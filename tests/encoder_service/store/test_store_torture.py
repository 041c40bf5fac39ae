"""The store under many threads and killed processes: no wrong byte is read, and no pin or file leaks."""

import random
import subprocess
import sys
import time
from multiprocessing.connection import Client

import pytest

from encoder_service.store import Store
from tests.waiting import PATIENCE_S, START_S

READERS = 3
TORTURE_S = 5.0


def start(role, folder):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.store_processes", role, str(folder)], stdout=subprocess.PIPE, text=True
    )


def within(seconds, holds):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.01)


def end(process):
    """Kill a reader once it has counted, however slowly this machine starts it, and return the last counts it printed.

    Fails if it had failed by itself.
    """
    first = process.stdout.readline()
    assert process.poll() is None, "it ended by itself, see what it said"
    assert first
    process.kill()
    lines = [first, *process.stdout.read().splitlines()]
    process.wait()
    return [int(count) for count in [line for line in lines if line.count(" ") == 2][-1].split()]


@pytest.fixture
def owner(tmp_path):
    process = start("owner", tmp_path)
    yield process
    process.kill()
    process.wait()


def test_readers_see_only_correct_bytes_and_killed_readers_leave_no_pin(owner, tmp_path):
    within(START_S, (tmp_path / "socket").exists)
    readers = [start("reader", tmp_path) for _ in range(READERS)]
    on_device = start("device", tmp_path)
    counts, killed = [0, 0, 0], 0
    deadline = time.monotonic() + TORTURE_S
    try:
        while killed < 4 or time.monotonic() < deadline or min(counts) < 10:
            time.sleep(TORTURE_S / 6)
            victim = random.randrange(READERS)
            counts = [sum(pair) for pair in zip(counts, end(readers[victim]), strict=True)]
            killed += 1
            readers[victim] = start("reader", tmp_path)
        assert owner.poll() is None, "the owner ended by itself, see what it said"
        for reader in readers:
            counts = [sum(pair) for pair in zip(counts, end(reader), strict=True)]
        held_on_device, *_ = end(on_device)
    finally:
        for reader in (*readers, on_device):
            reader.kill()
            reader.wait()
    held, outlived, stale = counts
    assert killed >= 4
    assert held >= 100
    assert held_on_device >= 20
    assert outlived >= 10
    assert stale >= 10  # so the generations were put to the test
    with Client(str(tmp_path / "socket")) as probe:

        def pins():
            probe.send(None)
            return probe.recv()

        within(PATIENCE_S, lambda: pins() <= 2)  # the two churning threads may hold one each


def test_a_start_removes_segments_of_killed_owners_only(owner, tmp_path):
    within(START_S, (tmp_path / "socket").exists)
    living = Store(host_bytes=1 << 20, row_bytes=64, segment_dir=str(tmp_path))
    assert len(list(tmp_path.glob("*.rows"))) == 2
    owner.kill()
    owner.wait()
    assert len(list(tmp_path.glob("*.rows"))) == 2
    next_one = Store(host_bytes=1 << 20, row_bytes=64, segment_dir=str(tmp_path))
    assert set(tmp_path.glob("*.rows")) == {living.segment.path, next_one.segment.path}
    for store in (living, next_one):
        store.close()
