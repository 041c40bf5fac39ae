"""The language model of a vision-language checkpoint, loaded from its folder without the vision tower."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
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
    """A chunk's DeepStack rows: `rows[l]` [m, hidden] is added after layer l at the m tokens in `mask` [1, n]."""

    mask: Tensor
    rows: list[Tensor]


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A language model that gets its image rows from outside.

    `hidden` is the width of the hidden states, `levels` the number of DeepStack levels. An image row has
    hidden × (1 + levels) elements: [main | level 0 | level 1 | ...]. `model` is a `...ForConditionalGeneration` of
    `transformers` without its tower. `video_marks` are three tokens: the placeholder of a pair of frames, the token
    before it and the token after it. A model that counts time in positions has `positions_per_s` of them per second.
    `cache_argument` is the name under which its forward takes the KV cache.
    """

    model: Any
    cache_argument: str
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
        """Number of elements of an image row."""
        return self.hidden * (1 + self.levels)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights."""
        dtype = self.model.lm_head.weight.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        device = self.model.lm_head.weight.device
        assert isinstance(device, torch.device)
        return device

    def require_width(self, width: int) -> None:
        """Raise `ModelMismatchError` unless the model takes rows of `width` elements."""
        if width != self.width:
            raise ModelMismatchError(
                f"image rows are {width} wide, this model takes {self.width}: "
                f"{self.hidden}, and as many for each of {self.levels} DeepStack levels"
            )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [..., hidden] of token ids [...]."""
        embeddings = self.model.get_input_embeddings()(token_ids)
        assert isinstance(embeddings, Tensor)
        return embeddings

    def forward(self, embeddings: Tensor, positions: Tensor, cache: Any, levels: Levels | None) -> Tensor:
        """Run n tokens after those in the cache, and append them to it; return the logits [vocab] of the last one.

        `embeddings` is [1, n, hidden], `positions` [3, 1, n]. `levels` has the DeepStack rows; None if all tokens are
        text. Raises `RuntimeError` if the model did not use the cache.
        """
        deepstack = (
            {"visual_pos_masks": levels.mask, "deepstack_visual_embeds": levels.rows} if levels else {}
        )
        cached = cache.get_seq_length()
        states = self.model.model.language_model(
            inputs_embeds=embeddings,
            position_ids=positions,
            use_cache=True,
            **{self.cache_argument: cache},
            **deepstack,
        ).last_hidden_state
        if (grown := cache.get_seq_length() - cached) != embeddings.shape[1]:
            raise RuntimeError(
                f"transformers {transformers.__version__} added {grown} of {embeddings.shape[1]} tokens to the KV cache"
            )
        logits = self.model.lm_head(states[0, -1])
        assert isinstance(logits, Tensor)
        return logits

    def new_cache(self) -> Any:
        """Return an empty KV cache."""
        return transformers.DynamicCache(config=self.model.config.get_text_config())


def load_language_model(
    folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> LanguageModel:
    """Load the language model of a checkpoint folder. The tower's weights are never read.

    DeepStack works without the tower: the language model's layers add the levels, and the configuration has their
    number. Raises `ModelMismatchError` for an unknown architecture, `OSError` if the folder or a file is missing, and
    `ValueError` if the weights cannot be read or `device` does not exist.
    """
    if not (Path(folder) / "config.json").is_file():
        # `transformers` would look for a repository of this name to download.
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
        # `transformers` would silently drop the levels that have no layer.
        raise ModelMismatchError(f"{folder}: {levels} DeepStack levels, {text.num_hidden_layers} layers")
    return LanguageModel(
        model=model.to(device).eval(),
        cache_argument=_cache_argument(model.model.language_model),
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
    """Return a subclass without the tower, which it removes while the weights are placeholders without memory."""

    def init(self: Any, config: Any) -> None:
        architecture.__init__(self, config)
        del self.model.visual

    # Keep the class name: `transformers` looks up an architecture's checkpoint conversions by it.
    members = {"__init__": init, "_keys_to_ignore_on_load_unexpected": [r"^(model\.)?visual\."]}
    return type(architecture.__name__, (architecture,), {"__module__": architecture.__module__, **members})


def _cache_argument(model: Any) -> str:
    """Return the name of the KV cache in a model's forward, which `transformers` 5.24 renamed.

    The forward ignores unknown names without an error. Raises `ModelMismatchError` if it takes neither.
    """
    known = signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in known:
            return name
    raise ModelMismatchError(
        f"{type(model).__name__} of transformers {transformers.__version__} takes no KV cache by a known name"
    )


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
