"""Which resize runs: Triton's kernels on CUDA where they compile and are right, else torch's operators."""

import logging

import torch

from encoder_contract.geometry import Geometry
from encoder_service.image.resize import PlainResize, Resize

log = logging.getLogger(__name__)


def make_resize(geometry: Geometry, device: torch.device) -> Resize:
    """Return Triton's kernels on CUDA, or torch's operators, with a warning if something is amiss.

    Triton needs a C compiler and a folder to which it may write and from which it may load libraries
    (`TRITON_CACHE_DIR`): a start without either is slower, and its patches have the same bits.
    """
    if device.type != "cuda":
        return PlainResize(geometry)
    try:
        from encoder_service.image.resize_triton import TritonResize, differs

        with torch.cuda.device(device):
            if not differs(geometry, device):
                log.info("resize to patches: triton")
                return TritonResize(geometry)
        reason = "their patches differ from torch's"
    except Exception as error:  # noqa: BLE001 - a compiler that is missing shows in many ways
        reason = f"{type(error).__name__}: {error}"
    log.warning(
        "resize to patches: torch's operators are used, because Triton's kernels cannot be: %s", reason
    )
    return PlainResize(geometry)
