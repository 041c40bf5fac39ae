"""What the memory of a GPU is for: planned at start, before the device tier of the store takes its share."""

from dataclasses import dataclass
from typing import Self

from encoder_service.config import GIB, Config, ConfigError, flag
from encoder_service.engine.device import DeviceMemory
from encoder_service.engine.model import Model
from encoder_service.image.patches import RESIZED_BYTES_PER_PIXEL
from encoder_service.vision import TowerSpec


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a device: all there are, and what takes them. `str` says it to people.

    `loaded` is measured with the tower loaded and warmed up: weights, CUDA graphs, workspaces of libraries, and what
    other processes hold. `forward` and `decode` are computed from shapes: activations of the largest batch or image,
    and the pixels that are decoded and resized at a time. `store` is the device tier.
    """

    total: int
    loaded: int
    forward: int
    decode: int
    store: int

    @classmethod
    def of(cls, model: Model, memory: DeviceMemory, config: Config) -> Self:
        """Plan for a model that is loaded, on a device whose memory is in this state."""
        geometry, tower = model.processor.geometry, model.tower
        patches = max(tower.batch_patches, geometry.max_pixels // geometry.patch_size**2)
        # A batch, single images and one that is larger than those may be are decoded at the same time.
        larger = config.max_image_pixels if config.max_image_pixels > config.decode_pixels else 0
        pixels = 2 * config.decode_pixels + larger
        return cls(
            total=memory.total,
            loaded=memory.total - memory.free,
            forward=patches * activation_values(tower.spec) * tower.dtype.itemsize,
            decode=pixels * RESIZED_BYTES_PER_PIXEL,
            store=int(config.store_device_gib * GIB),
        )

    @property
    def left(self) -> int:
        """Bytes that nothing takes; negative where the plan does not fit."""
        return self.total - self.loaded - self.forward - self.decode - self.store

    def check(self) -> None:
        """Raise `ConfigError` for a device tier that leaves too little for the tower and the decoder."""
        if self.total and self.store and self.left < 0:
            most = max(self.store + self.left, 0)
            raise ConfigError(
                f"{flag('store_device_gib')} {self.store / GIB:g}: it leaves too little of the device for the tower "
                f"and the decoder ({self}); at most {int(most / GIB * 100) / 100:g} GiB fit"
            )

    def __str__(self) -> str:
        parts = {
            "loaded": self.loaded,
            "largest forward": self.forward,
            "decoding": self.decode,
            "store": self.store,
        }
        taken = ", ".join(f"{size / GIB:.2f} {name}" for name, size in parts.items())
        return f"of {self.total / GIB:.1f} GiB: {taken}, {self.left / GIB:.2f} left"


def activation_values(spec: TowerSpec) -> int:
    """Return the most values per patch that a forward holds at a time, as an upper bound.

    The residual, its norm, packed query, key and value, what attention makes of them, the MLP's inside (twice when it
    is gated), the rows of every level, and a merger's input and inside.
    """
    inside = (spec.mlp_products - 1) * spec.intermediate
    return 7 * spec.embed + inside + spec.width // spec.merge_unit + 2 * spec.embed
