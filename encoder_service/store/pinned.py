"""Page-locked host memory: registers existing memory with CUDA, so that copies run at full speed."""

import logging

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def register(memory: Tensor) -> bool:
    """Register all of `memory` with CUDA. Return False, with a warning, if CUDA refuses: copies are slower then."""
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    if error:
        log.warning(
            "store: CUDA does not register the host arena (cudaError %d); copies to it will be slower. A "
            "locked-memory limit is the usual reason: see `ulimit -l`",
            error,
        )
    return not error


def unregister(memory: Tensor) -> None:
    """Undo `register`; no copy may be in progress."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
