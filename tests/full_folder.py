"""A small, nearly full file system that only one program sees, as a full disk or /dev/shm of a server.

Run as a program, this mounts the file system over a folder in new namespaces, fills it up to the wanted free space, and
executes a command.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACES = ["unshare", "--map-root-user", "--user", "--mount"]


def in_full_folder(folder: Path, size_mib: int, free_mib: int, command: list[str]) -> list[str]:
    """Return a command that runs `command` with such a `folder`; skip the test where namespaces are not allowed."""
    if not shutil.which("unshare") or subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("user namespaces are not allowed here")
    ours = [sys.executable, __file__, str(folder), str(size_mib), str(free_mib)]
    return [*NAMESPACES, *ours, *command]


def main(folder: Path, size_mib: int, free_mib: int, command: list[str]) -> None:
    """Mount, fill, and execute the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={size_mib}m".encode()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    (folder / "of others").write_bytes(bytes((size_mib - free_mib) << 20))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
