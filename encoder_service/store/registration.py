"""Registers the memory of the host tier with CUDA, so that copies between it and a GPU run at full speed."""

import logging
from functools import partial

import torch
from torch import Tensor

from encoder_contract.registration import CudaRegistration

log = logging.getLogger(__name__)


def registration_of(memory: Tensor, device: str) -> CudaRegistration[Tensor]:
    """Begin to register `memory`, uint8 [bytes]. `device` is the one whose context registers it, such as cuda:1."""
    return CudaRegistration(
        memory, partial(register_memory, device=device), partial(unregister_memory, device=device)
    )


def register_memory(memory: Tensor, device: str) -> bool:
    """Register all of `memory` in one call. If CUDA refuses, log a warning and return False: copies are then slower.

    The call makes `device` current, because CUDA creates a context of hundreds of megabytes on the current device. CUDA
    keeps the error of a refusal for the thread, whose next kernel would report it as its own.
    """
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    if error:
        log.warning(
            "store: CUDA did not register the host tier (cudaError %d); copies to it will be slower. The usual "
            "reason is a limit on locked memory: see `ulimit -l`",
            error,
        )
    return not error


def unregister_memory(memory: Tensor, device: str) -> None:
    """Undo `register_memory`. No copy may be in progress."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
