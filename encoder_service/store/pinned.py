"""Pinned memory: tells CUDA of host memory that is not its own, so that copies run at full speed."""

import logging

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def register(memory: Tensor) -> bool:
    """Register all of `memory` with CUDA. False, with a warning, when CUDA refuses: copies are slower."""
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    if error:
        log.warning(
            "store: CUDA does not register the host arena (cudaError %d); copies to it will be slower. A "
            "locked-memory limit is the usual reason: see `ulimit -l`",
            error,
        )
    return not error


def unregister(memory: Tensor) -> None:
    """Undo `register`; nothing may be in flight."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
