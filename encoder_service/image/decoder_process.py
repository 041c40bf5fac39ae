"""Decoder processes: a parent that has loaded the decoders, and the children that it forks to use them.

`IsolatedDecoder` starts the parent, which sees no image and lives as long as the server. It loads what decoding needs
once (DALI takes a second), so that a child is there again in milliseconds after one has died. A child decodes one
request at a time; each way its messages are JSON, one a packet, and the bytes of files and pixels are in memory that
the server shares with it.

A child decodes in a sandbox that the kernel enforces without privileges: no network, no files, no processes, bounded
memory. What a kernel lacks is left out, and said.
"""

import ctypes
import gc
import io
import json
import mmap
import os
import platform
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from PIL import (
    Image,
    ImageCms,  # noqa: F401
    ImageColor,  # noqa: F401
    ImageFilter,  # noqa: F401
    ImagePalette,  # noqa: F401
    TiffImagePlugin,  # noqa: F401
)

from encoder_contract.errors import InvalidImageError
from encoder_contract.header import Header
from encoder_contract.orientation import UPRIGHT
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.pillow import READERS, Pixels, decode_file, turned
from encoder_service.image.source import Source

# Pillow imports some of these only when an image needs them, which a child cannot do.


MESSAGE_BYTES = 1 << 16
MESSAGE_CHARACTERS = 500  # of an error


def main(control_fd: int, *, dali: bool, threads: int) -> None:
    """Load the decoders, say which, and fork and reap children as told until the server has gone.

    `{"fork": batches, "memory_bytes": n}` comes with the child's end of a socket, and is answered with its pid;
    `{"reap": pid}`, which ends a child that has not ended, with its wait status.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A server that was stopped while it starts, or between two commands, may have gone before it is answered.
    with socket.socket(fileno=control_fd) as control, suppress(ConnectionError):
        version = _load(dali=dali)
        gc.freeze()  # what is loaded is no garbage, and stays memory that all children share
        control.send(json.dumps({"dali": version}).encode())
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
            if not message:
                return
            command = json.loads(message)
            if "reap" in command:
                os.kill(command["reap"], signal.SIGKILL)  # one that has ended by itself keeps its status
                answer = {"status": os.waitpid(command["reap"], 0)[1]}
            else:
                parent, pid = os.getpid(), os.fork()
                if pid == 0:
                    control.close()
                    dali_threads = threads if command["fork"] else 0
                    _run_child(descriptors[0], parent, dali_threads, command["memory_bytes"])
                answer = {"pid": pid}
                os.close(descriptors[0])
            control.send(json.dumps(answer).encode())


def _load(*, dali: bool) -> str:
    """Import all that decoding needs, which a child can import no more; return DALI's version, empty without it."""
    for kind in READERS:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, kind)
        decode_file(Source(b"", file.getvalue(), Header(kind, 8, 8, UPRIGHT, 3)))
    if dali:
        # DALI would import torch if it could, which takes seconds and 200 MB, and use nothing of it.
        sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            import nvidia.dali as library
            import nvidia.dali.experimental.dynamic  # noqa: F401
        except ImportError:
            return ""
        return str(library.__version__)
    return ""


