"""Puts the simulated device into the place of `torch.cuda` while a block runs."""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.simulated_gpu import ipc, kernels, nccl
from tests.simulated_gpu.device import Event, Graph, SimulatedGpu, Stream, join
from tests.simulated_gpu.tensors import DeviceTensor, OnDevice, over_address

GIB = 1 << 30


@contextmanager
def simulated_gpu(devices: int = 2) -> Iterator[SimulatedGpu]:
    """Run the block, and the threads that it starts, with simulated devices in place of CUDA."""
    gpu = SimulatedGpu(devices)
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as patches:
        for owner, names in _replaced(gpu):
            for name, value in names.items():
                patches.enter_context(mock.patch.object(owner, name, value, create=True))
        modules = {"fa3_fwd_interface": ModuleType("fa3_fwd_interface"), **ipc.in_place_of_cuda_bindings(gpu)}
        patches.enter_context(_importable(modules))
        patches.enter_context(OnDevice(gpu))
        # With AMX, oneDNN's bf16 products round a row by how many others there are, which no GPU kernel of ours does.
        patches.callback(torch._C._set_mkldnn_enabled, torch.backends.mkldnn.enabled)
        torch._C._set_mkldnn_enabled(False)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        patches.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        patches.callback(_end_registrations)
        yield gpu


def _end_registrations() -> None:
    """Wait for the threads that register memory: one that is still to run would do so with the next simulation."""
    for thread in threading.enumerate():
        if thread.name == "cuda-registration":
            thread.join()


@contextmanager
def _importable(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Have these modules imported by their names. Others that the block imports stay: torch's load only once."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _replaced(gpu: SimulatedGpu) -> list[tuple[Any, dict[str, Any]]]:
    """Return what is replaced, by name, in each module or class."""
    from encoder_service.image import resize_triton as resize
    from encoder_service.vision import pointwise_triton as pointwise

    def triton(name: str, compute: Any, *writes: int) -> kernels.TritonKernel:
        return kernels.TritonKernel(gpu, name, compute, writes)

    return [
        (torch.cuda, _torch_cuda(gpu)),
        (torch._C, {"_cuda_endAllocateToPool": _nothing, "_cuda_releasePool": _nothing}),
        (Tensor, {"pin_memory": _pin_memory(gpu), "tolist": _tolist(gpu)}),
        (threading.Thread, {"start": _start(gpu)}),
        (torch.nn.functional, {"scaled_dot_product_attention": kernels.attention_of_torch(gpu)}),
        (torch, {"_addmm_activation": kernels.product_and_gelu(gpu), "as_tensor": over_address(gpu)}),
        (torch.ops, {"fa3_fwd": SimpleNamespace(fwd=kernels.flash3(gpu))}),
        (torch._C._distributed_c10d, {"ProcessGroupNCCL": nccl.in_place_of(gpu)}),
        (
            pointwise,
            {
                "add_norm_kernel": triton("sum and norm", kernels.add_norm, 0, 4),
                "rotate_kernel": triton("rotation", kernels.rotate, 0),
                "gelu_erf_kernel": triton("GELU", kernels.gelu_erf, 0),
            },
        ),
        (
            resize,
            {
                "along_rows_kernel": triton("resize along rows", kernels.along_rows, 2),
                "along_columns_kernel": triton("resize to patches", kernels.along_columns, 2),
            },
        ),
    ]


def _nothing(*_: Any) -> None:
    pass


def _torch_cuda(gpu: SimulatedGpu) -> dict[str, Any]:
    host = gpu.host

    def set_device(device: Any) -> None:
        host.device = _index(gpu, device)
        if host.stream in gpu.default_streams:
            host.stream = gpu.default_streams[host.device]

    @contextmanager
    def device(chosen: Any) -> Iterator[None]:
        before = host.device
        set_device(chosen)
        try:
            yield
        finally:
            set_device(before)

    def current_stream(device: Any = None) -> Stream:
        index = _index(gpu, device)
        return host.stream if host.stream.device_index == index else gpu.default_streams[index]

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        gpu.leaves_device(_index(gpu, device))
        return 70 * GIB, 80 * GIB

    def synchronize(_device: Any = None) -> None:
        for stream in gpu.streams:
            gpu.waits("torch.cuda.synchronize", stream.clock)

    return {
        "_lazy_init": _nothing,
        "is_available": lambda: True,
        "device_count": lambda: len(gpu.default_streams),
        "set_device": set_device,
        "current_device": lambda: host.device,
        "device": device,
        "get_device_capability": lambda _device=None: (9, 0),
        "get_device_name": lambda _device=None: "simulated",
        "mem_get_info": mem_get_info,
        "memory_reserved": lambda _device=None: GIB,
        "memory_allocated": lambda _device=None: GIB,
        "max_memory_allocated": lambda _device=None: GIB,
        "reset_peak_memory_stats": _nothing,
        "empty_cache": _nothing,
        "synchronize": synchronize,
        "current_stream": current_stream,
        "default_stream": lambda device=None: gpu.default_streams[_index(gpu, device)],
        "Stream": lambda device=None: Stream(gpu, _index(gpu, device)),
        "stream": gpu.using,
        "Event": lambda **_options: Event(gpu),
        "CUDAGraph": lambda: Graph(gpu),
        "graph": lambda graph, *, stream, **_options: _capturing(gpu, graph, stream),
        "graph_pool_handle": lambda: (0, 1),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=gpu.register, cudaHostUnregister=gpu.unregister),
    }


def _index(gpu: SimulatedGpu, device: Any) -> int:
    """Return the number of a device by any of torch's names for it."""
    if device is None or device == "cuda":
        return gpu.host.device
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return gpu.host.device if index is None else index


@contextmanager
def _capturing(gpu: SimulatedGpu, graph: Graph, stream: Stream) -> Iterator[None]:
    """Capture this thread's launches; torch waits for the device before it begins."""
    for each in gpu.streams:
        join(gpu.host.clock, each.clock)
    graph.stream = stream
    with gpu.using(stream):
        gpu.host.capture = graph
        try:
            yield
        finally:
            gpu.host.capture = None


def _pin_memory(gpu: SimulatedGpu) -> Any:
    def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
        if gpu.is_pinned(tensor):
            return tensor
        pinned = tensor.clone()
        gpu.pin(pinned)
        return pinned

    return pin_memory


def _tolist(gpu: SimulatedGpu) -> Any:
    tolist = Tensor.tolist

    def read(tensor: Tensor) -> Any:
        if isinstance(tensor, DeviceTensor):
            return tensor.to("cpu").tolist()
        gpu.read_by_host(tensor, "tolist")
        return tolist(tensor)

    return read


def _start(gpu: SimulatedGpu) -> Any:
    """Start a thread, which knows what its parent has waited for, and creates tensors on the device."""
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        known, run = dict(gpu.host.clock), thread.run

        def run_with_gpu() -> None:
            join(gpu.host.clock, known)
            with OnDevice(gpu):
                run()

        thread.run = run_with_gpu  # type: ignore[method-assign]
        start(thread)

    return started
