"""A Hugging Face checkpoint folder, as client and server read it: configuration, vision tensors, fingerprints."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3

from encoder_contract.json_file import read_json_object, refuse_pointer
from encoder_contract.tower_spec import FAMILIES, TowerSpec, spec_of

# Prefixes of the vision tensors' names. The first is the older layout of Qwen2.5-VL.
PREFIXES = ("visual.", "model.visual.")

OWN_TYPES = frozenset(model_type for family in FAMILIES for model_type in family.model_types)
"""The model types for which the server has its own tower."""

LANGUAGE_MODEL = re.compile(
    r"(^|\.)(language_model|text_model|lm_head|llm)\.|^(model\.)?(layers|embed_tokens|norm)\."
)
"""Matches the names of a language model's tensors, in all families. Any other tensor may decide rows."""

NOT_OF_ROWS = {
    "_name_or_path", "architectures", "dtype", "llm_config", "quantization_config", "text_config", "torch_dtype",
    "transformers_version",
}  # fmt: skip
"""Keys of config.json that decide no row."""
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

# Part of the fingerprint. Raise it when our arithmetic changes rows, so that old and new embeddings have different
# addresses.
ARITHMETIC_VERSION = 1

AGAIN = "download the model again (hf download NAME --local-dir FOLDER)"
"""What to do about missing and damaged files."""

# The longest header that the safetensors format allows.
_MAX_HEADER_BYTES = 100_000_000
_BEGINNING_BYTES = 64  # of a file, which tell a pointer of Git LFS
# Large enough for BLAKE3 to use every core, and small compared to the process's memory.
_PIECE_BYTES = 16 << 20


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint folder. Raises `FileNotFoundError` or `ValueError`, which names the file."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: {folder} is not a Hugging Face checkpoint folder (to download one: hf download NAME "
            "--local-dir FOLDER)"
        )
    return read_json_object(path)


def read_spec(folder: Path) -> TowerSpec:
    """Return the numbers of the tower in a checkpoint folder.

    Raises `FileNotFoundError` or `ValueError`, which names what is missing or not supported.
    """
    config = read_config(folder)
    try:
        return spec_of(config)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{folder / 'config.json'} is damaged: {error!r}") from error


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file: its full name in the file, and where its bytes lie."""

    path: Path
    full_name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes in pieces. Raises `ValueError` if the file ends too early."""
        left = self.size_bytes
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while left:
                piece = file.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise ValueError(f"{self.path} ends inside the tensor {self.full_name}")
                left -= len(piece)
                yield piece


