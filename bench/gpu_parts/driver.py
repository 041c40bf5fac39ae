"""Asks what only a GPU's driver can answer: registration, memory of dead processes, costs of calls and launches."""

import mmap
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu_parts.probe import Probe
from bench.harness.results import ROOT

GIB = 1 << 30
REGISTERED_BYTES = 8 * GIB
OWNED_BYTES = 8 * GIB
COPIED_BYTES = GIB
KERNELS = 240  # as many as a forward of a large tower has
SHARED = "/dev/shm"
CLOSED_WITHIN_S = 2.0

# Allocates memory that others can open, says its name, and waits to be killed.
OWNER = """
import sys, time
from encoder_contract.device_memory import allocate
memory = allocate("cuda:0", int(sys.argv[1]))
sys.stdout.buffer.write(bytes([len(memory.name)]) + memory.name)
sys.stdout.flush()
time.sleep(60)
"""


def run(probe: Probe) -> None:
    """Note each answer."""
    ask: dict[str, Callable[[], dict[str, Any]]] = {
        "a registration": partial(_registration, probe),
        "a launch": partial(_launches, probe),
    }
    if probe.device.type == "cuda":
        ask |= {
            "a refused registration": _refused_registration,
            "mem_get_info": _memory_calls,
            "a dead owner's memory": _dead_owner,
        }
    for question, answer in ask.items():
        probe.attempt(question, answer)


def _registration(probe: Probe) -> dict[str, Any]:
    """Time registering shared memory on another thread, launches meanwhile, and then copies from and to the memory.

    A launch that takes as long as the registration has waited for it. On the CPU there is nothing to register.
    """
    size, copied = (1 << 20, 1 << 19) if probe.dry else (REGISTERED_BYTES, COPIED_BYTES)
    with tempfile.TemporaryFile(dir=SHARED) as file:
        file.truncate(size)
        memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    memory.zero_()  # allocated before it is registered, as the store's is
    device, found = torch.ones(copied, dtype=torch.uint8, device=probe.device), dict[str, Any]()

    def register() -> None:
        began = time.perf_counter()
        if probe.device.type == "cuda":
            found["error"] = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
        found["s_per_gib"] = (time.perf_counter() - began) / (size / GIB)

    thread, launches_s = threading.Thread(target=register), [0.0]
    thread.start()
    while thread.is_alive():
        began = time.perf_counter()
        device[:1].add_(1)
        probe.synchronize()
        launches_s.append(time.perf_counter() - began)
    found["slowest_launch_ms"] = max(launches_s) * 1e3
    down = probe.ms(lambda: memory[:copied].copy_(device, non_blocking=True), 5)["ms"]
    up = probe.ms(lambda: device.copy_(memory[:copied], non_blocking=True), 5)["ms"]
    if probe.device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
    return {**found, "down_gb_s": copied / down / 1e6, "up_gb_s": copied / up / 1e6}


def _refused_registration() -> dict[str, Any]:
    """Say what the next kernel reports after CUDA has refused memory that is not mapped."""
    error = int(torch.cuda.cudart().cudaHostRegister(4096, 1 << 20, 0))  # type: ignore[no-untyped-call]
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as later:
        return {"error": error, "next_kernel": str(later).splitlines()[0]}
    return {"error": error, "next_kernel": "no error"}


def _memory_calls() -> dict[str, float]:
    """Time the call that every device process makes four times a second."""
    calls = 200
    began = time.perf_counter()
    for _ in range(calls):
        torch.cuda.mem_get_info(0)
    return {"us": (time.perf_counter() - began) / calls * 1e6}


def _dead_owner() -> dict[str, Any]:
    """Say whether memory of a killed process stays allocated while another process has it open."""
    from encoder_contract.device_memory import open_memory  # CUDA's driver library is loaded with it

    command = [sys.executable, "-c", OWNER, str(OWNED_BYTES)]
    free = [_free_gib()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as owner:
        assert owner.stdout is not None
        size = owner.stdout.read(1)
        if not size or not size[0]:
            owner.kill()
            return {"name_bytes": 0}
        name = owner.stdout.read(size[0])
        opened = open_memory(name, OWNED_BYTES, 0)
        free.append(_free_gib())
        owner.send_signal(signal.SIGKILL)
    time.sleep(CLOSED_WITHIN_S)
    free.append(_free_gib())
    del opened
    time.sleep(CLOSED_WITHIN_S)
    free.append(_free_gib())
    moments = ("before", "owned", "owner_dead", "closed")
    return {"name_bytes": len(name), **{f"free_gib_{at}": gib for at, gib in zip(moments, free, strict=True)}}


def _free_gib() -> float:
    return float(torch.cuda.mem_get_info(0)[0] / GIB)


def _launches(probe: Probe) -> dict[str, float]:
    """Time a launch on the host, and a kernel of a graph on the device."""
    vector = torch.ones(1024, device=probe.device)

    def kernels() -> None:
        for _ in range(KERNELS):
            vector.add_(1)

    found = {"launch_us": probe.ms(kernels)["host_ms"] / KERNELS * 1e3}
    if probe.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels()
        found["graph_kernel_us"] = probe.ms(graph.replay)["ms"] / KERNELS * 1e3
    return found
