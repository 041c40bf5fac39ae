"""Notes what the machine has: device, driver, versions, and the speed of copies to and from the device."""

import ctypes
from functools import partial
from importlib import metadata

import torch

from bench.gpu_parts.probe import Probe

PACKAGES = ("triton", "fa3-fwd", "flash-attn", "nvidia-dali-cuda130", "cuda-bindings")
LIBRARIES = ("libcuda.so.1", "libnvcuvid.so.1", "libnvidia-ml.so.1")


def run(probe: Probe) -> None:
    """Note versions, the device, libraries and copies."""
    probe.note("versions", **_versions())
    if probe.device.type == "cuda":
        has = torch.cuda.get_device_properties(probe.device)
        probe.note(
            "device", name=has.name, gib=has.total_memory / 2**30, processors=has.multi_processor_count
        )
        for library in LIBRARIES:
            probe.attempt(library.partition(".")[0], partial(_loaded, library))
    for pinned in (True, False):
        probe.attempt(f"{'pinned' if pinned else 'pageable'} copies", partial(_copies, probe, pinned))


def _loaded(library: str) -> dict[str, bool]:
    return {"loaded": bool(ctypes.CDLL(library))}


def _versions() -> dict[str, str]:
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    found = {name: installed.get(name, "not installed") for name in PACKAGES}
    return found | {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]


def _copies(probe: Probe, pinned: bool) -> dict[str, float]:
    """Return gigabytes per second to and from the device."""
    size = (1 if probe.dry else 128) << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned and not probe.dry)
    device = torch.empty(size, dtype=torch.uint8, device=probe.device)
    up = probe.ms(lambda: device.copy_(host, non_blocking=True), 10)["ms"]
    down = probe.ms(lambda: host.copy_(device, non_blocking=True), 10)["ms"]
    return {"up_gb_s": size / up / 1e6, "down_gb_s": size / down / 1e6}
