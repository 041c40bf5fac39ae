"""The images of a request as vLLM describes them: the place of their tokens, and whether its tower can encode them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import torch

from encoder_contract.errors import InvalidRequestError
from encoder_contract.geometry import Grid
from prefill_client.vllm.counts import Counts

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Position(Protocol):
    """The place of an image's tokens: vLLM's `PlaceholderRange`."""

    offset: int
    length: int

    def get_num_embeds(self) -> int:
        """Number of the tokens that are filled by rows."""


class Feature(Protocol):
    """An image of a request: vLLM's `MultiModalFeatureSpec`."""

    data: Any
    modality: str
    identifier: str
    mm_position: Position


class Request(Protocol):
    """The fields of vLLM's `Request` that we read."""

    request_id: str
    mm_features: Sequence[Feature]
    ec_transfer_params: dict[str, Any] | None
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[begin, end)` of a prompt, filled by the rows of an image."""

    begin: int
    end: int
    index: int  # among the request's multimodal features
    identifier: str
    rows: int


AnySpan = TypeVar("AnySpan", bound=Span)


@dataclass(slots=True, kw_only=True)
class PromptImages(Generic[AnySpan]):
    """The images of a request that a gate handles, in the order of the prompt."""

    spans: list[AnySpan]
    features: int  # number of multimodal features when the request was read
    held: dict[int, AnySpan] = field(default_factory=dict)  # images that the table holds for it, by index
    parked_s: float = 0.0  # when its wait began, on the steady clock; 0: it does not wait

    @property
    def end(self) -> int:
        """The token after its last image."""
        return self.spans[-1].end if self.spans else 0

    def note_wait(self, counts: Counts, *, ready: bool) -> None:
        """Begin a wait, or count the one that has ended."""
        if not ready:
            self.parked_s = self.parked_s or monotonic()
        elif self.parked_s:
            counts.waited(monotonic() - self.parked_s)
            self.parked_s = 0.0


# By modality: the pixels and the grid, where a tower takes patches with a grid.
_KEYS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
_WHOLE = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class TowerInput:
    """The input of the engine's tower: `patch_values` numbers for each patch, 0 if unknown; `merge`² patches for a row.

    Both are of towers that take patches with a grid; other towers take what vLLM's processor makes.

    `prunes_videos`: the engine drops rows of videos, so their number is not that of their grid.

    An engine that loads embeddings through a connector accepts parts without pixels from any caller, and does not check
    tensors that replace an image. One that does not fit ends the engine in the step that reads it, so `check` refuses
    it before that.
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
        """Raise `InvalidRequestError` if feature number `index` of a request is nothing that the tower can encode."""
        data, modality = feature.data, feature.modality
        pixels_key, grid_key = _KEYS.get(modality, ("", ""))
        has_grid = data is not None and grid_key in data
        has_content = data is not None and any(_is_content(field.data) for field in data.values())
        if (
            not has_content
            or any(key.endswith("_embeds") for key in data)
            or (has_grid and pixels_key not in data)
        ):
            raise InvalidRequestError(f"{modality} {index} has neither pixels nor a name of ours")
        if not has_grid:
            return
        grid = grid_of(feature, grid_key)
        if grid is None or min(grid) < 1 or grid.h % self.merge or grid.w % self.merge:
            raise InvalidRequestError(f"{modality} {index} has an invalid grid: {_said(data[grid_key])}")
        self._check_pixels(index, feature, data[pixels_key].data, grid)

    def shares(self, feature: Feature) -> bool:
        """Whether the tower makes as many rows of a feature as the prompt has places for them."""
        return not (self.prunes_videos and feature.modality == "video")

    def _check_pixels(self, index: int, feature: Feature, pixels: object, grid: Grid) -> None:
        what = f"{feature.modality} {index}"
        if feature.modality == "image" and grid.t != 1:
            raise InvalidRequestError(f"{what} has {grid.t} frames, but an image has one")
        shape = tuple(pixels.shape) if isinstance(pixels, torch.Tensor) else ()
        right = isinstance(pixels, torch.Tensor) and not pixels.is_complex() and len(shape) == 2
        if not right or shape[0] != grid.patches or (self.patch_values and shape[1] != self.patch_values):
            raise InvalidRequestError(
                f"{what} has pixels of shape {shape}; its grid {tuple(grid)} is {grid.patches} patches of "
                f"{self.patch_values or 'some'} values"
            )
        tokens, rows = feature.mm_position.get_num_embeds(), grid.patches // self.merge**2
        if tokens != rows and self.shares(feature):
            raise InvalidRequestError(
                f"{what} has {tokens} placeholder tokens, but its grid makes {rows} rows"
            )


def _is_content(value: object) -> bool:
    """Whether a value of a part is pixels or sound; what only describes them are whole numbers."""
    if isinstance(value, list | tuple):
        return any(map(_is_content, value))
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.dtype is torch.uint8)


def grid_of(feature: Feature, key: str) -> Grid | None:
    """Return the grid of a feature under `key`; None if it is not three whole numbers."""
    tensor = feature.data[key].data
    if not isinstance(tensor, torch.Tensor) or tensor.shape != (3,) or tensor.dtype not in _WHOLE:
        return None
    return Grid(*tensor.tolist())


def _said(field: Any) -> object:
    tensor = field.data
    short = isinstance(tensor, torch.Tensor) and tensor.numel() <= 8
    return tensor.tolist() if short else type(tensor).__name__
