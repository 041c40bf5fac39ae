"""The choice of an attention backend: the one asked for, or the first of an order that passes its trial."""

import logging
import math

import torch

from encoder_service.vision import attention_trial
from encoder_service.vision.attention_backends import FixedAndPacked, build
from encoder_service.vision.segments import Attention

logger = logging.getLogger(__name__)

# For packed segments, best first: what peers and libraries published. `bench.gpu` prints the times to judge it by.
PACKED = ("flash3", "varlen", "flash2", "sdpa")
# For the fixed lengths of CUDA graphs: a plan for each is made once, at the capture.
FIXED = "cudnn"
BACKENDS = (*PACKED, "flash4", FIXED)


def make_attention(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> Attention:
    """Return the backend called `name`, or with "auto" what passes its trial on `device` in `dtype`.

    "auto" is the first of `PACKED`, and on CUDA `FIXED` beside it for segments of fixed length. Raises `ValueError`
    for an unknown name, or if the backend requested by name cannot run.
    """
    if name == "auto":
        return _auto(device, dtype, head_size)
    if name not in BACKENDS:
        raise ValueError(f"attention {name!r} is unknown (known: auto, {', '.join(BACKENDS)})")
    if reason := why_not(name, device, dtype, head_size):
        raise ValueError(f"attention {name!r} cannot run here: {reason}")
    return build(name)


def why_not(
    name: str, device: torch.device, dtype: torch.dtype, head_size: int = 72, *, fixed: bool = False
) -> str:
    """Return why backend `name` cannot run on `device` in `dtype`; empty if it can.

    With `fixed` it need only run on one segment of a fixed length.
    """
    if device.type != "cuda" and name != "sdpa":
        return f"it needs CUDA, the device is {device}"
    if dtype is torch.float32 and name != "sdpa":
        return "it has no float32 kernel"
    try:
        attend = build(name)
    except Exception as error:  # noqa: BLE001 - a library that cannot be imported may raise anything
        return f"{type(error).__name__}: {error}"
    # torch's own is the last resort: a slow one is better than none.
    limit_ms = math.inf if name == "sdpa" else attention_trial.MAX_THIRD_CALL_MS
    return attention_trial.failure(attend, device, dtype, head_size, fixed=fixed, max_third_call_ms=limit_ms)


def _auto(device: torch.device, dtype: torch.dtype, head_size: int) -> Attention:
    reasons: dict[str, str] = {}
    for candidate in PACKED:
        reasons[candidate] = why_not(candidate, device, dtype, head_size)
        if not reasons[candidate]:
            break
        logger.debug("attention: not %s: %s", candidate, reasons[candidate])
    else:
        raise ValueError(f"no attention runs on {device} in {dtype}: {reasons}")
    attend = build(candidate)
    if attend.graphs:
        reason = why_not(FIXED, device, dtype, head_size, fixed=True)
        if reason:
            logger.debug("attention: not %s for fixed lengths: %s", FIXED, reason)
        else:
            attend = FixedAndPacked(build(FIXED), attend)
    logger.info("attention: %s (auto, on %s in %s)", attend.name, device, dtype)
    return attend
