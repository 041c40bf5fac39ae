"""Whether SGLang's tower still has the weights that were compared with the service's: SGLang can load others online."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from blake3 import blake3
from sglang.srt.managers import mm_schedule
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from torch import Tensor

_log = logging.getLogger("sglang.encoder_service")

UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "load_weights_from_distributed",
)
"""The methods by which SGLang loads weights after its start. An update may take many calls."""


class TowerWeights:
    """The weights of the tower on one rank. Used by the thread that runs forwards and loads weights."""

    def __init__(self, tower: Callable[[], torch.nn.Module]) -> None:
        """`tower` returns SGLang's tower, which an update may replace."""
        self._tower = tower
        self._at_start = b""  # the digest before the first update
        self._checked = b""
        self._updated = False

    @property
    def are_the_services(self) -> bool:
        """Whether the tower has the weights that it had at the start. The first call after an update hashes them."""
        if self._updated:
            self._updated = False
            found = digest_of(self._tower())
            if found != self._checked:
                self._checked = found
                if found == self._at_start:
                    _log.info(
                        "the tower has the weights of the encoder service again, which encodes the images"
                    )
                else:
                    _log.warning(
                        "the vision weights changed: SGLang's own tower encodes the images until it has the weights "
                        "of its start again, or is restarted with a service that has the new ones"
                    )
        return self._checked == self._at_start

    def watch_updates(self, model: torch.nn.Module) -> None:
        """Patch this process's updater to tell of updates of `model`, and to drop the rows of before. Call it once."""
        for name in UPDATES:
            setattr(WeightUpdater, name, self._watched(getattr(WeightUpdater, name), model))

    def _watched(self, update: Callable[..., Any], model: torch.nn.Module) -> Callable[..., Any]:
        @wraps(update)
        def watched(updater: Any, *args: Any, **kwargs: Any) -> Any:
            if updater.get_model() is not model:  # a draft model has no tower of its own
                return update(updater, *args, **kwargs)
            if not self._at_start:
                self._at_start = self._checked = digest_of(self._tower())
            try:
                return update(updater, *args, **kwargs)
            finally:
                self._updated = True
                mm_schedule.embedding_cache.clear()

        return watched


def digest_of(tower: torch.nn.Module) -> bytes:
    """Return the BLAKE3 digest of a module's parameters and buffers. 1 GB takes about half a second."""
    digest = blake3()
    for name, tensor in sorted(tower.state_dict().items()):
        digest.update(name.encode())
        digest.update(_bytes_of(tensor))
    return digest.digest()


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
