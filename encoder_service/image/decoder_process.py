"""The main program of a decoder process: reads headers and decodes images, one at a time, in a sandbox.

`DecoderPool` starts it. It imports everything that decoding needs, enters the sandbox, and answers requests until the
server closes the socket. The sandbox (no network, files or processes, bounded memory) is enforced by the kernel and
needs no privileges. The process tells the server whether this kernel does. Requests and replies are JSON, one
per packet; files and pixels are in buffers that the server shares with this process. A process for videos keeps one
video open and decodes its frames on request.
"""

import ctypes
import gc
import io
import json
import mmap
import os
import platform
import resource
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

# Pillow imports some of these only when an image needs them. A process in the sandbox cannot import.
from PIL import (
    Image,
    ImageCms,  # noqa: F401
    ImageColor,  # noqa: F401
    ImageFilter,  # noqa: F401
    ImagePalette,  # noqa: F401
    TiffImagePlugin,  # noqa: F401
)

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.header import Header
from encoder_contract.orientation import UPRIGHT
from encoder_service.child import become_child, prctl
from encoder_service.image.pillow import READERS, Pixels, decode_file, read_rare_header
from encoder_service.image.source import Source

if TYPE_CHECKING:
    from encoder_service.image.open_video import OpenVideo

MESSAGE_BYTES = 1 << 16
MESSAGE_CHARACTERS = 500  # of an error


def main(descriptors: Sequence[int], *, parent: int, memory_bytes: int, videos: bool = False) -> None:
    """Load, enter the sandbox, tell the server whether the kernel enforces it, and decode until it closes the socket.

    `parent` is the server's pid: this process ends with the server's thread that started it. `memory_bytes` bounds the
    memory that it takes after it has loaded. With `videos`, it also loads what decodes them.
    """
    become_child("decoder", parent)
    # A server that stops may close the socket before it gets an answer.
    with socket.socket(fileno=descriptors[0]) as server, suppress(ConnectionError):
        _load()
        if videos:
            import encoder_service.image.open_video  # noqa: F401
        gc.freeze()  # the imported modules never become garbage
        statm = os.open("/proc/self/statm", os.O_RDONLY)
        bound_resources(memory_bytes)
        server.send(json.dumps({"confined": enter_sandbox()}).encode())
        _answer_requests(server, statm)


def _load() -> None:
    """Import everything that decoding needs: in the sandbox no file can be opened."""
    for kind in READERS:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, kind)
        decode_file(Source(b"", file.getvalue(), Header(kind, 8, 8, UPRIGHT, 3)))
    Image.init()
    Image.MAX_IMAGE_PIXELS = None  # the server checks the size


def _answer_requests(server: socket.socket, statm: int) -> None:
    buffers: dict[int, mmap.mmap] = {}
    clip: OpenVideo | None = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, MESSAGE_BYTES, 1)
        if not message:
            return
        request = json.loads(message)
        number = request["buffer"]
        for descriptor in descriptors:
            buffers[number] = mmap.mmap(descriptor, request["size"], *_MMAP_ARGUMENTS[number == VIDEO])
            os.close(descriptor)
        _allow_memory(request["may_take"], statm)
        if number == VIDEO:
            clip, answer = _open_video(buffers.pop(number))
        elif "frames" in request:
            answer = _read_frames(clip, buffers[number], request)
        else:
            answer = _answer(buffers[number], request)
        server.send(json.dumps(answer).encode())


# Instead of the number of a buffer: the request opens a video, whose file is sealed.
VIDEO = -1
_MMAP_ARGUMENTS = (mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE), (mmap.MAP_PRIVATE, mmap.PROT_READ)


def _open_video(content: mmap.mmap) -> "tuple[OpenVideo | None, Any]":
    """Open a video; return it and what its container says of it, or None and its error."""
    from encoder_service.image.open_video import OpenVideo

    try:
        clip = OpenVideo(content)
        return clip, asdict(clip.info())
    except EncoderError as error:
        return None, _error(error)


def _read_frames(clip: "OpenVideo | None", buffer: mmap.mmap, request: dict[str, Any]) -> Any:
    """Write two frames to the beginning of a buffer; return None, or the error of a frame."""
    assert clip is not None, "the server requests frames of an open video only"
    first, second = request["frames"]
    height, width = request["shape"]
    out = np.frombuffer(buffer, np.uint8, 2 * height * width * 3).reshape(2, height, width, 3)
    try:
        clip.read(first, second, out)
    except EncoderError as error:
        return _error(error)
    return None


