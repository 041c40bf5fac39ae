"""Device memory that two processes of a host share: one allocates it, and the other opens it by its name.

On a GPU, the memory is allocated with CUDA itself, because CUDA shares only whole allocations, and torch's allocator
hands out parts of segments that may grow. The calls come from `cuda-bindings`, which torch's build for CUDA requires.
On the CPU, a memory file stands in for the GPU's memory, so all other code is the same. This module does not import
torch: callers wrap `content`.
"""

import ctypes
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CUDA_NAME_BYTES = 64
"""Size of a cudaIpcMemHandle_t."""
CUDA_SHARED_BYTES = 2 << 20
"""CUDA shares whole blocks of this size. Memory of another size would share its neighbours, too."""
_FILE = "file:{pid}:{file}:{inode}"


class DeviceMemoryError(RuntimeError):
    """A device could not allocate memory, or memory could not be opened by its name."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CudaBytes:
    """Bytes on a GPU, which torch and other libraries can read without a copy. They live as long as this object."""

    address: int
    size_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One allocation, on a GPU or in host memory: its name and its bytes.

    Other processes cannot open memory without a name. `private_because` says why it has none.
    """

    name: bytes
    content: CudaBytes | memoryview
    private_because: str = ""


def allocate(device: str, size_bytes: int) -> DeviceMemory:
    """Allocate memory on `device` ("cpu", "cuda:1"). Raises `DeviceMemoryError`.

    It has no name where CUDA cannot share memory, as on a MIG slice or in some virtual machines.
    """
    if not device.startswith("cuda"):
        return _allocate_file(size_bytes)
    from cuda.bindings import runtime

    with _current(gpu := int(device.partition(":")[2] or 0)):
        whole_bytes = -(-size_bytes // CUDA_SHARED_BYTES) * CUDA_SHARED_BYTES
        address = int(_checked(runtime.cudaMalloc(whole_bytes)))
        content = _owned(address, size_bytes, gpu, runtime.cudaFree)
        try:
            handle = _checked(runtime.cudaIpcGetMemHandle(address))
        except DeviceMemoryError as error:
            return DeviceMemory(b"", content, private_because=str(error))
    return DeviceMemory(ctypes.string_at(handle.getPtr(), CUDA_NAME_BYTES), content)


def open_memory(name: bytes, size_bytes: int, device: int, *, writes: bool = False) -> DeviceMemory:
    """Open memory that another process allocated, for access from GPU number `device` of this process.

    `writes` opens it for writing, for processes of the server that allocated it. The memory may lie on another GPU,
    which CUDA then lets this GPU read. Raises `DeviceMemoryError` if no memory has that name any more, or this process
    cannot open it.
    """
    if name.startswith(_FILE[:5].encode()):
        return DeviceMemory(name, _open_file(name.decode(errors="replace"), size_bytes, writes=writes))
    if len(name) != CUDA_NAME_BYTES:
        raise DeviceMemoryError(f"the name of CUDA memory has {CUDA_NAME_BYTES} bytes, got {len(name)}")
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise DeviceMemoryError(f"rows of a GPU need cuda-bindings: {error}") from error

    handle = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), name, CUDA_NAME_BYTES)
    with _current(device):
        address = int(_checked(runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)))
    return DeviceMemory(name, _owned(address, size_bytes, device, runtime.cudaIpcCloseMemHandle))


@contextmanager
def _current(device: int) -> Iterator[None]:
    """Make a GPU this thread's current one, and restore the previous one afterwards if the process uses it.

    Setting a device creates a context on it, of hundreds of megabytes. A thread that never set one has GPU 0.
    """
    from cuda.bindings import driver, runtime

    before = _checked(runtime.cudaGetDevice())
    if before == device:
        yield
        return
    _checked(runtime.cudaSetDevice(device))
    try:
        yield
    finally:
        _, is_used = _checked(driver.cuDevicePrimaryCtxGetState(before))
        if is_used:
            _checked(runtime.cudaSetDevice(before))


def _checked(answer: tuple[Any, ...]) -> Any:
    """Return the result of a CUDA call, or its results. Raises `DeviceMemoryError` if the call failed."""
    error, *values = answer
    if int(error):
        raise DeviceMemoryError(f"CUDA: {error.name}")
    return values[0] if len(values) == 1 else values


def _owned(address: int, size_bytes: int, gpu: int, free: Callable[[int], object]) -> CudaBytes:
    content = CudaBytes(address, size_bytes)
    weakref.finalize(
        content, _free, address, gpu, free
    ).atexit = False  # at the end of the process, the driver frees the memory
    return content


def _free(address: int, gpu: int, free: Callable[[int], object]) -> None:
    """Free our memory, or close memory of another process, in the context that it belongs to. Thread-safe."""
    with _current(gpu):
        free(address)


def _allocate_file(size_bytes: int) -> DeviceMemory:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size_bytes > memory_bytes:
        raise DeviceMemoryError(
            f"{size_bytes} bytes are more than this machine's memory of {memory_bytes} bytes"
        )
    file = os.memfd_create("encoder-service-device", os.MFD_CLOEXEC)
    try:
        os.truncate(file, size_bytes)
        content = mmap.mmap(file, size_bytes)
    except OSError as error:
        os.close(file)
        raise DeviceMemoryError(
            f"cannot create a memory file of {size_bytes} bytes: {error.strerror}"
        ) from error
    weakref.finalize(content, os.close, file)  # the name is valid while the file is open
    name = _FILE.format(pid=os.getpid(), file=file, inode=os.fstat(file).st_ino)
    return DeviceMemory(name.encode(), memoryview(content))


def _open_file(name: str, size_bytes: int, *, writes: bool) -> memoryview:
    """Map the memory file, after checking that it is the named file and belongs to our user."""
    _, pid, number, inode = (*name.split(":"), "", "", "")[:4]
    if not (pid.isdecimal() and number.isdecimal()):
        raise DeviceMemoryError(f"{name} is not a name of device memory")
    access = os.O_RDWR if writes else os.O_RDONLY
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", access | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DeviceMemoryError(f"{name} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(file)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or str(status.st_ino) != inode or not 0 < size_bytes <= status.st_size:
            raise DeviceMemoryError(f"{name} is no longer memory of {size_bytes} bytes")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        return memoryview(mmap.mmap(file, size_bytes, mmap.MAP_SHARED, protection))
    finally:
        os.close(file)
