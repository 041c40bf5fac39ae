"""The memory of a device: how much is used, and how a plan divides it at start."""

import logging
from dataclasses import dataclass

from encoder_service.config import GIB, ConfigError, flag

log = logging.getLogger(__name__)

CONTEXT_BYTES = 512 << 20
"""What CUDA takes for a process. An estimate, not measured."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device: all, free, reserved by torch, and used by torch."""

    total: int = 0
    free: int = 0
    reserved: int = 0
    allocated: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory of a device is used, in bytes. `str` describes it to people.

    `loaded` is measured after the tower has loaded and warmed up: weights, CUDA graphs, workspaces of libraries, and
    memory of other processes. Memory used after the start is computed from shapes: `forward` is the activations of the
    largest batch or image; `under_way` the rows that wait to be copied out and the patches that wait for the tower;
    `decode` the pixels being decoded and resized, and the decoder's own buffers; `tables` those of the tower's grids.
    `libraries` is what CUDA takes for the server's own process, if it has memory there, and NCCL for its buffers, if
    devices encode images together: estimates. `store` is the device tier.
    """

    total: int
    loaded: int
    forward: int
    under_way: int
    decode: int
    tables: int
    libraries: int
    store: int

    @property
    def beside(self) -> int:
        """Bytes that a second process with the same tower takes besides its weights; 0 on the CPU."""
        working = self.forward + self.under_way + self.decode + self.tables
        return working + CONTEXT_BYTES if self.total else 0

    @property
    def left(self) -> int:
        """Bytes left over; negative if the plan does not fit."""
        return self.total - self.loaded - sum(self._growing.values())

    def check(self) -> None:
        """Raise `ConfigError` if the device tier leaves too little memory for the tower and the decoder.

        Without a device tier, log a warning if the tower and the decoder may run out of memory.
        """
        if not self.total or self.left >= 0:
            return
        if not self.store:
            log.warning(
                "the device's memory may run out, and large images then fail: lower %s or %s (%s)",
                *(flag("max_image_pixels"), flag("batch_patches"), self),
            )
        else:
            most = max(self.store + self.left, 0)
            raise ConfigError(
                f"{flag('store_device_gib')} {self.store / GIB:g}: a tier of this size leaves too little of the GPU "
                f"for the tower and the decoder ({self}); at most {int(most / GIB * 100) / 100:g} GiB fit"
            )

    def __str__(self) -> str:
        parts = {"loaded": self.loaded, **self._growing}
        taken = ", ".join(f"{size / GIB:.2f} {name}" for name, size in parts.items())
        return f"of {self.total / GIB:.1f} GiB: {taken}, {self.left / GIB:.2f} left"

    @property
    def _growing(self) -> dict[str, int]:
        return {
            "largest forward": self.forward,
            "batches under way": self.under_way,
            "decoding": self.decode,
            "tables": self.tables,
            "libraries": self.libraries,
            "store": self.store,
        }
