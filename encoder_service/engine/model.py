"""Loads a checkpoint folder: vision tower, processor settings, decoder, resize; and plans the device's memory.

`MemoryPlan` divides the memory of a GPU at start, before the device tier of the store takes its share.
"""

import logging
from dataclasses import dataclass
from typing import Self

import torch

from encoder_contract.checkpoint import configuration_fingerprint, model_fingerprint, read_config
from encoder_contract.processor import ProcessorSettings, read_processor
from encoder_contract.tower_spec import TowerSpec
from encoder_service.config import GIB, Config, ConfigError, flag
from encoder_service.engine.device import Device, DeviceMemory
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.decoder import DECODE_PIXELS, Decoder, FileDecoder, PillowDecoder
from encoder_service.image.decoder_pool import DecoderPool, DecoderStartError
from encoder_service.image.pillow import missing
from encoder_service.image.resize import RESIZED_BYTES_PER_PIXEL, Resize
from encoder_service.image.resize_choice import make_resize
from encoder_service.keys import Recipe
from encoder_service.vision import NoTower, Tower, load_tower

log = logging.getLogger(__name__)

# On a GPU they parse files and run what its engines do not; on the CPU they contend with the tower for cores.
DECODE_THREADS = {"cuda": 8, "cpu": 2}
# Batches whose rows exist: one is copied out, one waits for that, and one was encoded and waits to be handed over.
BATCHES_UNDER_WAY = 3


@dataclass(frozen=True, slots=True)
class Model:
    """What is loaded from the checkpoint folder."""

    tower: Tower
    processor: ProcessorSettings
    recipe: Recipe
    decoder: Decoder
    resize: Resize
    device: Device


def load_model(config: Config) -> Model:
    """Load what a `Model` is. Raises `ConfigError` naming what is missing or cannot be served.

    A server that only stores needs neither weights nor a device: of its folder only the configuration is read.
    """
    processor = read_processor(config.model)
    device = "cpu" if config.stores_only else _device(config.device)
    if lacking := missing(config.accepted_formats):
        raise ConfigError(
            f"{flag('formats')}: Pillow was built without {', '.join(lacking)}; its own wheels have everything"
        )
    decoder = _decoder(config, device)
    try:
        dtype = _dtype(config)
        tower = _tower(config, device, dtype, processor)
        resize = make_resize(processor.geometry, torch.device(device))
        decoder.start()
        fingerprint = _fingerprint(config)
    except (OSError, ValueError, DecoderStartError) as error:
        raise ConfigError(f"{flag('model')} {config.model}: {error}") from error
    recipe = Recipe(fingerprint, processor.fingerprint, dtype)
    return Model(tower, processor, recipe, decoder, resize, Device(device))


def decode_threads(config: Config, device: Device) -> int:
    """Return on how many threads to decode: what was asked for, or as many as suit the device."""
    return config.decode_threads or DECODE_THREADS[device.kind]


def _decoder(config: Config, device: str) -> Decoder:
    """Return the decoder, which may still be starting, as the tower's weights are yet to be read.

    Raises `ConfigError` for settings that do not fit together, and if DALI was asked for and is not installed.
    """
    if config.stores_only:
        return Decoder(torch.device(device), PillowDecoder())
    threads = decode_threads(config, Device(device))
    jpegs = _jpegs(config, device, threads)
    files: FileDecoder
    if config.decoder_process == "no":
        files = PillowDecoder()
    else:
        files = DecoderPool(threads, max_image_pixels=config.max_image_pixels, cpu_s=config.decode_limit_s)
    return Decoder(torch.device(device), files, jpegs)


def _jpegs(config: Config, device: str, threads: int) -> DaliJpegs | None:
    """Return DALI on a GPU, unless it is not to be used there or, by default, is not installed."""
    if config.decoder == "dali":
        if device == "cpu":
            raise ConfigError(
                f"{flag('decoder')} dali decodes on a GPU: leave it out with {flag('device')} cpu"
            )
        if config.decoder_process == "yes":
            raise ConfigError(
                f"{flag('decoder')} dali decodes in the server's process: use {flag('decoder_process')} auto"
            )
    if device == "cpu" or config.decoder == "pillow" or config.decoder_process == "yes":
        return None
    try:
        return DaliJpegs(torch.device(device), threads)
    except ValueError as error:
        if config.decoder == "dali":
            raise ConfigError(f"{flag('decoder')} dali: {error}") from error
        return None


