"""Stands in for `cuda.bindings`: memory of the host by its address, which others open by its name."""

import ctypes
import struct
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.simulated_gpu.device import SimulatedGpu

_NAME = struct.Struct("<Q")


class CudaError(IntEnum):
    """What CUDA's runtime returns."""

    cudaSuccess = 0  # noqa: N815 - CUDA's own names
    cudaErrorInvalidValue = 1  # noqa: N815


class MemHandle:
    """Stands in for `cudaIpcMemHandle_t`: the address, in 64 bytes."""

    def __init__(self) -> None:
        self.content = (ctypes.c_char * 64)()

    def getPtr(self) -> int:  # noqa: N802 - CUDA's own name
        """Return where the bytes of the handle lie."""
        return ctypes.addressof(self.content)


def in_place_of_cuda_bindings(gpu: SimulatedGpu) -> dict[str, ModuleType]:
    """Return the modules by name."""
    allocated: dict[int, Any] = {}
    done, invalid = CudaError.cudaSuccess, CudaError.cudaErrorInvalidValue

    def malloc(size: int) -> tuple[CudaError, int]:
        memory = (ctypes.c_uint8 * size)()
        allocated[ctypes.addressof(memory)] = memory
        return done, ctypes.addressof(memory)

    def free(address: int) -> tuple[CudaError]:
        return (done if allocated.pop(address, None) is not None else invalid,)

    def name_of(address: int) -> tuple[CudaError, MemHandle]:
        handle = MemHandle()
        _NAME.pack_into(handle.content, 0, address)
        return done, handle

    def open_handle(handle: MemHandle, _flags: int) -> tuple[CudaError, int]:
        [address] = _NAME.unpack_from(handle.content)
        return (done, address) if address in allocated else (invalid, 0)

    def set_device(index: int) -> tuple[CudaError]:
        gpu.host.device = index
        return (done,)

    calls = SimpleNamespace(
        cudaIpcMemHandle_t=MemHandle,
        cudaIpcMemLazyEnablePeerAccess=1,
        cudaMalloc=malloc,
        cudaFree=free,
        cudaIpcGetMemHandle=name_of,
        cudaIpcOpenMemHandle=open_handle,
        cudaIpcCloseMemHandle=lambda _address: (done,),
        cudaGetDevice=lambda: (done, gpu.host.device),
        cudaSetDevice=set_device,
    )
    package, bindings, driver, runtime = (
        ModuleType(name)
        for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.bindings.runtime")
    )
    vars(driver)["cuDevicePrimaryCtxGetState"] = lambda _index: (done, 0, 1)
    vars(runtime).update(vars(calls))
    vars(bindings).update(driver=driver, runtime=runtime)
    return {each.__name__: each for each in (package, bindings, driver, runtime)}
