"""The first frame of SGLang's embedding messages: a pickle of its `EmbeddingData`, written opcode by opcode.

A message has two frames: this one, and the C-contiguous rows. SGLang 0.5.20 to 0.5.23 read the same bytes. Writing them
needs neither SGLang nor torch, and the gateway never unpickles anything.
"""

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from encoder_contract.geometry import Grid

SUPPORTED = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""The releases of SGLang whose classes and unpicklers the frames are tested with."""


class _Global(NamedTuple):
    """A name that the reader imports. Its unpickler allows only certain names."""

    module: str
    name: str


class _Call(NamedTuple):
    """`function(*arguments)`, evaluated by the reader."""

    function: _Global
    arguments: tuple[object, ...]


_EMBEDDING = _Global("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData")
# 0.5.23 defines the class in another module, but 0.5.21 and 0.5.22 allow only this name.
_MODALITY = _Global("sglang.srt.managers.schedule_batch", "Modality")


class Modality(IntEnum):
    """The contents of a part, with the values of SGLang's own enum."""

    IMAGE = 1
    VIDEO = 2
    AUDIO = 3


def embedding_frame(
    req_id: str,
    num_parts: int,
    part_idx: int,
    *,
    grids: Sequence[Grid],
    shape: tuple[int, int],
    dtype: str,
    modality: Modality = Modality.IMAGE,
    times: Mapping[str, Sequence[object]] | None = None,
) -> bytes:
    """Return the frame that announces the rows of one part.

    `req_id` is the id of the part, with SGLang's suffix. `grids` has (t, h, w) in patches for each image, in order. The
    rows have `shape` (rows, width) and torch's type `dtype`. `times` has the timestamps of videos, by SGLang's names.
    """
    state: dict[str, Any] = {
        "req_id": req_id,
        "num_parts": num_parts,
        "part_idx": part_idx,
        "grid_dim": [list(grid) for grid in grids],
        "modality": _Call(_MODALITY, (int(modality),)),
        "embedding": None,
        "send_time": None,
        "dtype": _Global("torch", dtype),
        "shape": list(shape),
        "_mr_ptr": None,
        "error_msg": None,
        "error_code": None,
        **(times or {}),
    }
    # Protocol 4: class, empty arguments, NEWOBJ, state, BUILD, STOP.
    return b"\x80\x04" + _opcodes(_EMBEDDING) + b")\x81" + _opcodes(state) + b"b."


def _opcodes(value: object) -> bytes:
    """Return the opcodes that push `value` on the reader's stack."""
    match value:
        case None:
            return b"N"
        case _Global(module, name):
            return f"c{module}\n{name}\n".encode()
        case _Call(function, arguments):
            return _opcodes(function) + b"(" + b"".join(map(_opcodes, arguments)) + b"tR"
        case int():
            return b"J" + struct.pack("<i", value)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        case dict():
            items = (_opcodes(key) + _opcodes(each) for key, each in value.items())
            return b"}(" + b"".join(items) + b"u"
        case list():
            return b"](" + b"".join(map(_opcodes, value)) + b"e"
    raise TypeError(f"a frame cannot hold a {type(value).__name__}")
