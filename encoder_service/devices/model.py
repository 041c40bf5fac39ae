"""Loads a checkpoint folder: its vision model and a decoder. Plans the device's memory.

`MemoryPlan` divides the memory of a GPU at start, before the device tier of the store takes its share.
"""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from encoder_contract.checkpoint import OWN_TYPES, read_config, vision_tensors
from encoder_contract.processor import ProcessorSettings
from encoder_contract.video import VideoSettings
from encoder_service.config import GIB, Config, ConfigError, flag
from encoder_service.devices.torch_device import Device, MemoryUse
from encoder_service.families.choice import check_model, load_family
from encoder_service.families.model import LoadOptions, VisionModel
from encoder_service.image import ffmpeg
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.decoder import (
    DECODE_PIXELS,
    Decoder,
    FileDecoder,
    PillowDecoder,
)
from encoder_service.image.decoder_child import DecoderStartError
from encoder_service.image.decoder_pool import DecoderPool
from encoder_service.image.known_video import check_videos
from encoder_service.image.pillow import missing_formats
from encoder_service.image.resize import RESIZED_BYTES_PER_PIXEL
from encoder_service.keys import Recipe
from encoder_service.store.segment import unused_memory_bytes
from encoder_service.vision.load import DTYPES

log = logging.getLogger(__name__)

_DEVICE_FILES = Path("/dev")

# On a GPU these threads parse files and do what its decoding engines cannot; on the CPU they compete with the tower.
DECODE_THREADS = {"cuda": 8, "cpu": 2}
# Batches whose rows exist: one is copied out, one waits in the queue, one is encoded and waits to enter the queue.
BATCHES_UNDER_WAY = 3
# Estimates, not measured.
CONTEXT_BYTES = 512 << 20
NCCL_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """The model loaded from the checkpoint folder, in this process or in the process of each device.

    `videos` names the decoder of videos. If videos are not taken, it is empty, and `no_videos` is the reason.
    """

    tower: VisionModel
    recipe: Recipe
    decoder: Decoder
    device: Device
    videos: str = ""
    no_videos: str = "none are decoded here"


def load_model(config: Config, processes: int = 1, beside_bytes: int = 0) -> Model:
    """Load a `Model` into this process. Raises `ConfigError` naming what is missing or cannot be served.

    The configuration names one device; on the CPU, `processes` of them load at the same time. `beside_bytes` as in
    `messages.Load`.
    """
    check_model(config.model)
    device = _device(config.devices)
    if lacking := missing_formats(config.accepted_formats):
        raise ConfigError(
            f"{flag('formats')}: Pillow was built without {', '.join(lacking)}; its own wheels have everything"
        )
    Device(device).make_current()
    _check_memory(config, Device(device), processes, beside_bytes)
    decoder = _decoder(config, device)
    try:
        before = _state_of(config.model)
        tower = _tower(config, device, _dtype(config))
        if _state_of(config.model) != before:
            raise ValueError("its files changed while they were read: load it when it is complete")
        decoder.start()
    except (OSError, ValueError, DecoderStartError) as error:
        raise ConfigError(f"{flag('model')} {config.model}: {error}") from error
    try:
        settings = _video_settings(config, tower)
        check_videos(decoder)
    except (OSError, ValueError, DecoderStartError) as error:
        if config.video == "yes":
            raise ConfigError(f"{flag('video')} yes: {error}") from error
        return Model(tower, tower.recipe, decoder, Device(device), no_videos=str(error))
    videos = ffmpeg.installed().name
    recipe = replace(tower.recipe, video=videos.encode() + settings.canonical())
    return Model(tower, recipe, decoder, Device(device), videos)


def _video_settings(config: Config, tower: VisionModel) -> VideoSettings:
    """Return how the model's videos are processed. Raises `ValueError` or `OSError` with the reason not to take any."""
    if config.video == "no":
        raise ValueError(f"{flag('video')} is no")
    if not tower.takes_frames:
        raise ValueError(f"model_type {tower.model_type!r} has no tower of the server's own")
    if config.decoder_process == "no":
        raise ValueError(
            f"{flag('decoder_process')} is no, and videos are decoded in separate processes only"
        )
    ffmpeg.installed()
    videos, images = VideoSettings.from_folder(config.model), ProcessorSettings.from_folder(config.model)
    for name in ("mean", "std", "rescale_factor"):
        of_video, of_image = getattr(videos, name), getattr(images, name)
        if of_video != of_image:
            raise ValueError(
                f"the {name} of videos is {of_video}, that of images {of_image}: they must be equal"
            )
    return videos


def decode_threads(config: Config, device: Device) -> int:
    """Return the number of decode threads: the setting, or the default of the device."""
    return config.decode_threads or DECODE_THREADS[device.kind]


