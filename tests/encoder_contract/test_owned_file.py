"""Files of rows belong to a process: what a killed one leaves is removed by the next, what a living one has is not."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from encoder_contract.owned_file import create_owned, remove_ownerless
from encoder_contract.segment_file import CALLERS_PREFIX
from encoder_service.store import Store
from prefill_client.transport.put_stream import OutgoingSegment

CALLER = (
    "import sys, time; from prefill_client.transport.put_stream import OutgoingSegment; "
    "kept = OutgoingSegment.beside(sys.argv[1]); print(kept.path, flush=True); time.sleep(600)"
)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The file of a caller that was killed before the server had opened it."""
    command = [sys.executable, "-c", CALLER, str(tmp_path / "segment")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        left = Path(caller.stdout.readline().strip())
        living = OutgoingSegment.beside(str(tmp_path / "segment"))
        assert living is not None
        assert left.exists(), "its owner runs"
        living.unlink()
        living.close()
        caller.kill()
    assert left.exists()
    assert left.stat().st_size == 0
    return left


def test_the_next_caller_removes_what_a_killed_one_left(killed: Path) -> None:
    segment = OutgoingSegment.beside(str(killed.parent / "segment"))
    assert segment is not None
    assert list(killed.parent.iterdir()) == [Path(segment.path)]
    segment.close()


def test_the_next_server_removes_what_a_killed_caller_left(killed: Path) -> None:
    living = OutgoingSegment.beside(str(killed.parent / "other" / "segment"))
    assert living is None, "there is no such folder"
    path, file = create_owned(killed.parent, CALLERS_PREFIX)
    store = Store(host_bytes=1 << 20, width=16, dtype=torch.float32, segment_dir=str(killed.parent))
    assert set(killed.parent.iterdir()) == {path, store.segment.path}
    store.close()
    os.close(file)


def test_a_sweep_removes_neither_links_nor_other_files(tmp_path: Path) -> None:
    other = tmp_path / "somebody-elses.rows"
    other.touch()
    link = tmp_path / f"{CALLERS_PREFIX}link.rows"
    link.symlink_to(other)
    assert remove_ownerless(tmp_path, CALLERS_PREFIX) == []
    assert link.is_symlink()
    assert other.exists()


def test_however_many_sweep_what_was_created_is_there(tmp_path: Path) -> None:
    ended = threading.Event()

    def sweep() -> None:
        while not ended.is_set():
            remove_ownerless(tmp_path, CALLERS_PREFIX)

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for each in sweepers:
        each.start()
    try:
        for _ in range(300):
            path, file = create_owned(tmp_path, CALLERS_PREFIX)
            assert os.path.samestat(os.fstat(file), path.stat())
            path.unlink()
            os.close(file)
    finally:
        ended.set()
        for each in sweepers:
            each.join()
