"""Page-locked host memory: registers existing memory with CUDA, so that copies run at full speed."""

import logging

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def register(memory: Tensor, device: str) -> bool:
    """Register all of `memory` with CUDA. Return False, with a warning, if CUDA refuses: copies are slower then.

    CUDA makes a context on whichever device is current, hundreds of megabytes of it: let that be `device`.
    """
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    if error:
        log.warning(
            "store: CUDA does not register the host arena (cudaError %d); copies to it will be slower. A "
            "locked-memory limit is the usual reason: see `ulimit -l`",
            error,
        )
    return not error


def unregister(memory: Tensor, device: str) -> None:
    """Undo `register`; no copy may be in progress."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
