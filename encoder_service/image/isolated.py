"""Decoding in processes of their own: a file that crashes a decoder, stalls it or swells it fails, and nothing else."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import LifoQueue
from typing import Literal

import numpy as np
import PIL
import torch
from torch import Tensor

from encoder_contract.errors import EncoderError, OverloadedError, UndecodableImageError
from encoder_service.image.decode import BATCHED_BYTES_PER_PIXEL, MAX_BATCHED_PIXELS, Decoder
from encoder_service.image.decoder_child import DecoderChild, DecoderDiedError
from encoder_service.image.decoder_parent import DecoderParent
from encoder_service.image.pillow import PILLOW_BYTES_PER_PIXEL, Pixels, is_shortage
from encoder_service.image.source import Source

log = logging.getLogger(__name__)

# What a child may take beside pixels: the file, copies of it without metadata, and what its libraries keep.
_BESIDE_PIXELS_BYTES = 256 << 20
# Of the clock, for each second of a processor: it shares those with the vision tower.
_WALL_PER_CPU, _WALL_S = 3.0, 3.0
_RETRY_MS = 500
_BATCH = 32  # images in a request

_TEXTS = {
    "crashed": "the decoder crashed on this {format}",
    "senseless": "the decoder broke on this {format}",
    "time": "decoding this {format} takes more than {cpu_s:g} s of a processor",
    "memory": "decoding this {format} takes more memory than {megabytes} MB",
}


class IsolatedDecoder(Decoder):
    """A `Decoder` that decodes on the CPU, in one child for batches (DALI) and `threads` for single images (Pillow).

    `device` is where the pixels go then. A child that dies is replaced at once. An image that was alone in it has an
    error: `UndecodableImageError` if it is to blame, else `OverloadedError`; the images of a batch are left to
    `decode_one`. `deaths` counts them by reason.

    It starts in the background; `start` waits for that. `cpu_s` is the processor time that a request may take.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        threads: int = 4,
        backend: Literal["auto", "dali", "pillow"] = "auto",
        max_image_pixels: int = 100_000_000,
        decode_pixels: int = 50_000_000,
        cpu_s: float = 20.0,
    ) -> None:
        super().__init__(device, threads=threads, backend="pillow", max_image_pixels=max_image_pixels)
        self._counting = threading.Lock()
        self._backend = backend
        self._dali = ""  # its version, known once it is loaded
        self._max_batched_pixels = MAX_BATCHED_PIXELS
        self._cpu_s = cpu_s
        self._memory_bytes = _BESIDE_PIXELS_BYTES + PILLOW_BYTES_PER_PIXEL * max_image_pixels
        in_batch = _BESIDE_PIXELS_BYTES + BATCHED_BYTES_PER_PIXEL * max(decode_pixels, MAX_BATCHED_PIXELS)
        self._parent = DecoderParent(dali=backend != "pillow", threads=threads)
        # Whoever takes a child out of its queue has it alone. The last one used is the next: its memory is warm.
        self._batch_child = self._queue_of(1, batches=True, memory_bytes=in_batch)
        self._single_children = self._queue_of(threads, batches=False, memory_bytes=self._memory_bytes)

    @property
    def _has_dali(self) -> bool:
        return bool(self._dali)

    @property
    def messages(self) -> int:
        """Lines that the processes have printed to standard error; they are thrown away."""
        self._parent.printed.read()
        return self._parent.printed.lines

    def start(self) -> None:
        """Wait until it is there; `name` then says what decodes, and what the kernel enforces.

        Raises `ValueError` if DALI was asked for and is not installed, `DecoderStartError` if no process starts.
        """
        dali = self._parent.hello()["dali"]
        if self._backend == "dali" and not dali:
            raise ValueError("the DALI decoder is not installed")
        self._dali = dali
        with ExitStack() as stack:
            # All of them now: no image waits for a fork, and what they take does not grow as the day goes on.
            for child in self._children(stack, self._single_children, *([self._batch_child] if dali else [])):
                child.start()
            enforced = ", ".join(child.sandbox)
        if not enforced:
            log.warning(
                "this kernel has neither Landlock nor seccomp: decoder processes can open files and sockets"
            )
        names = [f"DALI {dali} (cpu)"] if dali else []
        self.name = ", ".join([*names, f"Pillow {PIL.__version__}"])
        self.name += f" in processes of their own ({enforced or 'not confined'})"

    def decode_one(self, source: Source) -> Tensor | EncoderError:
        """Return the pixels of an image or its error, decoded by Pillow in a process that has nothing else to do.

        Raises `RuntimeError` if there is no such process, or the device does not take the pixels.
        """
        try:
            with _taken(self._single_children) as child:
                (found,) = child.decode([source])
        except DecoderDiedError as died:
            return self._error(died.reason, source)
        except OSError as error:
            if not is_shortage(error):
                raise
            log.warning("short of memory or files while decoding %s", source.header, exc_info=error)
            return OverloadedError("decoding ran short of memory or files", retry_after_ms=_RETRY_MS)
        assert found is not None, "the child vouches for it"
        return found if isinstance(found, EncoderError) else self._tensor(found)

    def close(self) -> None:
        """End all processes, each once it is done with its request; a further use starts them again."""
        with ExitStack() as stack:
            for child in self._children(stack, self._single_children, self._batch_child):
                child.end()
            self._parent.close()

    @staticmethod
    def _children(stack: ExitStack, *queues: "LifoQueue[DecoderChild]") -> list[DecoderChild]:
        """Take all of some queues, for as long as the stack is open; each is waited for."""
        return [stack.enter_context(_taken(queue)) for queue in queues for _ in range(queue.maxsize)]

    def _queue_of(self, count: int, *, batches: bool, memory_bytes: int) -> "LifoQueue[DecoderChild]":
        children: LifoQueue[DecoderChild] = LifoQueue(count)
        wall_s = _WALL_S + _WALL_PER_CPU * self._cpu_s
        for _ in range(count):
            children.put(
                DecoderChild(
                    self._parent,
                    self._died,
                    batches=batches,
                    memory_bytes=memory_bytes,
                    cpu_s=self._cpu_s,
                    wall_s=wall_s,
                )
            )
        return children

    def _try(self, sources: Sequence[Source]) -> Sequence[Tensor | None]:
        found: list[Tensor | None] = []
        for first in range(0, len(sources), _BATCH):
            batch = sources[first : first + _BATCH]
            try:
                with _taken(self._batch_child) as child:
                    decoded = child.decode(batch)
            except (DecoderDiedError, OSError):  # whichever it was, it is told of each by itself
                decoded = [None] * len(batch)
            found += [self._tensor(each) if isinstance(each, np.ndarray) else None for each in decoded]
        return found

    def _tensor(self, pixels: Pixels) -> Tensor:
        return torch.from_numpy(pixels).to(self._torch_device)

    def _died(self, reason: str) -> None:
        with self._counting:
            self.deaths[reason] += 1

    def _error(self, reason: str, source: Source) -> EncoderError:
        text = _TEXTS.get(reason)
        if text is None:  # stopped or killed by others, or starved
            return OverloadedError("the decoder ended while it had the image", retry_after_ms=_RETRY_MS)
        return UndecodableImageError(
            text.format(
                format=source.header.format, cpu_s=self._cpu_s, megabytes=self._memory_bytes // 1_000_000
            )
        )


@contextmanager
def _taken(children: "LifoQueue[DecoderChild]") -> Iterator[DecoderChild]:
    child = children.get()
    try:
        yield child
    finally:
        children.put(child)