def _error(error: EncoderError) -> list[Any]:
    """Return the text of an error, and whether memory was short."""
    return [error.message[:MESSAGE_CHARACTERS], not isinstance(error, InvalidImageError)]


def _allow_memory(more_bytes: int, statm: int) -> None:
    """Let this request take `more_bytes` beyond what the process holds now."""
    os.lseek(statm, 0, os.SEEK_SET)
    held = int(os.read(statm, 200).split()[5]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (min(held + more_bytes, most), most))


def _answer(buffer: mmap.mmap, request: dict[str, Any]) -> Any:
    """Read a header and return it as a dictionary, or write the pixels of an image and return None; or an error."""
    file = buffer[: request["bytes"]]
    found: Header | Pixels | EncoderError
    if formats := request.get("formats"):
        found = read_rare_header(file, formats)
    else:
        header = Header(**request["header"])
        width, height = header.upright
        flat = np.frombuffer(buffer, np.uint8, 3 * width * height, request["out"])
        found = decode_file(Source(b"", file, header), flat.reshape(height, width, 3))
    if isinstance(found, Header):
        return asdict(found)
    if isinstance(found, np.ndarray):
        return None
    return _error(found)


# From linux/prctl.h, linux/seccomp.h and asm-generic/unistd.h.
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1

# The system calls that a decoder may make -> their numbers on x86-64 and on arm64 (-1: it has none). None of them
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
# Calls that are allowed for some values of an argument. Resource limits can only be lowered.
_MMAP, _PRLIMIT, _TGKILL = (9, 222), (302, 261), (234, 131)
_FCNTL, _F_DUPFD_CLOEXEC = (72, 25), 1030
_SECCOMP = (317, 277)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
_MAP_SHARED_ANONYMOUS, _MAP_GROWSDOWN = 0x21, 0x100
_EPERM = 1
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
# Offsets in seccomp_data: of the call's number, the architecture, and the low half of the first argument.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_libc = ctypes.CDLL(None, use_errno=True)


def bound_resources(memory_bytes: int) -> None:
    """Limit this process to `memory_bytes` more than it holds now, and to no further file, process or thread."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(status["VmData"].split()[0]) << 10
    for kind, most in (
        (resource.RLIMIT_DATA, held + memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),  # processes and threads of this user; root has no such limit
    ):
        resource.setrlimit(kind, (most, most))


def enter_sandbox() -> bool:
    """Give up access to files, network and other processes, in all threads; return whether the kernel enforces it."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return False
    column, architecture = machine
    code = b"".join(_filter(column, architecture))
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    return _call(_SECCOMP[column], _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, program) == 0


def _filter(column: int, architecture: int) -> list[bytes]:
    """Return the classic BPF program: 8 bytes an instruction, jumps count the instructions that they skip."""

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
    # Memory that RLIMIT_DATA counts, or that is mapped from a descriptor. RLIMIT_DATA does not count stacks.
    code += [unless_equal(_MMAP[column], 7), load(argument(3))]
    code += [unless_any_bit(_MAP_GROWSDOWN, 1), answer(_ERRNO | _EPERM)]
    code += [struct.pack("HBBI", 0x54, 0, 0, _MAP_SHARED_ANONYMOUS), unless_equal(_MAP_SHARED_ANONYMOUS, 1)]
    code += [answer(_ERRNO | _EPERM), answer(_ALLOW)]
    # A process may change its own limits, signal itself, and duplicate descriptors.
    for numbers, which, value in ((_PRLIMIT, 0, 0), (_TGKILL, 0, os.getpid()), (_FCNTL, 1, _F_DUPFD_CLOEXEC)):
        code += [unless_equal(numbers[column], 4), load(argument(which))]
        code += [unless_equal(value, 1), answer(_ALLOW), answer(_ERRNO | _EPERM)]
    return [*code, answer(_ERRNO | _EPERM)]


def _call(number: int, *arguments: object) -> int:
    return int(_libc.syscall(ctypes.c_long(number), *arguments))
