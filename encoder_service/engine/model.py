"""What is loaded from a checkpoint folder: vision tower, processor settings, decoder."""

from dataclasses import dataclass

import torch

from encoder_service.address import Recipe
from encoder_service.config import Config, ConfigError, flag
from encoder_service.image.decode import Decoder
from encoder_service.image.processor import ProcessorSettings
from encoder_service.image.readers import missing
from encoder_service.vision import Tower, family_of, load_tower, model_fingerprint, read_config


@dataclass(frozen=True, slots=True)
class Model:
    """What is loaded from the checkpoint folder."""

    tower: Tower
    processor: ProcessorSettings
    recipe: Recipe
    decoder: Decoder
    device: str


def load_model(config: Config) -> Model:
    """Load tower, processor settings and decoder. Raises `ConfigError` naming what is missing or cannot be served."""
    if not config.model.is_dir():
        raise ConfigError(
            f"{flag('model')} {config.model}: there is no such folder (a model of the Hugging Face Hub has to be "
            "downloaded into one: hf download NAME --local-dir FOLDER)"
        )
    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    device = _device(config.device)
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
        tower = load_tower(
            config.model,
            device=device,
            dtype=dtype,
            processor=processor,
            attention=config.attention,
            batch_patches=config.batch_patches,
            batch_invariant=config.batch_invariant == "yes",
            graphs=config.cuda_graphs == "yes",
        )
        fingerprint = model_fingerprint(config.model)
        decoder = Decoder(
            device=device.replace("cuda", "gpu"),
            threads=config.decode_threads,
            max_image_pixels=config.max_image_pixels,
            backend=config.decoder,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag('model')} {config.model}: {error}") from error
    recipe = Recipe(fingerprint, processor.fingerprint, dtype)
    return Model(tower, processor, recipe, decoder, device)


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
