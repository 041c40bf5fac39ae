"""The sandbox of decoder processes: what a process in it can do no more, each tried from inside."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Enters the sandbox, or a part of it, and prints what the kernel then refuses.
CHILD = """
import ctypes, json, mmap, os, signal, socket, sys, threading
from encoder_service.image import sandbox

def refused(action):
    try:
        action()
    except (OSError, MemoryError):
        return True
    return False

held, part = open(sys.argv[1]), sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)

def ptrace():  # of the parent; PTRACE_SEIZE
    if libc.ptrace(0x4206, os.getppid(), None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")

def started():
    thread = threading.Thread(target=lambda: done.append(sum(range(1000))))
    thread.start()
    thread.join()

done = []
sandbox.end_with_parent("decoder", os.getppid())
if part == "all":
    sandbox.bound(64 << 20)
    enforced = sandbox.enter()
else:
    sandbox._prctl(sandbox._PR_SET_NO_NEW_PRIVS, 1)
    enforced = [part] if getattr(sandbox, "_" + part)() else []
print(json.dumps({
    "enforced": enforced,
    "files": {
        "read": refused(lambda: open(sys.argv[1])),
        "written": refused(lambda: open(sys.argv[1] + ".new", "w")),
        "listed": refused(lambda: os.listdir("/")),
        "removed": refused(lambda: os.remove(sys.argv[1])),
    },
    "network": {
        "tcp": refused(lambda: socket.socket(socket.AF_INET)),
        "udp": refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
        "unix": refused(lambda: socket.socket(socket.AF_UNIX)),
    },
    "processes": {
        "forked": refused(lambda: os.fork() or os._exit(0)),
        "executed": refused(lambda: os.execv("/bin/true", ["true"])),
        "signalled": refused(lambda: os.kill(os.getppid(), 0)),
        "traced": refused(ptrace),
    },
    "memory": {
        "large": refused(lambda: bytearray(128 << 20)),
        "shared": refused(lambda: mmap.mmap(-1, 128 << 20)),
    },
    "works": [refused(started), done, refused(lambda: bytearray(8 << 20))],
}))
"""


def inside(tmp_path: Path, part: str) -> dict[str, Any]:
    file = tmp_path / "secret"
    file.write_text("of the server")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(file), part],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "of the server"
    found: dict[str, Any] = json.loads(done.stdout)
    if not found["enforced"]:
        pytest.skip(f"this kernel has no {part}")
    return found


def test_a_process_in_the_sandbox_reaches_no_file_no_network_and_no_other_process(tmp_path: Path) -> None:
    found = inside(tmp_path, "all")
    if "seccomp" not in found["enforced"]:
        pytest.skip("this kernel has no seccomp")
    for kind in ("files", "network", "processes", "memory"):
        assert all(found[kind].values()), found
    assert found["works"] == [False, [499500], False], "threads and memory within the bound are its own"


def test_landlock_alone_keeps_files_away(tmp_path: Path) -> None:
    assert all(inside(tmp_path, "landlock")["files"].values())


def test_seccomp_alone_keeps_files_network_and_processes_away(tmp_path: Path) -> None:
    found = inside(tmp_path, "seccomp")
    for kind in ("files", "network", "processes"):
        assert all(found[kind].values()), found
