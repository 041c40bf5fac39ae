"""The sandbox of decoder processes: everything that it must forbid is tried from inside."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Enters the sandbox, with or without limits of resources, and prints what the kernel then refuses.
CHILD = """
import ctypes, json, mmap, os, resource, signal, socket, sys, threading
from encoder_service.child import become_child
from encoder_service.image import decoder_process

def refused(action):
    try:
        action()
    except (OSError, MemoryError, RuntimeError):  # the last: no new thread
        return True
    return False

held, part = open(sys.argv[1]), sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)

def ptrace():  # of the parent; PTRACE_SEIZE
    if libc.ptrace(0x4206, os.getppid(), None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")

def worked():
    while True:
        asked.acquire()
        done.append(sum(range(1000)))
        answered.release()

done, asked, answered = [], threading.Semaphore(0), threading.Semaphore(0)
threading.Thread(target=worked, daemon=True).start()
become_child("decoder", os.getppid())
if part == "all":
    decoder_process.bound_resources(64 << 20)
print(json.dumps({
    "confined": decoder_process.enter_sandbox(),
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
        "started as a thread": refused(threading.Thread(target=len).start),
    },
    "memory": {
        "large": refused(lambda: bytearray(128 << 20)),
        "shared": refused(lambda: mmap.mmap(-1, 128 << 20)),
        "growing as a stack": refused(lambda: mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100)),
    },
    "timers": {"set": refused(lambda: signal.setitimer(signal.ITIMER_PROF, 0))},
    "most processes": resource.getrlimit(resource.RLIMIT_NPROC),
    "works": [asked.release(), answered.acquire(), done, refused(lambda: bytearray(8 << 20))],
}))
"""


def inside(tmp_path: Path, part: str) -> dict[str, Any]:
    if not Path("/proc/sys/kernel/seccomp").exists():
        pytest.skip("this kernel has no seccomp")
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
    assert found["confined"]
    return found


@pytest.mark.attack(
    "code in a decoder process that tries to reach files, network, processes, memory or timers"
)
def test_a_sandboxed_process_reaches_no_file_network_or_process(tmp_path: Path) -> None:
    found = inside(tmp_path, "all")
    for kind in ("files", "network", "processes", "memory", "timers"):
        assert all(found[kind].values()), found
    assert found["most processes"] == [0, 0]
    assert found["works"] == [None, True, [499500], False], "earlier threads run, and memory is available"


def test_seccomp_alone_keeps_files_network_and_processes_away(tmp_path: Path) -> None:
    found = inside(tmp_path, "seccomp")
    for kind in ("files", "network", "processes"):
        assert all(found[kind].values()), found
