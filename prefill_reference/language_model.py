"""The language half of a vision-language checkpoint, loaded from its folder without the vision tower."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from encoder_contract.errors import ModelMismatchError

_ARCHITECTURES = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}


@dataclass(frozen=True, eq=False)
class Levels:
    """A chunk's DeepStack rows: `rows[l]` [m, hidden] joins after layer l at the m tokens of mask [1, n]."""

    mask: Tensor
    rows: list[Tensor]


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A language model that takes image rows from outside.

    `hidden` is the width of its states, `levels` the DeepStack levels it adds, so that an image row has
    hidden × (1 + levels) elements: [main | level 0 | level 1 | ...]. `model` is a `transformers`
    `...ForConditionalGeneration` whose tower is gone. `video_marks` are its tokens for a pair of frames, and before and
    after one; a model that counts time in positions has `positions_per_s` of them a second.
    """

    model: Any
    hidden: int
    levels: int
    merge_size: int
    image_token: int
    end_tokens: frozenset[int]
    max_tokens: int
    video_marks: tuple[int, int, int]
    positions_per_s: float = 0.0

    @property
    def width(self) -> int:
        """Elements of an image row that fit this model."""
        return self.hidden * (1 + self.levels)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights."""
        dtype = self.model.lm_head.weight.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device = self.model.lm_head.weight.device
        assert isinstance(device, torch.device)
        return device

    def require_width(self, width: int) -> None:
        """Raise `ModelMismatchError` unless rows of `width` elements fit: ask before the first request."""
        if width != self.width:
            raise ModelMismatchError(
                f"image rows are {width} wide, this model takes {self.width}: "
                f"{self.hidden} and {self.levels} DeepStack levels of {self.hidden}"
            )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [..., hidden] of token ids [...]."""
        embeddings = self.model.get_input_embeddings()(token_ids)
        assert isinstance(embeddings, Tensor)
        return embeddings

    def forward(self, embeddings: Tensor, positions: Tensor, cache: Any, levels: Levels | None) -> Tensor:
        """Run tokens [1, n, hidden] at positions [3, 1, n] behind the cache; return the last logits [vocab].

        The cache grows by n. `levels` adds DeepStack rows; None for tokens that are all text.
        """
        deepstack = (
            {"visual_pos_masks": levels.mask, "deepstack_visual_embeds": levels.rows} if levels else {}
        )
        states = self.model.model.language_model(
            inputs_embeds=embeddings,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **deepstack,
        ).last_hidden_state
        logits = self.model.lm_head(states[0, -1])
        assert isinstance(logits, Tensor)
        return logits

    def new_cache(self) -> Any:
        """Return an empty KV cache."""
        return transformers.DynamicCache(config=self.model.config.get_text_config())


def load_language_model(
    folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> LanguageModel:
    """Load the language model of a checkpoint folder; the tower's weights are never read or held.

    DeepStack stays on without the tower: its levels belong to the language model's layers, and their number
    is read from the configuration. Raises `ModelMismatchError` for an unknown architecture,
    `OSError` when the folder or a part of it is missing, `ValueError` when its weights cannot be read or `device`
    is not there.
    """
    if not (Path(folder) / "config.json").is_file():
        # `transformers` would take it for the name of a repository to download.
        raise FileNotFoundError(f"{folder} is not a checkpoint folder: it has no config.json")
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type not in _ARCHITECTURES:
        raise ModelMismatchError(f"{folder}: {config.model_type} is not one of {', '.join(_ARCHITECTURES)}")
    architecture = _without_tower(getattr(transformers, _ARCHITECTURES[config.model_type]))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} sees no CUDA device for --device {device}: use --device cpu"
        )
    try:
        with _quiet():
            model = architecture.from_pretrained(folder, config=config, dtype=dtype)
    except SafetensorError as error:
        raise ValueError(f"{folder}: its weights cannot be read: {error}") from error
    text, vision = config.get_text_config(), config.vision_config
    levels = len(getattr(vision, "deepstack_visual_indexes", ()))
    if levels > text.num_hidden_layers:
        # `transformers` would drop the levels that have no layer without a word.
        raise ModelMismatchError(f"{folder}: {levels} DeepStack levels, {text.num_hidden_layers} layers")
    return LanguageModel(
        model=model.to(device).eval(),
        hidden=text.hidden_size,
        levels=levels,
        merge_size=vision.spatial_merge_size,
        image_token=config.image_token_id,
        end_tokens=_end_tokens(model),
        max_tokens=text.max_position_embeddings,
        video_marks=(config.video_token_id, config.vision_start_token_id, config.vision_end_token_id),
        positions_per_s=float(getattr(vision, "tokens_per_second", 0.0) or 0.0),
    )


def _without_tower(architecture: type[Any]) -> type[Any]:
    """Return the architecture minus its tower, removed while all weights are placeholders without memory."""

    def init(self: Any, config: Any) -> None:
        architecture.__init__(self, config)
        del self.model.visual

    # The name stays: `transformers` finds an architecture's checkpoint conversions by it.
    members = {"__init__": init, "_keys_to_ignore_on_load_unexpected": [r"^(model\.)?visual\."]}
    return type(architecture.__name__, (architecture,), {"__module__": architecture.__module__, **members})


def _end_tokens(model: Any) -> frozenset[int]:
    end = model.generation_config.eos_token_id
    if end is None:
        end = model.config.get_text_config().eos_token_id
    return frozenset(() if end is None else [end] if isinstance(end, int) else end)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `transformers` from drawing progress bars into a server's log."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
