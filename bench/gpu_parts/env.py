"""Notes what the machine has: device, driver, versions, libraries, and the speed of copies to and from the device."""

import ctypes
from functools import partial
from importlib import metadata, util
from typing import Any

import torch

from bench.gpu_parts.probe import Probe
from bench.harness.results import hardware, versions

# This part looks for these modules without importing them. Each part reports the modules that it fails to import.
MODULES = (
    "triton",
    "fa3_fwd_interface",
    "flash_attn",
    "cudnn",
    "nvidia.nvimgcodec",
    "nvidia.dali",
    "torchvision",
    "cuda.bindings",
    "transformers",
    "grpc",
    "grpc_health",
    "redis",
    "blake3",
    "cachetools",
    "PIL",
    "pytest",
)
PACKAGES = (
    "triton",
    "fa3-fwd",
    "flash-attn",
    "nvidia-cudnn-frontend",
    "nvidia-nvimgcodec-cu13",
    "torchvision",
)
LIBRARIES = ("libcuda.so.1", "libnvcuvid.so.1", "libnvidia-ml.so.1")


def run(probe: Probe) -> None:
    """Note hardware, versions, modules, libraries and copies."""
    probe.note(hardware=hardware(), versions=versions() | _versions(), dry=probe.dry)
    for name in MODULES:
        probe.attempt({"module": name}, partial(_found, name))
    if probe.device.type == "cuda":
        probe.attempt({}, partial(_device, probe.device))
        for library in LIBRARIES:
            probe.attempt({"library": library}, partial(_loaded, library))
    for pinned in (True, False):
        probe.attempt({"copy": "pinned" if pinned else "pageable"}, partial(_copies, probe, pinned))


def _found(name: str) -> dict[str, bool]:
    try:
        return {"found": util.find_spec(name) is not None}
    except ModuleNotFoundError:  # the parent package is missing too
        return {"found": False}


def _loaded(library: str) -> dict[str, bool]:
    return {"loaded": bool(ctypes.CDLL(library))}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]


def _device(device: torch.device) -> dict[str, Any]:
    has = torch.cuda.get_device_properties(device)
    return {"device": has.name, "gib": has.total_memory / 2**30, "processors": has.multi_processor_count}


def _copies(probe: Probe, pinned: bool) -> dict[str, float]:
    """Return gigabytes per second to and from the device."""
    size = (1 if probe.dry else 128) << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned and not probe.dry)
    device = torch.empty(size, dtype=torch.uint8, device=probe.device)
    up = probe.ms(lambda: device.copy_(host, non_blocking=True), 10)["ms"]
    down = probe.ms(lambda: host.copy_(device, non_blocking=True), 10)["ms"]
    return {"up_gb_s": size / up / 1e6, "down_gb_s": size / down / 1e6}