def vision_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the vision tensors of a checkpoint folder by name without prefix, in the order of their names.

    Reads only the headers of the files. Raises `FileNotFoundError` or `ValueError`, which names what is missing or
    damaged.
    """
    found = _tensors(folder, _without_prefix)
    if not found:
        raise ValueError(f"{folder} has no vision tensors (none begins with {' or '.join(PREFIXES)})")
    return found


def require_files(folder: Path, *, language_model: bool = False) -> None:
    """Check that all weights of a model's rows are there; with `language_model`, its weights too.

    For what `transformers` loads, no JSON file may be a pointer of Git LFS. Reads only headers and sizes. Raises
    `FileNotFoundError` or `ValueError`, which names the file.
    """
    if _is_own(folder) and not language_model:
        vision_tensors(folder)
        return
    for path in folder.glob("*.json"):
        with path.open("rb") as file:
            refuse_pointer(path, file.read(_BEGINNING_BYTES))
    _tensors(folder, lambda name: name)


def weights_fingerprint(folder: Path) -> bytes:
    """Return 32 bytes: BLAKE3 over names, shapes, dtypes and bytes of the vision tensors, in the order of their names.

    For a model that has no tower of our own, it covers all tensors except the language model's. It hashes in pieces, on
    all cores: one GB takes well under a second once it is in memory. Raises what `vision_tensors` raises.
    """
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    tensors = vision_tensors(folder) if _is_own(folder) else _tensors(folder, _outside_language_model)
    for name, tensor in tensors.items():
        hasher.update(json.dumps([name, tensor.dtype, tensor.shape, tensor.size_bytes]).encode())
        for piece in tensor.pieces():
            hasher.update(piece)
    return hasher.digest()


def model_fingerprint(folder: Path) -> bytes:
    """Return 32 bytes: BLAKE3 over architecture, vision configuration (canonical JSON) and vision weights.

    For a model that has no tower of our own, it covers config.json without the language model, the files of the
    processor, the code in the folder if config.json names any (auto_map), and all weights except the language model's.
    Folders with equal fingerprints give equal rows for equal patches, however they are sharded. Raises
    `FileNotFoundError` or `ValueError`, which names what is missing, damaged or not supported.
    """
    hasher = _hash_of(read_spec(folder)) if _is_own(folder) else _hash_of_files(folder)
    return hasher.update(weights_fingerprint(folder)).digest()


def _is_own(folder: Path) -> bool:
    model_type = read_config(folder).get("model_type")
    return not isinstance(model_type, str) or model_type in OWN_TYPES


def _hash_of_files(folder: Path) -> "blake3.blake3":
    config = {name: value for name, value in read_config(folder).items() if name not in NOT_OF_ROWS}
    files = [path for name in _PROCESSOR_FILES if (path := folder / name).is_file()]
    canonical = {"config": config, "processor": {path.name: read_json_object(path) for path in files}}
    if "auto_map" in config:
        code = [path for path in folder.rglob("*.py") if path.is_file()]
        canonical["code"] = {
            str(path.relative_to(folder)): blake3.blake3(path.read_bytes()).hexdigest() for path in code
        }
    return blake3.blake3(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode())


def _hash_of(spec: TowerSpec) -> "blake3.blake3":
    canonical = {
        "arithmetic_version": ARITHMETIC_VERSION,
        "architecture": spec.architecture,
        "vision_config": {slot: getattr(spec, slot) for slot in TowerSpec.__slots__ if slot != "model_type"},
    }
    return blake3.blake3(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode())


def _places(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor, from the index if the checkpoint is sharded."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = dict(read_json_object(index)["weight_map"])
            missing = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files") from error
        if missing:
            raise FileNotFoundError(f"{index} names files that are missing: {', '.join(missing)}; {AGAIN}")
        return {name: folder / file for name, file in weight_map.items()}
    path = folder / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no weights: neither {index.name} nor {path.name}; {AGAIN}")
    return dict.fromkeys((name for name in _header(path)[0] if name != "__metadata__"), path)


def _tensors(folder: Path, named: Callable[[str], str | None]) -> dict[str, StoredTensor]:
    """Return the tensors for whose full name `named` returns a name, by that name, in the order of the names."""
    places = _places(folder)
    found = {name: full_name for full_name in places if (name := named(full_name)) is not None}
    headers = {path: _header(path) for path in {places[full_name] for full_name in found.values()}}
    return {name: _stored(places[found[name]], found[name], headers) for name in sorted(found)}


def _without_prefix(name: str) -> str | None:
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), None)


def _outside_language_model(name: str) -> str | None:
    return None if LANGUAGE_MODEL.search(name) else name


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's JSON header, and the offset of its data. The file begins with the header's length in 8 bytes.

    Raises `ValueError` for a file that ends too early: `safetensors` refuses it, but without its name.
    """
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
        refuse_pointer(path, beginning)
        length = int.from_bytes(beginning[:8], "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header would have {length} bytes")
        file.seek(8)
        try:
            entries = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}; {AGAIN}") from error
        size = file.seek(0, os.SEEK_END)
    if not isinstance(entries, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is not a JSON object")
    needed = 8 + length + max(map(_end, entries.values()), default=0)
    if size < needed:
        raise ValueError(f"{path} is cut off: it has {size} of {needed} bytes; {AGAIN}")
    return entries, 8 + length


def _end(entry: Any) -> int:
    """Return where the data of a header's entry ends; 0 for metadata and for damaged entries."""
    match entry:
        case {"data_offsets": [int(), int(end)]}:
            return end
    return 0


def _stored(path: Path, full_name: str, headers: Mapping[Path, tuple[dict[str, Any], int]]) -> StoredTensor:
    entries, data = headers[path]
    try:
        entry = entries[full_name]
        begin, end = entry["data_offsets"]
        if not (type(begin) is type(end) is int and 0 <= begin <= end):
            raise ValueError(f"offsets {begin} and {end}")
        return StoredTensor(path, full_name, entry["dtype"], tuple(entry["shape"]), data + begin, end - begin)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the tensor {full_name} is missing or damaged") from error
