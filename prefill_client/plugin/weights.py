"""The vision weights of a running engine: those of its checkpoint, and what updates have written over them.

An update names tensors as a checkpoint does. Their content is compared with what the engine has, so that its model
fingerprint is known after an update as it was at the start.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import blake3
import torch
from safetensors.torch import save_file
from torch import Tensor

from encoder_contract.checkpoint import (
    LANGUAGE_MODEL,
    OWN_TYPES,
    PREFIXES,
    StoredTensor,
    model_fingerprint,
    read_config,
    vision_tensors,
)
from prefill_client.plugin.model import fingerprint_of

_log = logging.getLogger(__name__)
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
# A name that an engine may load into its tower, although no checkpoint has it.
_OF_A_TOWER = re.compile(r"(^|\.)visual\.")


@dataclass(slots=True)
class Compared:
    """What was compared since the last report."""

    tensors: int = 0
    size_bytes: int = 0
    took_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.tensors} vision tensors, {self.size_bytes / 1e6:.1f} MB, in {1000 * self.took_s:.0f} ms"
        )


class VisionWeights:
    """The vision weights of one engine. Not thread-safe.

    A tensor that cannot be compared makes the fingerprint unknown: one of another shape, one that the checkpoint lacks,
    and every vision tensor of a model for which the server has no tower of its own. So do new files in the checkpoint.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """`folder` is the checkpoint that the engine has loaded, and `dtype` the type in which it has the weights.

        Reads only headers. Raises what `vision_tensors` raises.
        """
        self._folder = folder
        self._dtype = dtype
        self._has_own_tower = read_config(folder).get("model_type") in OWN_TYPES
        self._stored = vision_tensors(folder) if self._has_own_tower else {}
        self._files = self._states_of_files()
        self._fingerprint: bytes | None = None  # None: not computed yet
        self._digests: dict[str, bytes] = {}  # of the content that the engine has, by name
        self._changed: dict[str, Tensor] = {}  # tensors on the host that are not in a file yet
        self._doubtful: set[str] = set()
        self._incomparable: set[str] = set()
        self._updated: _UpdatedCheckpoint | None = None
        self.compared = Compared()

    @property
    def fingerprint(self) -> bytes | None:
        """The model fingerprint of these weights, 32 bytes; None if it is unknown.

        Computing it reads the vision tensors, once after each change. Raises what `model_fingerprint` raises.
        """
        if self._states_of_files() != self._files:
            self._incomparable.add("a tensor of a file that has changed")
        if self._incomparable or self._doubtful:
            return None
        if self._changed:
            if self._updated is None:
                self._updated = _UpdatedCheckpoint(self._folder, self._stored)
            self._updated.write(self._changed)
            self._changed, self._fingerprint = {}, None
        if self._fingerprint is None:
            self._fingerprint = (
                model_fingerprint(self._updated.folder) if self._updated else fingerprint_of(self._folder)
            )
        return self._fingerprint

    @property
    def why_unknown(self) -> str:
        """Why the fingerprint is unknown, for a log."""
        if self._incomparable:
            return f"{min(self._incomparable)} cannot be compared with {self._folder}"
        return f"nobody knows what was written to {len(self._doubtful)} vision tensors"

    def noting(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of an update, full and by their names in a checkpoint, and compare those of vision."""
        for name, tensor in weights:
            try:
                self._note(name, tensor)
            except Exception:  # noqa: BLE001 - the update goes on, whatever this tensor is
                _log.exception("%s cannot be compared", name)
                self._incomparable.add(name)
            yield name, tensor

    def doubt(self) -> None:
        """Note that every vision tensor may have any content, until an update names it."""
        if self._has_own_tower:
            self._doubtful = {*self._stored}
        else:
            self._incomparable.add("the vision tower")

    def take_compared(self) -> Compared:
        """Return what was compared since the last call."""
        compared, self.compared = self.compared, Compared()
        return compared

    def _states_of_files(self) -> dict[Path, tuple[int, int, int]]:
        """Return what changes when a file of the checkpoint is replaced or written."""
        states = {path: path.stat() for path in {tensor.path for tensor in self._stored.values()}}
        return {path: (each.st_ino, each.st_size, each.st_mtime_ns) for path, each in states.items()}

    def _note(self, full_name: str, tensor: Tensor) -> None:
        if not self._has_own_tower:
            if not LANGUAGE_MODEL.search(full_name):
                self._incomparable.add(full_name)
            return
        prefix = next((each for each in PREFIXES if full_name.startswith(each)), None)
        if prefix is None:
            if _OF_A_TOWER.search(full_name):
                self._incomparable.add(full_name)
            return
        begun_s = perf_counter()
        self._compare(full_name.removeprefix(prefix), tensor)
        self.compared.tensors += 1
        self.compared.size_bytes += tensor.nbytes
        self.compared.took_s += perf_counter() - begun_s

    def _compare(self, name: str, tensor: Tensor) -> None:
        stored = self._stored.get(name)
        written = None if stored is None else self._as_stored(tensor, stored)
        if stored is None or written is None:
            self._incomparable.add(name)
            return
        digest = _digest_of(written)
        if name not in self._digests:
            self._digests[name] = _digest_of_file(stored)
        if digest != self._digests[name]:
            if written.isnan().any():  # only a part of a tensor: vLLM's sparse backend leaves elements by NaN
                self._doubtful.add(name)
                return
            # The update may write its next tensor into this memory.
            self._changed[name] = written.clone()
            self._digests[name] = digest
        self._doubtful.discard(name)

    def _as_stored(self, tensor: Tensor, stored: StoredTensor) -> Tensor | None:
        """Return a tensor on the host in the type of the checkpoint; None if the engine would have other values."""
        dtype = _TYPES.get(stored.dtype)
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
        if dtype is None or not is_plain or tuple(tensor.shape) != stored.shape:
            return None
        cast = tensor.detach().to(dtype)
        if dtype not in (tensor.dtype, self._dtype) and not torch.equal(cast.to(tensor.dtype), tensor):
            return None
        return cast.cpu().contiguous()


class _UpdatedCheckpoint:
    """A checkpoint with vision tensors that replace those of another: an index of both, and files with the new ones."""

    def __init__(self, folder: Path, stored: dict[str, StoredTensor]) -> None:
        self._temporary = TemporaryDirectory(prefix="encoder-service-weights-")
        self._stored = stored
        self._files = {name: tensor.path.absolute() for name, tensor in stored.items()}
        self._numbers = count()
        shutil.copyfile(folder / "config.json", self.folder / "config.json")

    @property
    def folder(self) -> Path:
        """Where it is until this object is deleted."""
        return Path(self._temporary.name)

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Replace these tensors, and delete the files that no tensor is in any more."""
        file = self.folder / f"written-{next(self._numbers)}.safetensors"
        save_file({self._stored[name].full_name: tensor for name, tensor in tensors.items()}, file)
        self._files |= dict.fromkeys(tensors, file)
        places = {self._stored[name].full_name: str(path) for name, path in self._files.items()}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        for outdated in {*self.folder.glob("*.safetensors")} - {*self._files.values()}:
            outdated.unlink()


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """Return a digest of named tensors, in the order of their names; empty if one cannot be read.

    1 GB takes about half a second.
    """
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    try:
        for name, tensor in sorted(tensors, key=itemgetter(0)):
            hasher.update(name.encode())
            hasher.update(_bytes_of(tensor.detach().cpu().contiguous()))
    except (NotImplementedError, RuntimeError, TypeError) as error:  # of a type that a quantisation has made
        _log.warning("the memory of the vision tower cannot be compared: %s", error)
        return b""
    return bytes(hasher.digest())


def _bytes_of(tensor: Tensor) -> memoryview:
    whole: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return whole


def _digest_of(tensor: Tensor) -> bytes:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    return bytes(hasher.update(_bytes_of(tensor)).digest())


def _digest_of_file(stored: StoredTensor) -> bytes:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for piece in stored.pieces():
        hasher.update(piece)
    return bytes(hasher.digest())
