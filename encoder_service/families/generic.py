"""The vision part of any vision-language model of `transformers`: the library's code without the language model.

The model's processor makes the inputs with torchvision on the CPU, as vLLM's does by default. `get_image_features`
makes the rows, one image a call. To count the rows of a size, the processor writes the prompt of an image of that size,
and the placeholders in it are counted. Where the processor allows it, that image has a shape but no pixels.
"""

import copy
import fcntl
import inspect
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import blake3
import torch
import torchvision
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers.dynamic_module_utils import HF_MODULES_CACHE, get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from encoder_contract.checkpoint import LANGUAGE_MODEL, model_fingerprint, read_config
from encoder_contract.geometry import Grid
from encoder_contract.settings import flag
from encoder_service.families.counted_rows import one_line
from encoder_service.families.model import LoadOptions, OneByOne
from encoder_service.keys import Recipe
from encoder_service.vision.load import dtype_of

log = logging.getLogger(__name__)

# Families whose `get_image_features` stops before the rows that are merged -> the last step to the rows.
LAST_STEP: dict[str, Callable[[Any, Any], Tensor]] = {
    "llama4": lambda core, output: core.multi_modal_projector(output.last_hidden_state.flatten(0, -2)),
}

# Outputs of processors that are no inputs of the vision part.
TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}

# How tensors of quantised layers are recognised: by their type, and by names that are stored beside packed weights.
FLOATS = {"F64", "F32", "F16", "BF16"}
QUANTISED_NAME = re.compile(
    r"((weight|input|activation)_(scale|scale_inv|packed|zero_point)|\.(qweight|qzeros|scales|absmax|SCB))$"
)
INTEGERS = re.compile(r"(position_ids|num_batches_tracked|relative_position_index)$")

# The auto_map entries that a checkpoint with its own code must have. An entry may also name code of another repository,
# as "owner/repository--module.Class".
REMOTE_CLASSES = ("AutoConfig", "AutoModelForImageTextToText")
CODE_ELSEWHERE = re.compile(r'"([^"\s]+--[^"\s]+\.\w+)"')


