"""The messages between SGLang 0.5.20 to 0.5.23 and an encoder, as SGLang writes and reads them."""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "uint8": np.uint8}


class EmbeddingData(SimpleNamespace):
    """Stands for SGLang's class of that name, which the frame names."""


class _Reader(pickle.Unpickler):
    """Allows the three names that all releases allow, and reads a type of torch as its name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData"):
            return EmbeddingData
        if (module, name) == ("sglang.srt.managers.schedule_batch", "Modality"):
            return int
        if module == "torch" and name in _NUMPY:
            return name
        raise RuntimeError(f"SGLang blocks {module}.{name}")


def read_frame(frame: bytes) -> EmbeddingData:
    """Read the first frame of a message."""
    return _Reader(io.BytesIO(frame)).load()


@dataclass
class Message:
    """A message: the data of its first frame, and its rows, in the form of SGLang's receiver."""

    data: EmbeddingData
    rows: np.ndarray

    @classmethod
    def of(cls, frames: Sequence[bytes]) -> "Message":
        first, second = frames
        data = read_frame(first)
        return cls(data, np.frombuffer(second, _NUMPY[data.dtype]).reshape(data.shape))


def body_of(
    items: Sequence[Any],
    *,
    rid: str = "",
    part: int = 0,
    parts: int = 1,
    port: int | None = None,
    **other: Any,
) -> dict[str, Any]:
    """Return what SGLang posts to /encode."""
    return {
        "encoder_idx": part,
        "encoder_url": "unused",
        "mm_items": list(items),
        "num_parts": parts,
        "part_idx": part,
        "req_id": f"{rid or uuid4().hex}_local_part_{part}",
        "modality": "IMAGE",
        "prefill_host": "127.0.0.1",
        "embedding_port": port,
        "time_stats_json": None,
        **other,
    }
