"""Multimodal features of vLLM's requests: the fields that we read, and whether the engine's tower can encode them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from encoder_contract.errors import InvalidRequestError
from encoder_contract.geometry import Grid

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Position(Protocol):
    """The place of an image's tokens: vLLM's `PlaceholderRange`."""

    offset: int
    length: int

    def get_num_embeds(self) -> int:
        """Number of tokens that rows fill."""


class Feature(Protocol):
    """An image of a request: vLLM's `MultiModalFeatureSpec`."""

    data: Any
    modality: str
    identifier: str
    mm_position: Position


class VllmRequest(Protocol):
    """The fields of vLLM's `VllmRequest` that we read."""

    request_id: str
    num_prompt_tokens: int
    mm_features: Sequence[Feature]
    ec_transfer_params: dict[str, Any] | None
    cache_salt: str | None


# By modality, for towers that take patches with a grid: the keys of pixels and grid.
_KEYS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class TowerInput:
    """The input that the engine's tower accepts.

    For towers that take patches with a grid: `patch_values` numbers for each patch (0 if unknown), and `merge`² patches
    for a row. Other towers take whatever vLLM's processor makes.

    `prunes_videos`: the engine drops rows of videos, so they have fewer rows than their grid says.

    An engine that loads embeddings through a connector accepts parts without pixels from any caller, and does not check
    tensors that replace an image. A tensor that does not fit ends the engine in the step that reads it, so `check`
    refuses it before that.
    """

    merge: int
    patch_values: int = 0
    prunes_videos: bool = False

    @classmethod
    def of(cls, config: "VllmConfig") -> Self:
        """Return the input of an engine's tower."""
        vision = getattr(config.model_config.hf_config, "vision_config", None)
        frames: int = getattr(vision, "temporal_patch_size", 0)
        side = getattr(vision, "patch_size", 0)
        if not isinstance(side, int):  # [height, width], of towers that take no patches with a grid
            side = 0
        channels: int = getattr(vision, "in_channels", 0) or getattr(vision, "in_chans", 3)
        pruning = config.model_config.multimodal_config.video_pruning_rate
        return cls(getattr(vision, "spatial_merge_size", 1), channels * frames * side**2, bool(pruning))

    def check(self, index: int, feature: Feature) -> None:
        """Raise `InvalidRequestError` if the tower cannot encode feature number `index` of a request."""
        data, modality = feature.data, feature.modality
        pixels_key, grid_key = _KEYS.get(modality, ("", ""))
        has_grid = data is not None and grid_key in data
        has_content = data is not None and any(_is_content(field.data) for field in data.values())
        if (
            not has_content
            or any(key.endswith("_embeds") for key in data)
            or (has_grid and pixels_key not in data)
        ):
            raise InvalidRequestError(f"{modality} {index} has neither pixels nor a signed name")
        if not has_grid:
            return
        grid = grid_of(feature, grid_key)
        if grid is None or min(grid) < 1 or grid.h % self.merge or grid.w % self.merge:
            raise InvalidRequestError(f"{modality} {index} has an invalid grid: {_shown(data[grid_key])}")
        self._check_pixels(index, feature, data[pixels_key].data, grid)

    def fills_placeholders(self, feature: Feature) -> bool:
        """Whether the tower makes one row for each placeholder token of a feature."""
        return not (self.prunes_videos and feature.modality == "video")

    def _check_pixels(self, index: int, feature: Feature, pixels: object, grid: Grid) -> None:
        what = f"{feature.modality} {index}"
        if feature.modality == "image" and grid.t != 1:
            raise InvalidRequestError(f"{what} has {grid.t} frames, but an image has one")
        shape = tuple(pixels.shape) if isinstance(pixels, torch.Tensor) else ()
        fits = isinstance(pixels, torch.Tensor) and not pixels.is_complex() and len(shape) == 2
        if not fits or shape[0] != grid.patches or (self.patch_values and shape[1] != self.patch_values):
            raise InvalidRequestError(
                f"{what} has pixels of shape {shape}; its grid {tuple(grid)} is {grid.patches} patches of "
                f"{self.patch_values or 'some'} values"
            )
        tokens, rows = feature.mm_position.get_num_embeds(), grid.patches // self.merge**2
        if tokens != rows and self.fills_placeholders(feature):
            raise InvalidRequestError(
                f"{what} has {tokens} placeholder tokens, but its grid makes {rows} rows"
            )


def _is_content(value: object) -> bool:
    """Whether a value of a part is pixels or sound. Values that only describe them are integers."""
    if isinstance(value, list | tuple):
        return any(map(_is_content, value))
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.dtype is torch.uint8)


def grid_of(feature: Feature, key: str) -> Grid | None:
    """Return the grid of a feature under `key`; None if it is not three whole numbers."""
    tensor = feature.data[key].data
    if not isinstance(tensor, torch.Tensor) or tensor.shape != (3,) or tensor.dtype not in _INTEGERS:
        return None
    return Grid(*tensor.tolist())


def _shown(field: Any) -> object:
    """Return what an error message shows of a tensor: its values if they are few."""
    tensor = field.data
    short = isinstance(tensor, torch.Tensor) and tensor.numel() <= 8
    return tensor.tolist() if short else type(tensor).__name__
