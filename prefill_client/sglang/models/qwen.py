"""SGLang's models, with image rows from the encoder service.

SGLang asks a model for the rows of images that overlap the next prefill chunk and are not in its own cache. These
classes fetch the rows instead of running the tower. If rows do not arrive, SGLang's tower encodes the images, on all
tensor-parallel ranks. If it cannot encode them either, their requests end.
"""

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import torch
from PIL import Image, ImageOps
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.models import qwen2_5_vl, qwen3_5, qwen3_vl, qwen3_vl_moe
from sglang.srt.runtime_context import get_model
from torch import Tensor
from transformers import AutoImageProcessor

from encoder_contract.errors import InvalidImageError
from prefill_client.sglang.counts import count
from prefill_client.sglang.ending import ImagesWithoutRows
from prefill_client.sglang.image_name import SglangImageName, file_of
from prefill_client.sglang.rows import ChunkRows, Found, agreed, counts_here
from prefill_client.sglang.sglang_settings import SglangSettings
from prefill_client.sglang.start import check_packages, check_tower, checkpoint_of_engine
from prefill_client.sglang.tower import TowerWeights

_log = logging.getLogger("sglang.encoder_service")

_LOST = "the encoder service does not answer, and SGLang cannot read this image itself; retry"

Items = Mapping[int, MultimodalDataItem]
"""Images by their index in the call."""