def _run_child(descriptor: int, parent: int, dali_threads: int, memory_bytes: int) -> NoReturn:
    code = 1
    try:
        end_with_parent("decoder", parent)
        with socket.socket(fileno=descriptor) as server:
            jpegs = _warm(DaliJpegs("cpu", dali_threads)) if dali_threads else None
            bound_resources(memory_bytes)
            server.send(json.dumps({"sandbox": enter_sandbox()}).encode())
            _Child(server, jpegs).run()
        code = 0
    except ConnectionError:  # the server has gone before its answer
        pass
    except BaseException:  # noqa: BLE001 - a child must never go on as its parent
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _warm(jpegs: DaliJpegs) -> DaliJpegs:
    """Decode once: it loads code and starts threads."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    for count in (1, 2):
        jpegs.decode([file.getvalue()] * count, list)
    return jpegs


class _Child:
    """Answers requests with an outcome for each file.

    True: its pixels are there. Null: DALI refuses it. Else a text, and whether it is about a lack of memory.
    """

    def __init__(self, server: socket.socket, jpegs: DaliJpegs | None) -> None:
        self._server = server
        self._jpegs = jpegs
        self._memories: dict[int, mmap.mmap] = {}

    def run(self) -> None:
        """Go on until the server closes its end."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._server, MESSAGE_BYTES, 1)
            if not message:
                return
            request = json.loads(message)
            number = request["memory"]
            for descriptor in descriptors:
                self._memories[number] = mmap.mmap(descriptor, request["size"])
                os.close(descriptor)
            outcomes = self._outcomes(self._memories[number], request["files"])
            self._server.send(json.dumps(outcomes).encode())

    def _outcomes(self, memory: mmap.mmap, files: Sequence[dict[str, Any]]) -> list[Any]:
        sources, outs = [], []
        for file in files:
            header, begin = Header(**file["header"]), file["begin"]
            sources.append(Source(b"", memory[begin : begin + file["size"]], header))
            width, height = header.upright
            flat = np.frombuffer(memory, np.uint8, 3 * width * height, file["out"])
            outs.append(flat.reshape(height, width, 3))
        if self._jpegs is not None:
            return self._batch(self._jpegs, sources, outs)
        return [_outcome(source, out) for source, out in zip(sources, outs, strict=True)]

    @staticmethod
    def _batch(jpegs: DaliJpegs, sources: Sequence[Source], outs: Sequence[Pixels]) -> list[bool | None]:
        # Nothing of DALI's outlives `keep`: its memory is free for the next batch.
        def keep(samples: Sequence[Any]) -> list[bool | None]:
            return [
                _kept(np.asarray(np.from_dlpack(sample), np.uint8), source.header, out)
                for sample, source, out in zip(samples, sources, outs, strict=True)
            ]

        try:
            return jpegs.decode([source.data for source in sources], keep)
        except (RuntimeError, MemoryError):
            return [None] * len(sources)


def _outcome(source: Source, out: Pixels) -> Any:
    found = decode_file(source, out)
    if isinstance(found, np.ndarray):
        return True
    return [found.message[:MESSAGE_CHARACTERS], not isinstance(found, InvalidImageError)]


def _kept(pixels: Pixels, header: Header, out: Pixels) -> bool | None:
    """Write what DALI decoded to `out`, upright; None if it has not the size of its header."""
    if pixels.shape != (header.height, header.width, 3):
        return None
    if header.orientation == UPRIGHT:
        out[:] = pixels
    else:
        turned(pixels, header.orientation, out)
    return True


# From linux/prctl.h, linux/seccomp.h, linux/landlock.h and asm-generic/unistd.h.
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_NO_NEW_PRIVS = 1, 15, 38
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
# Version of Landlock -> rights to files that it can take away; since which version TCP, and sockets and signals of
# others, and their rights.
_LANDLOCK_FILES = {1: 13, 2: 14, 3: 15, 5: 16}
_LANDLOCK_TCP, _LANDLOCK_SCOPES = (4, 0b11), (6, 0b11)

# What a decoder calls once it is running -> its number on x86-64 and on arm64 (-1: not there). Not among it: whatever
# opens a file or a socket, starts a process or a thread, reaches another process, or sets a timer.
_CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "poll": (7, -1), "ppoll": (271, 73),
    "lseek": (8, 62), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128), "writev": (20, 66), "sched_yield": (24, 124),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "gettimeofday": (96, 169),
    "getpid": (39, 172), "gettid": (186, 178), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211),
    "recvmsg": (47, 212), "exit": (60, 93), "exit_group": (231, 94), "getrusage": (98, 165),
    "sysinfo": (99, 179), "futex": (202, 98), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "set_robust_list": (273, 99), "rseq": (334, 293), "getrandom": (318, 278), "membarrier": (324, 283),
}  # fmt: skip
# Calls that are allowed for some values of an argument. A limit is only ever lowered.
_MMAP, _PRLIMIT, _TGKILL = (9, 222), (302, 261), (234, 131)
_FCNTL, _F_DUPFD_CLOEXEC = (72, 25), 1030
_SECCOMP = (317, 277)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
_MAP_SHARED_ANONYMOUS, _MAP_GROWSDOWN = 0x21, 0x100
_EPERM = 1
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
# Of seccomp_data: the call's number, the architecture, and the low half of each argument.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(name: str, parent: int) -> None:
    """Be killed when the process `parent`, which forked this one, ends; `name` is what `ps` shows."""
    _prctl(_PR_SET_NAME, name.encode())
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


