"""The model's image processor settings, read from a Hugging Face checkpoint folder.

They determine pixels, grids and normalisation of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Qwen4-Exp. A start
rejects unsupported settings: ignoring one would change the pixels, and silently cost accuracy.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import blake3

from encoder_contract.checkpoint import read_spec
from encoder_contract.geometry import Geometry
from encoder_contract.json_file import read_json_object
from encoder_contract.settings import ConfigError, flag, require_folder

# Part of the fingerprint. Raise it when our decoding or resizing changes pixels, so that old and new embeddings have
# different addresses.
PIXELS_VERSION = 3

# Names of the same arithmetic in different versions of `transformers`.
SMART_RESIZE_PROCESSORS = (
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorFast",
    "Qwen2VLImageProcessorPil",
    "Qwen2_5_VLImageProcessor",
)

# Settings of which we implement one value. Absent means this value, as in `transformers`.
_FIXED: dict[str, object] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,  # PIL's number for bicubic
}


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """Geometry and normalisation of a model's image processor.

    A pixel value v in 0..255 of channel c becomes (v × `rescale_factor` − `mean`[c]) / `std`[c].
    """

    geometry: Geometry
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (*self.mean, *self.std, self.rescale_factor))):
            raise ValueError("image_mean, image_std and rescale_factor must be finite")
        if min(self.std) <= 0 or self.rescale_factor <= 0:
            raise ValueError("image_std and rescale_factor must be positive")

    @property
    def fingerprint(self) -> bytes:
        """32 bytes: BLAKE3 over everything that determines the vision tower's input."""
        geometry = self.geometry
        canonical = {
            "pixels_version": PIXELS_VERSION,
            "patch_size": geometry.patch_size,
            "merge_size": geometry.merge_size,
            "min_pixels": geometry.min_pixels,
            "max_pixels": geometry.max_pixels,
            "mean": self.mean,
            "std": self.std,
            "rescale_factor": self.rescale_factor,
            **_FIXED,
        }
        return blake3.blake3(json.dumps(canonical, sort_keys=True).encode()).digest()

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read the settings of a checkpoint folder.

        As `transformers` does, `image_processor` inside processor_config.json wins over
        preprocessor_config.json. Raises `FileNotFoundError` if there is neither, and `ValueError`, which names the file
        and the setting, if one is missing, malformed or not supported.
        """
        path, settings = _find_settings(Path(folder))
        try:
            _refuse_unsupported(settings)
            return cls._from_mapping(settings)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _from_mapping(cls, settings: Mapping[str, Any]) -> Self:
        min_pixels, max_pixels = _pixel_bounds(settings)
        geometry = Geometry(
            patch_size=_whole(settings, "patch_size"),
            merge_size=_whole(settings, "merge_size"),
            min_pixels=min_pixels,
            max_pixels=max_pixels,
        )
        return cls(
            geometry=geometry,
            mean=_three(settings, "image_mean"),
            std=_three(settings, "image_std"),
            rescale_factor=_number("rescale_factor", settings.get("rescale_factor", 1 / 255)),
        )


def read_processor(folder: Path) -> ProcessorSettings:
    """Read the image processor settings of a checkpoint folder, whose model must be servable. Reads no weights.

    Reads config.json first, so that an error names an unsupported model before a missing file. Raises `ConfigError`.
    """
    require_folder("model", folder)
    try:
        read_spec(folder)
        return ProcessorSettings.from_folder(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag('model')} {folder}: {error}") from error


def _find_settings(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    nested_path, path = folder / "processor_config.json", folder / "preprocessor_config.json"
    if nested_path.is_file():
        nested = read_json_object(nested_path).get("image_processor")
        if isinstance(nested, dict):
            return nested_path, nested
    if path.is_file():
        return path, read_json_object(path)
    raise FileNotFoundError(
        f"{folder} has no image processor settings: neither preprocessor_config.json"
        " nor an image_processor in processor_config.json"
        " (download the whole model: hf download NAME --local-dir FOLDER)"
    )


def _refuse_unsupported(settings: Mapping[str, Any]) -> None:
    kind = settings.get("image_processor_type")
    if kind is not None and kind not in SMART_RESIZE_PROCESSORS:
        supported = ", ".join(SMART_RESIZE_PROCESSORS)
        raise ValueError(f"image_processor_type {kind!r} is not supported (supported: {supported})")
    for name, value in _FIXED.items():
        found = settings.get(name)
        if found is not None and found != value:
            raise ValueError(f"{name} = {found!r} is not supported, only {value!r}")


def _pixel_bounds(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return (min_pixels, max_pixels). The top-level names win over `size`, as in `transformers`."""
    size = settings.get("size")
    edges: Mapping[str, Any] = size if isinstance(size, dict) else {}
    bounds: list[int] = []
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if settings.get(name) is not None:
            bounds.append(_whole(settings, name))
        elif edges.get(edge) is not None:
            bounds.append(_whole(edges, edge))
        else:
            raise ValueError(f"neither {name} nor size.{edge} is set")
    return bounds[0], bounds[1]


def _whole(settings: Mapping[str, Any], name: str) -> int:
    if settings.get(name) is None:
        raise ValueError(f"{name} is not set")
    value = settings[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _three(settings: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    values = settings.get(name)
    if values is None:
        raise ValueError(f"{name} is not set")
    if not isinstance(values, list) or len(values) != 3:
        raise ValueError(f"{name} must have three numbers, one per channel, got {values!r}")
    red, green, blue = (_number(name, value) for value in values)
    return red, green, blue