class EncoderServiceRows:
    """A mixin that precedes one of SGLang's models in the class's bases."""

    visual: torch.nn.Module

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # of SGLang's model
        check_packages()
        check_tower(getattr(self, "visual", None))
        vision, model = config.vision_config, get_model()
        self._merged = vision.spatial_merge_size**2
        self._width = vision.out_hidden_size * (
            1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
        )
        settings = SglangSettings.from_environment()
        self._rows = ChunkRows(settings)
        self._without_rows = ImagesWithoutRows()
        self._without_rows.watch_forwards()
        self._tower_weights = TowerWeights(
            lambda: self.visual,
            checkpoint_of_engine,
            torch.get_default_dtype(),
            takes_any_model=settings.takes_any_model,
        )
        self._tower_weights.watch_updates(self)  # type: ignore[arg-type]  # one of SGLang's models
        # Load it now, because nothing may fail at the time when the service does.
        self._image_processor = AutoImageProcessor.from_pretrained(
            model.model_path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """Load weights as SGLang's model does, and compare those of vision with the tower's."""
        load = super().load_weights  # type: ignore[misc]  # of SGLang's model
        return self._tower_weights.load(lambda noted: load(noted, *args, **kwargs), weights)

    def get_image_feature(self, items: Sequence[MultimodalDataItem]) -> Tensor | list[Tensor]:
        """Return the rows of images, [tokens, width] of each. If none has a name, return SGLang's own result."""
        names = {index: name for index, item in enumerate(items) if (name := SglangImageName.of_item(item))}
        if not names:
            return self._by_own_tower(items)
        fetched, reason = self._fetched([(name, items[index]) for index, name in names.items()])
        here = agreed([isinstance(rows, Tensor) for rows in fetched])
        found = {
            index: rows
            for index, rows, is_here in zip(names, fetched, here, strict=True)
            if is_here and isinstance(rows, Tensor)
        }
        missing = {index: item for index, item in enumerate(items) if index not in found}
        if missing:
            errors = zip(names, fetched, strict=True)
            invalid = {index: each.message for index, each in errors if isinstance(each, InvalidImageError)}
            found |= self._encoded_here(missing, names, invalid, reason)
        return [found[index] for index in range(len(items))]

    def _fetched(
        self, images: Sequence[tuple[SglangImageName, MultimodalDataItem]]
    ) -> tuple[list[Found], str]:
        """Return what the service has for these images, and why this tower encodes those without rows."""
        fingerprint = self._tower_weights.fingerprint
        if fingerprint is None:
            return [None] * len(images), "weights"
        reason = "rows" if self._tower_weights.are_those_of_the_start else "weights"
        return self._rows.fetch(images, self._weight, fingerprint), reason

    @property
    def _weight(self) -> Tensor:
        return next(self.visual.parameters())

    def _encoded_here(
        self, items: Items, names: Mapping[int, SglangImageName], invalid: Mapping[int, str], reason: str
    ) -> dict[int, Tensor]:
        """Return the rows of images from SGLang's own tower, and zeros for the images whose requests end.

        `invalid` has the service's reason for each image that it cannot decode: its request ends with 400. A request
        ends with 503 if the service did not answer and its image cannot be read here. `reason` is counted.
        """
        pixels = {
            index: None if index in invalid else self._with_pixels(item, names[index])
            for index, item in items.items()
            if index in names
        }
        readable = agreed([item is not None for item in pixels.values()])
        lost = {index for index, is_readable in zip(pixels, readable, strict=True) if not is_readable}
        encoded = {index: pixels.get(index) or item for index, item in items.items() if index not in lost}
        sizes = [int(item.image_grid_thw.prod(-1).sum()) // self._merged for item in encoded.values()]
        rows = torch.split(self._by_own_tower([*encoded.values()]), sizes) if encoded else ()
        if counts_here():
            count("own_tower_images", reason, len(pixels) - len(lost))
            count("lost_images", "", len(lost - invalid.keys()))
        for index in lost:
            if index in invalid:
                self._without_rows.add(items[index], HTTPStatus.BAD_REQUEST, invalid[index])
            else:
                self._without_rows.add(items[index], HTTPStatus.SERVICE_UNAVAILABLE, _LOST)
        zeros = {index: self._weight.new_zeros(names[index].tokens, self._width) for index in lost}
        return {**dict(zip(encoded, rows, strict=True)), **zeros}

    def _with_pixels(self, item: MultimodalDataItem, name: SglangImageName) -> MultimodalDataItem | None:
        """Return an image with pixels in place of its file; None if the file cannot be read."""
        try:
            picture = _rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(file_of(item)))))
            made = self._image_processor(images=[picture], return_tensors="pt")
            if made["image_grid_thw"].tolist() != [[*name.grid]]:
                raise ValueError(
                    f"grid {made['image_grid_thw'].tolist()}, but the service has {[*name.grid]}"
                )
        except Exception:  # noqa: BLE001 - the engine would end
            _log.exception("an image whose rows are lost cannot be read here: its request ends")
            return None
        return MultimodalDataItem(
            modality=Modality.IMAGE,
            offsets=item.offsets,
            feature=made["pixel_values"].to(self._weight.device),
            model_specific_data={"image_grid_thw": made["image_grid_thw"]},
        )

    def _by_own_tower(self, items: Sequence[MultimodalDataItem]) -> Tensor:
        rows: Tensor = super().get_image_feature(items)  # type: ignore[misc]  # of SGLang's model
        return rows


def _rgb(picture: Image.Image) -> Image.Image:
    """Convert a picture to RGB as the service does, with transparency over white."""
    if picture.mode == "RGB" or ("A" not in picture.getbands() and "transparency" not in picture.info):
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGB", picture.size, "white")
    white.paste(picture, mask=picture.getchannel("A"))
    return white


def _with_rows(model: type[torch.nn.Module]) -> type:
    """Return a subclass with the name of SGLang's model, because SGLang looks it up by name."""
    return type(
        model.__name__, (EncoderServiceRows, model), {"__module__": __name__, "__doc__": model.__doc__}
    )


EntryClass = [
    _with_rows(model)
    for model in (
        qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,
        qwen3_vl.Qwen3VLForConditionalGeneration,
        qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration,
        qwen3_5.Qwen3_5ForConditionalGeneration,
        qwen3_5.Qwen3_5MoeForConditionalGeneration,
    )
]
"""The name under which SGLang looks for models in a module."""