def _decoder(config: Config, device: str) -> Decoder:
    """Return the decoder. It may still be starting, while the tower's weights are read.

    Raises `ConfigError` for settings that contradict each other, and if DALI is requested and not installed.
    """
    threads = decode_threads(config, Device(device))
    jpegs = _jpegs(config, device, threads)
    return Decoder(torch.device(device), files_decoder(config, threads), jpegs)


def files_decoder(config: Config, threads: int) -> FileDecoder:
    """Return the decoder of single files and headers, for this many threads. It may still be starting."""
    if config.decoder_process == "no":
        return PillowDecoder()
    return DecoderPool(threads, max_image_pixels=config.max_image_pixels)


def _jpegs(config: Config, device: str, threads: int) -> DaliJpegs | None:
    """Return DALI on a GPU; None if the settings exclude it, or by default if it is not installed."""
    if config.decoder == "dali":
        if device == "cpu":
            raise ConfigError(
                f"{flag('decoder')} dali decodes on a GPU: leave it out with {flag('devices')} cpu"
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
        log.warning(
            "decoder: JPEGs are decoded on the CPU, not by DALI on the GPU: %s (the extra gpu has it)", error
        )
        return None


def _tower(config: Config, device: str, dtype: str) -> VisionModel:
    options = LoadOptions(
        device=device,
        dtype=dtype,
        attention=config.attention,
        batch_patches=config.batch_patches,
        batch_invariant=config.batch_invariant == "yes",
        graphs=config.cuda_graphs == "yes",
        trust_remote_code=config.trust_remote_code == "yes",
    )
    return load_family(config.model, options)


def _state_of(folder: Path) -> set[tuple[str, int, int, int]]:
    """Return name, inode, size and time of the last change of each file that decides rows."""
    files = [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".py")]
    found = [(path.name, path.stat()) for path in files]
    return {(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found}


def _check_memory(config: Config, device: Device, processes: int, beside_bytes: int) -> None:
    """Raise `ConfigError` if the weights of one of the server's own towers do not fit the device's free memory."""
    try:
        if read_config(config.model).get("model_type") not in OWN_TYPES:
            return
        values = sum(math.prod(tensor.shape) for tensor in vision_tensors(config.model).values())
        needed = values * DTYPES[_dtype(config)].itemsize + beside_bytes
    except (OSError, ValueError, KeyError):
        return  # loading reports what is wrong
    free = unused_memory_bytes() // processes if device.kind == "cpu" else device.memory().free
    if needed > free:
        raise ConfigError(
            f"{flag('devices')} {device.name}: the tower's weights take {needed / GIB:.2f} GiB"
            f"{' with what it needs for images' if beside_bytes else ''}, and "
            f"{free / GIB:.2f} GiB are free for them: free memory there, or leave the device out"
        )


def _dtype(config: Config) -> str:
    """Return the element type: the setting, by default the checkpoint's."""
    if config.dtype != "auto":
        return config.dtype
    content = read_config(config.model)
    for part in (content, content.get("text_config") or {}):
        if found := part.get("dtype") or part.get("torch_dtype"):
            return str(found)
    return "bfloat16"


def _device(name: str) -> str:
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda:0"
        if gpus := list(_DEVICE_FILES.glob("nvidia[0-9]*")):
            log.warning(
                "%s auto: the CPU, although %s is there: %s", flag("devices"), gpus[0], _why_no_cuda()
            )
        return "cpu"
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= (seen := torch.cuda.device_count()):
        raise ConfigError(
            f"{flag('devices')} {name}: torch {torch.__version__} sees {seen} CUDA devices; use {flag('devices')} cpu"
        )
    return name


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: install the one for this machine's driver"
    return (
        f"torch's CUDA {torch.version.cuda} finds no device: is the driver new enough (`nvidia-smi` prints the CUDA "
        "that it serves), and CUDA_VISIBLE_DEVICES not empty?"
    )


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

    @classmethod
    def of(cls, model: Model, memory: MemoryUse, config: Config, devices: int = 1) -> Self:
        """Plan for a loaded model on a device with this memory, one of several."""
        # A batch, single images and one large image are decoded at the same time.
        larger = config.max_image_pixels if config.max_image_pixels > DECODE_PIXELS else 0
        pixels = 2 * DECODE_PIXELS + larger
        return cls(
            total=memory.total,
            loaded=memory.total - memory.free,
            forward=model.tower.forward_bytes,
            # The rows of the last batch are part of `forward`.
            under_way=(BATCHES_UNDER_WAY - 1) * model.tower.batch_bytes,
            decode=pixels * RESIZED_BYTES_PER_PIXEL + model.decoder.device_bytes,
            tables=model.tower.table_bytes,
            libraries=CONTEXT_BYTES * (config.store_device_gib > 0) + NCCL_BYTES * (devices > 1),
            store=int(config.store_device_gib * GIB),
        )

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
