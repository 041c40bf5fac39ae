"""Loads a checkpoint folder: its vision model and a decoder. Plans the device's memory, and tells the server the facts.

Only the process of a device imports this module.
"""

import logging
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from encoder_contract.checkpoint import OWN_TYPES, read_config, vision_tensors
from encoder_contract.processor import ProcessorSettings
from encoder_contract.video import VideoSettings
from encoder_service.config import GIB, Config, ConfigError, flag
from encoder_service.devices.device_reports import DeviceState, ModelFacts
from encoder_service.devices.memory_plan import CONTEXT_BYTES, MemoryPlan, MemoryUse
from encoder_service.devices.torch_device import Device
from encoder_service.families.choice import check_model, load_family
from encoder_service.families.counted_rows import CountedRows
from encoder_service.families.model import LoadOptions, VisionModel
from encoder_service.image import ffmpeg
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.decoder import DECODE_PIXELS
from encoder_service.image.decoder_child import DecoderStartError
from encoder_service.image.decoder_pool import files_decoder
from encoder_service.image.device_decoder import Decoder
from encoder_service.image.known_video import check_videos
from encoder_service.image.pillow import missing_formats
from encoder_service.image.resize import RESIZED_BYTES_PER_PIXEL
from encoder_service.keys import Recipe
from encoder_service.store.segment import unused_memory_bytes
from encoder_service.vision import Tower
from encoder_service.vision.load import DTYPES
from encoder_service.vision.ulysses import MIN_PATCHES

log = logging.getLogger(__name__)

_DEVICE_FILES = Path("/dev")

# On a GPU these threads parse files and do what its decoding engines cannot; on the CPU they compete with the tower.
DECODE_THREADS = {"cuda": 8, "cpu": 2}
# Batches whose rows exist: one is copied out, one waits in the queue, one is encoded and waits to enter the queue.
BATCHES_UNDER_WAY = 3
NCCL_BYTES = 512 << 20  # an estimate, not measured
TOWER_COUNTS = ("graph_batches", "eager_batches", "padding_patches")


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


def plan_memory(model: Model, memory: MemoryUse, config: Config, devices: int = 1) -> MemoryPlan:
    """Plan for a loaded model on a device with this memory, one of several."""
    # A batch, single images and one large image are decoded at the same time.
    larger = config.max_image_pixels if config.max_image_pixels > DECODE_PIXELS else 0
    pixels = 2 * DECODE_PIXELS + larger
    return MemoryPlan(
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


def facts_of(model: Model, config: Config, devices: int) -> ModelFacts:
    """Return the facts of a model in this process, one of `devices`."""
    tower = model.tower
    return ModelFacts(
        model_type=tower.model_type,
        spec=tower.spec if isinstance(tower, Tower) else None,
        hidden=tower.hidden,
        levels=tower.levels,
        width=tower.width,
        row_bytes=tower.width * tower.dtype.itemsize,
        recipe=model.recipe,
        videos=model.videos,
        no_videos=model.no_videos,
        attention=tower.attention,
        ahead_patches=tower.ahead_patches,
        batch_patches=tower.batch_patches,
        rule=None if isinstance(tower.geometry, CountedRows) else tower.geometry,
        max_tokens=tower.geometry.max_tokens,
        device=model.device.name,
        torch=str(torch.__version__),
        decoder=model.decoder.name,
        jpegs=model.decoder.decodes_batches,
        plan=plan_memory(model, model.device.memory(), config, devices),
        decode_threads=decode_threads(config, model.device),
        overtakes=model.device.kind == "cpu",
        group_patches=MIN_PATCHES[model.device.kind] if _is_group(tower, devices) else 0,
    )


def _is_group(tower: VisionModel, devices: int) -> bool:
    return devices > 1 and isinstance(tower, Tower) and tower.can_encode_in_group(devices)


def state_of(model: Model) -> DeviceState:
    """Return the state of a model in this process."""
    counts = Counter({name: getattr(model.tower, name) for name in TOWER_COUNTS})
    return DeviceState(
        model.device.memory(),
        counts + Counter({**model.decoder.deaths, "messages": model.decoder.messages}),
    )
