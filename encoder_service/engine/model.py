"""What is loaded from a checkpoint folder: vision tower, processor settings, decoder, what resizes."""

from dataclasses import dataclass

import torch

from encoder_service.address import Recipe
from encoder_service.config import Config, ConfigError, flag
from encoder_service.engine.device import Device
from encoder_service.image.decode import Decoder
from encoder_service.image.decoder_parent import DecoderStartError
from encoder_service.image.isolated import IsolatedDecoder
from encoder_service.image.processor import ProcessorSettings
from encoder_service.image.readers import missing
from encoder_service.image.resize import Resize
from encoder_service.image.resize_choice import make_resize
from encoder_service.vision import (
    NoTower,
    Tower,
    configuration_fingerprint,
    family_of,
    load_tower,
    model_fingerprint,
    read_config,
)

# On a GPU they parse files and run what its engines do not; on the CPU they contend with the tower for cores.
DECODE_THREADS = {"cuda": 8, "cpu": 2}


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
    if not config.model.is_dir():
        raise ConfigError(
            f"{flag('model')} {config.model}: there is no such folder (a model of the Hugging Face Hub has to be "
            "downloaded into one: hf download NAME --local-dir FOLDER)"
        )
    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    device = "cpu" if config.stores_only else _device(config.device)
    if lacking := missing(config.accepted_formats):
        raise ConfigError(
            f"{flag('formats')}: Pillow was built without {', '.join(lacking)}; its own wheels have everything"
        )
    try:
        # First: of what is no vision model, that is to be said.
        content = read_config(config.model)
        family = family_of(content)
        family.spec(content)
        processor = family.processor(config.model)
        dtype = _dtype(config)
        decoder = _decoder(config, device)
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
    """Return the decoder, which may still be starting, as the tower's weights are yet to be read."""
    place, threads = device.replace("cuda", "gpu"), decode_threads(config, Device(device))
    if config.stores_only:
        return Decoder(place, backend="pillow")
    if config.decoder_process == "no" or (config.decoder_process == "auto" and device != "cpu"):
        return Decoder(
            place, threads=threads, backend=config.decoder, max_image_pixels=config.max_image_pixels
        )
    return IsolatedDecoder(
        place,
        threads=threads,
        backend=config.decoder,
        max_image_pixels=config.max_image_pixels,
        decode_pixels=config.decode_pixels,
        cpu_s=config.decode_limit_s,
    )


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
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch {torch.__version__} sees no CUDA device; use --device cpu")
    return name
