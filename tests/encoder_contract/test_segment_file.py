"""Segment files: clients open only segments of their user, and files of killed processes are removed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from encoder_contract.errors import InternalError
from encoder_contract.segment_file import create_owned, open_segment, remove_ownerless, segment_proof
from encoder_service.store import Store
from tests.waiting import START_S

PREFIX = "encoder-service-"


@pytest.fixture
def store(tmp_path):
    store = Store(host_bytes=1 << 20, row_bytes=64, segment_dir=str(tmp_path))
    yield store
    store.close()


@pytest.fixture
def files(tmp_path, store):
    """Files that a server might name, by their fault."""
    segment = store.segment.path
    named = {what: tmp_path / what for what in ("fifo", "link", "other", "folder", "gone")}
    os.mkfifo(named["fifo"])
    named["link"].symlink_to(segment)
    named["other"].write_bytes(b"-----BEGIN PRIVATE KEY-----")
    named["folder"].mkdir()
    return {what: str(path) for what, path in named.items()}


@pytest.mark.parametrize("what", ["fifo", "link", "other", "folder", "gone"])
def test_only_segments_are_opened_without_blocking(files, what):
    assert segment_proof("127.0.0.1:1", files[what]) == b""
    for writes in (False, True):
        with pytest.raises((OSError, InternalError)):
            open_segment(files[what], writes=writes)


def test_a_segment_of_another_user_is_refused(store, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InternalError, match="not a segment of this user"):
        open_segment(str(store.segment.path))


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("127.0.0.1:50051", True),
        ("127.8.0.1:50051", True),
        ("[::1]:50051", True),
        ("localhost:50051", True),
        ("unix:/run/encoder.sock", True),
        ("10.0.0.7:50051", False),
        ("[fe80::1]:50051", False),
        ("encoder:50051", False),
        ("localhost.example.com:50051", False),
        ("dns:///localhost:50051", False),
        ("127.0.0.1.example.com:50051", False),
    ],
)
def test_only_a_server_on_this_host_gets_bytes_of_a_file(store, endpoint, told):
    assert segment_proof(endpoint, str(store.segment.path)) == (store.segment.segment_id if told else b"")


def test_a_start_removes_dead_segments_and_no_links_folders_or_other_files(tmp_path):
    dead, fifo, folder, link = (tmp_path / f"{PREFIX}1-{name}.rows" for name in ("aa", "bb", "cc", "dd"))
    dead.write_bytes(b"left behind")
    os.mkfifo(fifo)
    folder.mkdir()
    other = tmp_path / "somebody-elses.rows"
    other.touch()
    link.symlink_to(other)
    script = (
        "import sys, torch; from encoder_service.store import Store; "
        "Store(host_bytes=1 << 20, row_bytes=64, segment_dir=sys.argv[1]).close()"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=START_S)
    assert {*tmp_path.iterdir()} == {fifo, folder, other, link}


def test_concurrent_sweeps_keep_a_file_that_is_being_created(tmp_path: Path) -> None:
    ended = threading.Event()

    def sweep() -> None:
        while not ended.is_set():
            remove_ownerless(tmp_path, PREFIX)

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for each in sweepers:
        each.start()
    try:
        for _ in range(300):
            path, file = create_owned(tmp_path, PREFIX)
            assert os.path.samestat(os.fstat(file), path.stat())
            path.unlink()
            os.close(file)
    finally:
        ended.set()
        for each in sweepers:
            each.join()
