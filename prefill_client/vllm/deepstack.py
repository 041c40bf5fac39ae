"""Keeps DeepStack in an engine without a vision tower: the service's rows contain DeepStack, and vLLM would drop it.

`--limit-mm-per-prompt '{"image": 0, "video": 0}'` makes vLLM skip the vision tower. For Qwen3-VL it then also skips the
part of the language model that adds DeepStack rows, and wide rows would end the engine. This module sets the attributes
that the constructor leaves out. It runs only in the workers of an engine with our connector.
"""

import importlib
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MODELS = {
    "qwen3_vl": ("vllm.model_executor.models.qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ("vllm.model_executor.models.qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
}


def keep_deepstack(vllm_config: "VllmConfig") -> None:
    """Let the model that this worker builds accept DeepStack rows, with or without a tower."""
    module_and_class = _MODELS.get(vllm_config.model_config.hf_config.model_type)
    if module_and_class is None:
        return
    module, name = module_and_class
    model = getattr(importlib.import_module(module), name)
    if not hasattr(model.__init__, "__wrapped__"):
        model.__init__ = _with_deepstack(model.__init__)


def _with_deepstack(construct: Any) -> Any:
    @wraps(construct)
    def constructed(self: Any, *, vllm_config: "VllmConfig", prefix: str = "") -> None:
        construct(self, vllm_config=vllm_config, prefix=prefix)
        if not self.use_deepstack:
            _set_deepstack(self, vllm_config)

    return constructed


def _set_deepstack(model: Any, vllm_config: "VllmConfig") -> None:
    """Set what `Qwen3VLForConditionalGeneration.__init__` sets only with a tower, in vLLM 0.31 to 0.33."""
    config = vllm_config.model_config.hf_config
    model.use_deepstack = True
    model.deepstack_num_level = len(config.vision_config.deepstack_visual_indexes)
    model.multiscale_dim = model.visual_dim * model.deepstack_num_level
    shape = (vllm_config.scheduler_config.max_num_batched_tokens, config.text_config.hidden_size)
    model.deepstack_input_embeds = [torch.zeros(shape) for _ in range(model.deepstack_num_level)]
    model.deepstack_input_embeds_num_tokens = 0