def load_generic(folder: Path, options: LoadOptions) -> "TransformersModel":
    """Load the vision part of a checkpoint folder. Raises `ValueError` with a reason of one line."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # this module checks what it would warn about
    try:
        return TransformersModel(folder, options)
    except (ValueError, OSError) as error:
        raise ValueError(one_line(error)) from error
    except Exception as error:
        log.debug("transformers cannot load %s", folder, exc_info=True)
        raise ValueError(
            f"transformers {transformers.__version__} cannot load it: {type(error).__name__}: {one_line(error)}"
        ) from error


class TransformersModel(OneByOne):
    """A model of `transformers` without its language model."""

    def __init__(self, folder: Path, options: LoadOptions) -> None:
        """Raise `ValueError` for a model that cannot be served, and the errors of `transformers`."""
        config, architecture = _classes(folder, trust_remote_code=options.trust_remote_code)
        processor = _processor(folder, runs_code=config.model_type not in CONFIG_MAPPING)
        model = _vision_part(folder, config, architecture, dtype_of(options.dtype))
        settings, vision = _processor_settings(processor), getattr(config, "vision_config", None)
        super().__init__(
            options,
            model_type=config.model_type,
            hidden=config.get_text_config().hidden_size,
            levels=len(getattr(vision, "deepstack_visual_indexes", None) or ()),
            recipe=Recipe(model_fingerprint(folder), _digest(settings), options.dtype),
        )
        self.attention = f"transformers {transformers.__version__}, {model.config._attn_implementation}"
        model.to(self.device)
        self._core = _core(model)
        self._finish = LAST_STEP.get(config.model_type, _rows)
        self._takes = set(inspect.signature(self._core.get_image_features).parameters) - TEXT_INPUTS
        self._placeholder = _placeholder(config)
        # Only one thread at a time may use a processor, because of its tokenizer. One processor counts rows, the other
        # makes inputs.
        self._counting_processor, self._counting_lock = processor, threading.Lock()
        self._processor, self._lock = copy.deepcopy(processor), threading.Lock()
        self._blank_device = "meta" if self._counts_by_shapes() else "cpu"

    def rows(self, width: int, height: int) -> int:
        """Count the placeholders that the processor writes for an image of this size."""
        return self.grid(width, height).patches

    def grid(self, width: int, height: int) -> Grid:
        """Return the grid of the rows of an image of this size, as the processor computes it for a blank image."""
        pixels = torch.zeros(1, dtype=torch.uint8, device=self._blank_device).expand(3, height, width)
        with self._counting_lock:
            processed = _process(self._counting_processor, pixels)
        rows = int((processed["input_ids"] == self._placeholder).sum())
        return _grid(rows, processed.get("image_grid_thw"))

    def prepare_image(self, pixels: Tensor) -> Mapping[str, Any]:
        """Return the arguments of `get_image_features` on the CPU, floating-point values in `dtype`."""
        with self._lock:
            processed = _process(self._processor, pixels.cpu().permute(2, 0, 1))
        return {
            name: value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in processed.items()
            if name in self._takes
        }

    def encode_image(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the rows that the model merges into its prompt."""
        on_device = {
            name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        rows: Tensor = self._finish(self._core, self._core.get_image_features(**on_device, return_dict=True))
        return rows

    def _counts_by_shapes(self) -> bool:
        """Whether the processor works on tensors without values. If not, black images are counted."""
        self._blank_device = "meta"
        try:
            return self.rows(64, 64) > 0
        except Exception:  # processors that read values raise many types
            log.debug("rows are counted with the values of black images", exc_info=True)
            return False


def _process(processor: Any, pixels: Tensor) -> Mapping[str, Any]:
    """Return a processor's outputs for one image, uint8 [3, H, W], and a prompt that consists of this image."""
    outputs: Mapping[str, Any] = processor(images=[pixels], text=[processor.image_token], return_tensors="pt")
    return outputs


def _grid(rows: int, patches: Tensor | None) -> Grid:
    """Return the grid of an image's rows: (1, h, w) if each row is a square of the `patches` [[t, h, w]]."""
    if rows and patches is not None and len(patches) == 1:
        _, height, width = patches[0].tolist()
        side = max(1, math.isqrt(height * width // rows))
        grid = Grid(1, height // side, width // side)
        if grid.patches == rows:
            return grid
    return Grid(1, rows, 1)


def _rows(_core: Any, output: Any) -> Tensor:
    """Return rows [rows, width]: the main part, then the DeepStack levels."""
    parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return torch.cat([_flat(part) for part in parts], dim=1)


def _flat(part: Any) -> Tensor:
    tensors = part if isinstance(part, (list, tuple)) else [part]
    return torch.cat([tensor.flatten(0, -2) for tensor in tensors])


# The folder's configuration, code and processor


def _classes(folder: Path, *, trust_remote_code: bool) -> tuple[Any, type[Any]]:
    """Return configuration and class of the model: those of `transformers`, or else of the checkpoint's code."""
    content = read_config(folder)
    content.pop("quantization_config", None)
    model_type = content.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return _remote_classes(folder, content, trust_remote_code=trust_remote_code)
    # As in `from_pretrained`, this resolves sub-configurations, defaults and older names.
    config = CONFIG_MAPPING[model_type].from_dict(content)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ValueError(f"model_type {model_type!r} has no vision part, or none that transformers knows")
    return config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]


def _remote_classes(
    folder: Path, content: dict[str, Any], *, trust_remote_code: bool
) -> tuple[Any, type[Any]]:
    """Return configuration and class of the model from the checkpoint's code, which runs only if it is trusted."""
    named = content.get("auto_map")
    if not isinstance(named, dict):
        raise ValueError(
            f"transformers {transformers.__version__} knows no model_type {content.get('model_type')!r}"
        )
    if not trust_remote_code:
        raise ValueError(
            f"transformers {transformers.__version__} has no model_type {content.get('model_type')!r}, and the code in"
            f" the checkpoint (auto_map) is not run without {flag('trust_remote_code')}: it would have all rights of"
            " the server. Trust its author, or use a checkpoint of a model that transformers has (often named -hf)"
        )
    if missing := [name for name in REMOTE_CLASSES if not isinstance(named.get(name), str)]:
        raise ValueError(f"the auto_map in {folder / 'config.json'} has no {' and no '.join(missing)}")
    _refuse_code_elsewhere(folder)
    log.warning("%s: code in the checkpoint runs with the rights of this server", folder)
    with _module_cache_locked():
        config, architecture = (
            get_class_from_dynamic_module(named[name], folder, local_files_only=True)
            for name in REMOTE_CLASSES
        )
    return config.from_dict(content), architecture


@contextmanager
def _module_cache_locked() -> Iterator[None]:
    """Lock out other devices' processes: `transformers` copies code to a shared folder and runs it there."""
    Path(HF_MODULES_CACHE).mkdir(parents=True, exist_ok=True)
    folder = os.open(HF_MODULES_CACHE, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _refuse_code_elsewhere(folder: Path) -> None:
    """Raise `ValueError` for code of another repository: the model's fingerprint covers only code in the folder."""
    for path in sorted(folder.glob("*config.json")):
        if found := CODE_ELSEWHERE.search(path.read_text()):
            raise ValueError(f"{path} names code of another repository ({found[1]}): copy it into {folder}")


def _processor(folder: Path, *, runs_code: bool) -> Any:
    with _module_cache_locked() if runs_code else nullcontext():
        processor = transformers.AutoProcessor.from_pretrained(
            folder, trust_remote_code=runs_code, local_files_only=True, backend="torchvision"
        )
    for part in ("image_processor", "tokenizer", "image_token"):
        if getattr(processor, part, None) is None:
            raise ValueError(
                f"{folder} has no {part} for the model: files of the tokenizer or the processor are missing"
            )
    return processor


def _placeholder(config: Any) -> int:
    for name in ("image_token_id", "image_token_index"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    raise ValueError(f"config.json of {config.model_type} names no image_token_id")


def _processor_settings(processor: Any) -> dict[str, Any]:
    """Return everything but the checkpoint that decides rows: the settings, and the versions of the code."""
    ignored = ("tokenizer", "chat_template", "video_processor", "feature_extractor", "audio_processor")
    settings = {name: value for name, value in processor.to_dict().items() if name not in ignored}
    return {
        "settings": settings,
        "image_processor": processor.image_processor.to_dict(),
        "transformers": transformers.__version__,
        "torchvision": torchvision.__version__,
    }


# Weights


def _vision_part(folder: Path, config: Any, architecture: type[Any], dtype: torch.dtype) -> Any:
    """Load the model without its language model, whose weights are not read."""
    _refuse_quantised_vision(folder)
    model, report = _without_language_model(architecture).from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        output_loading_info=True,
        local_files_only=True,
        use_safetensors=True,  # loading other formats can run code
    )
    missing = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    if missing:
        raise ValueError(
            f"{len(missing)} tensors of the vision part are missing or of another shape in {folder}: "
            + ", ".join(missing[:3])
            + (", ..." if len(missing) > 3 else "")
        )
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # of the mapped file, which may be overwritten later
    return model.eval().requires_grad_(False)


def _without_language_model(architecture: type[Any]) -> type[Any]:
    """Return the architecture without language model and head. They are removed before weights are allocated."""

    def init(self: Any, config: Any, *args: Any, **named: Any) -> None:
        architecture.__init__(self, config, *args, **named)
        removed = (self.get_decoder(), architecture.get_output_embeddings(self))
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if any(child is each for each in removed):
                    setattr(module, name, nn.Module())
        self.all_tied_weights_keys = {}

    return type(
        architecture.__name__,
        (architecture,),
        {
            "__module__": architecture.__module__,
            "__init__": init,
            "_tied_weights_keys": None,
            "_keys_to_ignore_on_load_unexpected": [r"."],
            "tie_weights": lambda *_, **__: None,
            "get_input_embeddings": lambda _: None,
            "get_output_embeddings": lambda _: None,
        },
    )


def _core(model: Any) -> Any:
    """Return the module that has `get_image_features`."""
    for module in (getattr(model, "model", None), model):
        if hasattr(module, "get_image_features"):
            return module
    raise ValueError(
        f"transformers {transformers.__version__} has no get_image_features for {model.config.model_type}"
    )


def _refuse_quantised_vision(folder: Path) -> None:
    """Raise `ValueError` for a quantised tensor outside the language model: its values would be misread."""
    for name, kind in _stored_types(folder):
        packed = QUANTISED_NAME.search(name) or (kind not in FLOATS and not INTEGERS.search(name))
        if packed and not LANGUAGE_MODEL.search(name):
            raise ValueError(
                f"the vision part of {folder} is quantised ({name} is {kind}): serve the checkpoint it was made from"
            )


def _stored_types(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                yield name, shard.get_slice(name).get_dtype()


def _digest(content: Mapping[str, Any]) -> bytes:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return blake3.blake3(canonical.encode()).digest()