def _tower(config: Config, device: str, dtype: str, processor: ProcessorSettings) -> Tower:
    if config.stores_only:
        return NoTower(config.model, dtype=dtype, processor=processor)
    return load_tower(
        config.model,
        device=device,
        dtype=dtype,
        processor=processor,
        attention=config.attention,
        batch_patches=config.batch_patches,
        batch_invariant=config.batch_invariant == "yes",
        graphs=config.cuda_graphs == "yes",
        precision=config.tower_precision,
    )


def _fingerprint(config: Config) -> bytes:
    if not config.stores_only:
        return model_fingerprint(config.model, config.tower_precision)
    return bytes.fromhex(config.model_fingerprint) or configuration_fingerprint(config.model)


def _dtype(config: Config) -> str:
    """Return the element type to use: the checkpoint's own unless one was asked for."""
    if config.dtype != "auto":
        return config.dtype
    content = read_config(config.model)
    for part in (content, content.get("text_config") or {}):
        if found := part.get("dtype") or part.get("torch_dtype"):
            return str(found)
    return "bfloat16"


def _device(name: str) -> str:
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= (seen := torch.cuda.device_count()):
        raise ConfigError(
            f"{flag('device')} {name}: torch {torch.__version__} sees {seen} CUDA devices; use {flag('device')} cpu"
        )
    return name


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a device: all there are, and what takes them. `str` says it to people.

    `loaded` is measured with the tower loaded and warmed up: weights, CUDA graphs, workspaces of libraries, and what
    other processes hold. What grows after the start is computed, from shapes: `forward`, the activations of the largest
    batch or image; `under_way`, rows that wait to be copied out, and patches that wait for the tower; `decode`, the
    pixels that are decoded and resized at a time, and the decoder's own buffers; `tables`, those of the tower's grids.
    `store` is the device tier.
    """

    total: int
    loaded: int
    forward: int
    under_way: int
    decode: int
    tables: int
    store: int

    @classmethod
    def of(cls, model: Model, memory: DeviceMemory, config: Config) -> Self:
        """Plan for a model that is loaded, on a device whose memory is in this state."""
        geometry, tower = model.processor.geometry, model.tower
        patches = max(tower.batch_patches, geometry.max_pixels // geometry.patch_size**2)
        # A batch, single images and one that is larger than those may be are decoded at the same time.
        larger = config.max_image_pixels if config.max_image_pixels > DECODE_PIXELS else 0
        pixels = 2 * DECODE_PIXELS + larger
        return cls(
            total=memory.total,
            loaded=memory.total - memory.free,
            forward=patches * activation_values(tower.spec) * tower.dtype.itemsize,
            under_way=BATCHES_UNDER_WAY * patches * batch_bytes(tower.spec, tower.dtype),
            decode=pixels * RESIZED_BYTES_PER_PIXEL + model.decoder.device_bytes,
            tables=tower.table_bytes,
            store=int(config.store_device_gib * GIB),
        )

    @property
    def left(self) -> int:
        """Bytes that nothing takes; negative where the plan does not fit."""
        return self.total - self.loaded - sum(self._growing.values())

    def check(self) -> None:
        """Raise `ConfigError` for a device tier that leaves too little for the tower and the decoder.

        Without a device tier, warn where the tower and the decoder may not find all they need.
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
                f"{flag('store_device_gib')} {self.store / GIB:g}: it leaves too little of the device for the tower "
                f"and the decoder ({self}); at most {int(most / GIB * 100) / 100:g} GiB fit"
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
            "store": self.store,
        }


def activation_values(spec: TowerSpec) -> int:
    """Return the most values per patch that a forward holds at a time, as an upper bound.

    The residual, its norm, packed query, key and value, what attention makes of them, the MLP's inside (twice when it
    is gated), the rows of every level, and a merger's input and inside.
    """
    inside = (spec.mlp_products - 1) * spec.intermediate
    return 7 * spec.embed + inside + spec.width // spec.merge_unit + 2 * spec.embed


def batch_bytes(spec: TowerSpec, dtype: torch.dtype) -> int:
    """Return the bytes per patch that a batch takes outside of its forward: its patches before, its rows after."""
    return spec.patch_values + -(-spec.width * dtype.itemsize // spec.merge_unit)
