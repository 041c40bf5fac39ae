"""The choice of what runs between the products: Triton's kernels where they compile and are right, else torch."""

import logging

import torch

from encoder_service.vision.fp8 import multiplies_fp8
from encoder_service.vision.pointwise import PlainPointwise, Pointwise
from encoder_service.vision.spec import TowerSpec

logger = logging.getLogger(__name__)


def make_pointwise(spec: TowerSpec, device: torch.device, dtype: torch.dtype) -> Pointwise:
    """Return Triton's kernels on CUDA in a 16-bit type, or torch's operators, with a warning if something is amiss.

    Triton needs a C compiler and a folder to which it may write and from which it may load libraries
    (`TRITON_CACHE_DIR`): a start without either is slower, and right.
    """
    if device.type != "cuda" or dtype is torch.float32:
        return PlainPointwise()
    try:
        from encoder_service.vision.pointwise_triton import TritonPointwise, difference

        differing = difference(spec, device, dtype, fp8=multiplies_fp8(device))
        torch.cuda.synchronize(device)
        if not differing:
            logger.info("kernels between products: triton")
            return TritonPointwise(spec, device)
        reason = f"not equal to torch's: {differing}"
    except Exception as error:  # noqa: BLE001 - a compiler that is missing shows in many ways
        reason = f"{type(error).__name__}: {error}"
    logger.warning("kernels between products: torch's own, for Triton's cannot be used: %s", reason)
    return PlainPointwise()