def bound_resources(memory_bytes: int) -> None:
    """Bound what this process may take from now on: so much more memory, and no file, process or thread."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(status["VmData"].split()[0]) << 10
    for kind, most in (
        (resource.RLIMIT_DATA, held + memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),  # of the user's, threads too; root has no such limit
    ):
        resource.setrlimit(kind, (most, most))


def enter_sandbox() -> list[str]:
    """Give up files, network and other processes, for all threads of this process; return what the kernel enforces."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    landlock, seccomp = _landlock(), _seccomp()
    return [name for name, done in (("landlock", landlock), ("seccomp", seccomp)) if done]


def _landlock() -> bool:
    """Take every right that Landlock knows of, with no exception."""
    version = _call(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION)
    if version < 1:
        return False
    files = (1 << max(bits for since, bits in _LANDLOCK_FILES.items() if since <= version)) - 1
    tcp, scopes = (bits if since <= version else 0 for since, bits in (_LANDLOCK_TCP, _LANDLOCK_SCOPES))
    attributes = struct.pack("QQQ", files, tcp, scopes)
    size = 8 if version < _LANDLOCK_TCP[0] else 16 if version < _LANDLOCK_SCOPES[0] else 24
    rules = _call(_LANDLOCK_CREATE_RULESET, attributes, size, 0)
    if rules < 0:
        return False
    try:
        return _call(_LANDLOCK_RESTRICT_SELF, rules, 0) == 0
    finally:
        os.close(rules)


def _seccomp() -> bool:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return False
    column, architecture = machine
    code = b"".join(_filter(column, architecture))
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    return _call(_SECCOMP[column], _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, program) == 0


def _filter(column: int, architecture: int) -> list[bytes]:
    """Return the program for the kernel's classic BPF: 8 bytes an instruction, jumps count what they skip."""

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def unless_equal(value: int, skip: int) -> bytes:
        return struct.pack("HBBI", 0x15, 0, skip, value)

    def unless_any_bit(bits: int, skip: int) -> bytes:
        return struct.pack("HBBI", 0x45, 0, skip, bits)

    def answer(action: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, action)

    def argument(number: int) -> int:
        return _ARGUMENTS + 8 * number

    over_the_next = struct.pack("HBBI", 0x05, 0, 0, 1)
    code = [load(_ARCHITECTURE), unless_equal(architecture, 1), over_the_next, answer(_KILL), load(_NUMBER)]
    for numbers in _CALLS.values():
        if numbers[column] >= 0:
            code += [unless_equal(numbers[column], 1), answer(_ALLOW)]
    # Memory that RLIMIT_DATA counts, or of files that were handed in. A stack is not counted.
    code += [unless_equal(_MMAP[column], 7), load(argument(3))]
    code += [unless_any_bit(_MAP_GROWSDOWN, 1), answer(_ERRNO | _EPERM)]
    code += [struct.pack("HBBI", 0x54, 0, 0, _MAP_SHARED_ANONYMOUS), unless_equal(_MAP_SHARED_ANONYMOUS, 1)]
    code += [answer(_ERRNO | _EPERM), answer(_ALLOW)]
    # Limits and signals of its own, and of a descriptor only a copy.
    for numbers, which, value in ((_PRLIMIT, 0, 0), (_TGKILL, 0, os.getpid()), (_FCNTL, 1, _F_DUPFD_CLOEXEC)):
        code += [unless_equal(numbers[column], 4), load(argument(which))]
        code += [unless_equal(value, 1), answer(_ALLOW), answer(_ERRNO | _EPERM)]
    return [*code, answer(_ERRNO | _EPERM)]


def _prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def _call(number: int, *arguments: object) -> int:
    return int(_libc.syscall(ctypes.c_long(number), *arguments))
