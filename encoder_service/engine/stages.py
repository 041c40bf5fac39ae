"""What the pipeline strings together: its stages, the batch that passes between them, and how they can fail."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.geometry import Grid
from encoder_service.engine.job_queue import Job
from encoder_service.image.source import Source
from encoder_service.scheduler import Task
from encoder_service.store import Pin


@dataclass(frozen=True, slots=True)
class Stages:
    """What the pipeline strings together; each function runs on a thread of the pipeline's own.

    `decode_batch` takes sources that `batches` is true of and returns uint8 pixels [H, W, 3], or None for one that is
    left to `decode_one`, which returns pixels or an error. `to_patches` takes pixels and grids and returns uint8
    patches. `encode` takes patches and grids and returns rows [tokens, width]. `put` keeps
    the rows of an address and returns them pinned; `pin` (any thread) pins them again. `set_aside` keeps room for as
    many of these images, from the first on, as the store can take now, and returns how many; it raises an
    `OverloadedError` when it cannot take the first within its time. `give_back` ends that for an image, once its rows
    are kept or lost.
    """

    batches: Callable[[Source], bool]
    decode_batch: Callable[[Sequence[Source]], list[Tensor | None]]
    decode_one: Callable[[Source], Tensor | EncoderError]
    to_patches: Callable[[Sequence[Tensor], Sequence[Grid]], list[Tensor]]
    encode: Callable[[Sequence[Tensor], Sequence[Grid]], list[Tensor]]
    put: Callable[[bytes, Tensor, Grid], Pin]
    pin: Callable[[bytes], Pin | None]
    set_aside: Callable[[Sequence[Grid]], int]
    give_back: Callable[[Grid], None]


@dataclass(frozen=True, slots=True)
class Batch:
    """What the ViT hands to the copy-out. On CUDA the rows are still being computed until `end` passes."""

    jobs: list[Job]
    works: list[Task]
    rows: list[Tensor]
    began_at: float
    ended_at: float
    begin: "torch.cuda.Event | None"
    end: "torch.cuda.Event | None"


def wrong_size(pixels: Tensor, size: tuple[int, int]) -> InvalidImageError | None:
    """Return the error of pixels that are not what their header says: the grid was computed from that."""
    height, width, _ = pixels.shape
    if (width, height) == size:
        return None
    return InvalidImageError(f"it decodes to {width}x{height} pixels, its header says {size[0]}x{size[1]}")


def device_s(batch: Batch) -> float:
    """Return how long the device was busy with a batch, seconds; on CUDA, wait until it is through."""
    if batch.begin is None or batch.end is None:
        return batch.ended_at - batch.began_at
    batch.end.synchronize()
    return float(batch.begin.elapsed_time(batch.end)) / 1000


def is_lost_device(error: Exception) -> bool:
    """Whether no further work can succeed in this process; running out of memory is not that."""
    return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)
