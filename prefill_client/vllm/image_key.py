"""What the engines that share a store call an image: a digest of its pixels as their processor hands them to the tower.

Not vLLM's own hash: where a caller gives a `uuid`, that takes the hash's place, and could be that of another image.
"""

from collections.abc import Mapping
from typing import Any

import blake3
import torch

from encoder_contract.producer import EngineKey

_SCHEME = "vllm processed pixels"


def image_key(data: Mapping[str, Any], cache_salt: str) -> EngineKey:
    """Return the key of an image: all that the tower is given, and the `cache_salt` of its request.

    `data` is vLLM's, by name. Raises `TypeError` for what is no tensor. It takes the processor 0.15 ms per MB, with the
    interpreter's lock released: for a worker thread.
    """
    hasher = blake3.blake3(derive_key_context="encoder-service vllm image")
    for name in sorted(data):
        tensor = data[name].data
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
        said = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        hasher.update(len(said).to_bytes(4, "little") + said)
        pixels = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        hasher.update(memoryview(pixels))  # type: ignore[arg-type]
    hasher.update(cache_salt.encode())
    return EngineKey(_SCHEME, hasher.digest())


def same_image(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the tower is given the same; takes 0.2 ms per MB where vLLM does not have the one twice."""
    if one is other:
        return True
    return set(one) == set(other) and all(
        one[name] is other[name] or torch.equal(one[name].data, other[name].data) for name in one
    )
