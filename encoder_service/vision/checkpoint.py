"""The vision tensors of a Hugging Face checkpoint folder, and the fingerprint of the model."""

import json
from collections.abc import Iterable
from pathlib import Path

import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from encoder_service.vision.families import read_spec
from encoder_service.vision.fp8 import Precision, full_blocks
from encoder_service.vision.spec import TowerSpec

# Where the families keep their vision tensors; the first is the older layout of Qwen2.5-VL.
PREFIXES = ("visual.", "model.visual.")

# Part of the fingerprint: raise it when our arithmetic changes rows, so that old and new embeddings have different
# addresses.
ARITHMETIC_VERSION = 1


class VisionTensors:
    """The vision tensors of a checkpoint folder by name without prefix, read on demand."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._where = {
            name: (path, full_name)
            for path, full_name in _tensor_names(self.folder)
            if (name := _without_prefix(full_name)) is not None
        }
        if not self._where:
            raise ValueError(
                f"{self.folder} holds no vision tensors (none begins with {' or '.join(PREFIXES)})"
            )

    @property
    def names(self) -> list[str]:
        """Every vision tensor's name, sorted."""
        return sorted(self._where)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors on the CPU in the dtype they were stored in, file by file."""
        by_path: dict[Path, list[str]] = {}
        for name in names:
            by_path.setdefault(self._where[name][0], []).append(name)
        tensors = {}
        for path, wanted in by_path.items():
            with safe_open(path, framework="pt") as shard:
                for name in wanted:
                    tensors[name] = shard.get_tensor(self._where[name][1])
        return tensors

    def check(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Raise a `ValueError` naming every tensor that is missing, unexpected or of another shape."""
        problems = [f"missing: {name}" for name in sorted(expected.keys() - self._where.keys())]
        problems += [f"left over: {name}" for name in sorted(self._where.keys() - expected.keys())]
        for name in sorted(expected.keys() & self._where.keys()):
            path, full_name = self._where[name]
            with safe_open(path, framework="pt") as shard:
                shape = tuple(shard.get_slice(full_name).get_shape())
            if shape != expected[name]:
                problems.append(f"of shape {shape} instead of {expected[name]}: {name}")
        if problems:
            raise ValueError(
                f"the vision tensors of {self.folder} do not fit the tower: " + "; ".join(problems)
            )

    def fingerprint(self) -> bytes:
        """32 bytes, BLAKE3 over names, shapes, dtypes and raw bytes of the vision tensors, in order of their names.

        The bytes are hashed in pieces, on all cores: one GB takes well under a second
        once it is in memory.
        """
        hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
        headers = {path: _Header(path) for path, _ in self._where.values()}
        for name in self.names:
            path, full_name = self._where[name]
            headers[path].hash_tensor(hasher, name, full_name)
        return hasher.digest()


def model_fingerprint(folder: str | Path, precision: Precision = "full") -> bytes:
    """32 bytes, BLAKE3 over architecture, vision configuration (canonical JSON) and vision weights.

    Products of another precision than that of the weights are part of it.

    Folders with the same fingerprint give the same rows for the same patches, however they are sharded.
    """
    return _hash_of_configuration(folder, precision).update(VisionTensors(folder).fingerprint()).digest()


def configuration_fingerprint(folder: str | Path) -> bytes:
    """32 bytes, BLAKE3 over architecture and vision configuration alone: of a server that has no weights."""
    return _hash_of_configuration(folder).update(b"no weights").digest()


def _hash_of_configuration(folder: str | Path, precision: Precision = "full") -> "blake3.blake3":
    spec = read_spec(Path(folder))
    canonical = {
        "arithmetic_version": ARITHMETIC_VERSION,
        "architecture": spec.architecture,
        "vision_config": {slot: getattr(spec, slot) for slot in TowerSpec.__slots__ if slot != "model_type"},
    }
    if precision != "full":
        canonical |= {"precision": precision, "full_blocks": full_blocks(spec.depth)}
    return blake3.blake3(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode())


class _Header:
    """One safetensors file: eight bytes of header length, a JSON header, then the tensors' bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._entries = json.loads(file.read(length))
        self._data = 8 + length

    def hash_tensor(self, hasher: "blake3.blake3", name: str, full_name: str) -> None:
        entry = self._entries[full_name]
        begin, end = entry["data_offsets"]
        hasher.update(json.dumps([name, entry["dtype"], entry["shape"], end - begin]).encode())
        with self._path.open("rb") as file:
            file.seek(self._data + begin)
            while begin < end:
                piece = file.read(min(end - begin, _PIECE_BYTES))
                hasher.update(piece)
                begin += len(piece)


# Large enough for BLAKE3 to use every core, small enough not to show in the process's memory.
_PIECE_BYTES = 16 << 20


def _tensor_names(folder: Path) -> list[tuple[Path, str]]:
    """(file, tensor name) of every tensor: from the index if the checkpoint is sharded, else from the file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        missing = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
        if missing:
            raise FileNotFoundError(f"{index} names files that are missing: {', '.join(missing)}")
        return [(folder / file, name) for name, file in weight_map.items()]
    path = folder / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has neither {index.name} nor {path.name}")
    try:
        with safe_open(path, framework="pt") as shard:
            return [(path, name) for name in shard.keys()]  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _without_prefix(name: str) -> str | None:
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), None)
