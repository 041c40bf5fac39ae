"""The weights of SGLang's tower, which can load others online: the scheduler takes rows only of a service with them.

SGLang loads the tensors of an update, full and by their names in the checkpoint, on every rank. The first one compares.
"""

import logging
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers import mm_schedule
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_parallel, remote_instance_transfer_engine_enabled
from sglang.srt.utils.weight_checker import WeightChecker
from torch import Tensor
from torch.distributed import broadcast_object_list

from prefill_client.plugin.weights import VisionWeights, digest_of
from prefill_client.sglang.rows import agreed, counts_here

_log = logging.getLogger("sglang.encoder_service")

UPDATES = (
    (WeightUpdater, "update_weights_from_disk"),
    (WeightUpdater, "update_weights_from_tensor"),
    (WeightUpdater, "update_weights_from_ipc"),
    (WeightUpdater, "load_weights_from_distributed"),
    (WeightChecker, "_reset_tensors"),
)
"""The methods by which SGLang writes weights after its start. An update may take many calls."""
BY_NAMES = (None, "flattened_bucket")
"""The formats of tensors that SGLang passes to the model's `load_weights`. Others go to its parameters."""


class TowerWeights:
    """The weights of the tower on one rank. Used by the thread that runs forwards and loads weights."""

    def __init__(
        self,
        tower: Callable[[], torch.nn.Module],
        folder: Callable[[], Path],
        dtype: torch.dtype,
        *,
        takes_any_model: bool = False,
    ) -> None:
        """`tower` returns SGLang's tower, which an update may replace. The checkpoint in `folder` will be loaded."""
        self._tower = tower
        self._takes_any_model = takes_any_model
        self._vision: VisionWeights | None = None
        self._why_unknown = ""
        try:
            self._vision = VisionWeights(folder(), dtype)
        except (OSError, ValueError) as error:
            self._why_unknown = str(error)
        self._has_begun = False
        self._is_shared = False  # whether every rank knows the fingerprint of the present weights
        self._session: bytes | None = None  # the digest of the tower's memory at its begin
        self._at_start: bytes | None = None
        self._found: bytes | None = None

    @property
    def fingerprint(self) -> bytes | None:
        """The model fingerprint of the weights; None if it is unknown, empty if rows of any model are taken.

        The first call, and the first after an update, are for all ranks, at the same time. The very first reads the
        vision tensors of the checkpoint: the tokenizer compares them too, but not once SGLang's caches were emptied.
        """
        if self._takes_any_model:
            return b""
        self._begun(memory=False)
        if not self._is_shared:
            self._is_shared = True
            self._share()
        return self._found

    @property
    def are_those_of_the_start(self) -> bool:
        """Whether no update has changed the weights, as far as `fingerprint` has compared."""
        return self._found == self._at_start

    def load(self, load: Callable[[Iterable[tuple[str, Tensor]]], Any], weights: Iterable[Any]) -> Any:
        """Let the model load the weights of its start or of an update, and compare those of an update."""
        if self._vision is None or not self._has_begun or not counts_here():
            return load(weights)
        try:
            return load(self._vision.noting(weights))
        except BaseException:  # nobody knows how far it came
            self._vision.doubt()
            raise

    def watch_updates(self, model: torch.nn.Module) -> None:
        """Patch this process's updater to tell of updates of `model`, and to drop the rows of before. Call it once."""
        for owner, name in UPDATES:
            setattr(owner, name, self._watched(getattr(owner, name), model))
        WeightUpdater.begin_weight_update = self._beginning(WeightUpdater.begin_weight_update, model)
        WeightUpdater.end_weight_update = self._ending(WeightUpdater.end_weight_update, model)

    def _watched(self, update: Callable[..., Any], model: torch.nn.Module) -> Callable[..., Any]:
        @wraps(update)
        def watched(updater: Any, *args: Any, **kwargs: Any) -> Any:
            if _model_of(updater) is not model:  # a draft model has no tower of its own
                return update(updater, *args, **kwargs)
            before = self._begun(memory=not _loads_by_names(update.__name__, args, kwargs))
            try:
                return update(updater, *args, **kwargs)
            finally:
                self._ended(before)

        return watched

    def _beginning(self, begin: Callable[..., Any], model: torch.nn.Module) -> Callable[..., Any]:
        @wraps(begin)
        def begin_weight_update(updater: Any) -> None:
            begin(updater)
            if updater.get_model() is model and remote_instance_transfer_engine_enabled():
                self._session = self._begun(memory=True)

        return begin_weight_update

    def _ending(self, end: Callable[..., Any], model: torch.nn.Module) -> Callable[..., Any]:
        @wraps(end)
        def end_weight_update(updater: Any, *, run_post_load: bool) -> None:
            if updater.get_model() is model:
                before, self._session = self._session, None
                if (
                    before is not None and run_post_load
                ):  # nothing was loaded, so a trainer wrote into memory by RDMA
                    self._ended(before)
            end(updater, run_post_load=run_post_load)

        return end_weight_update

    def _begun(self, *, memory: bool) -> bytes | None:
        """Prepare for an update; return the digest of the tower's memory if the update may write it without names."""
        if not self._has_begun:
            self._has_begun, self._at_start = True, self._own_fingerprint()
            self._found = self._at_start
        return self._digest() if memory else None

    def _ended(self, before: bytes | None) -> None:
        """Note an update, with what `_begun` returned. All ranks do so at the same time."""
        is_same = before is None or all(agreed([before != b"" and self._digest() == before]))
        if not is_same and self._vision is not None:  # until later tensors have names
            self._vision.doubt()
        self._is_shared = False
        mm_schedule.embedding_cache.clear()

    def _digest(self) -> bytes:
        return digest_of(self._tower().state_dict().items())

    def _own_fingerprint(self) -> bytes | None:
        """Return the fingerprint on the first rank, and None on the others, which compare nothing."""
        if self._vision is None or not counts_here():
            return None
        try:
            fingerprint = self._vision.fingerprint
        except (OSError, ValueError) as error:
            self._why_unknown = str(error)
            return None
        if fingerprint is None:
            self._why_unknown = self._vision.why_unknown
        return fingerprint

    def _share(self) -> None:
        """Tell all ranks the fingerprint of the first one; log what it means."""
        compared = self._vision.take_compared() if self._vision is not None else None
        before, (self._at_start, self._found) = (
            self._found,
            _of_first_rank(self._at_start, self._own_fingerprint()),
        )
        if not counts_here():
            return
        if self._found is None:
            _log.warning(
                "the vision weights are unknown, so SGLang's own tower encodes the images until an update has named "
                "every vision tensor: %s",
                self._why_unknown,
            )
        elif self._found != before:
            _log.warning(
                "the vision weights changed: SGLang's own tower encodes the images until an encoder service with the "
                "model fingerprint %s answers (compared %s)",
                self._found.hex(),
                compared,
            )
        elif compared is not None and compared.tensors:
            _log.info("an update left the vision weights as they are: compared %s", compared)


def _of_first_rank(*values: bytes | None) -> list[bytes | None]:
    """Return the values of the first rank, on all ranks."""
    group = get_parallel().attn_tp_group
    found = [*values]
    if group.world_size > 1:
        broadcast_object_list(found, src=group.ranks[0], group=group.cpu_group)
    return found


def _model_of(updater: Any) -> Any:
    return updater._get_model() if isinstance(updater, WeightChecker) else updater.get_model()


def _loads_by_names(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name != "update_weights_from_tensor":
        return name != "_reset_tensors"
    return kwargs.get("load_format", args[1] if len(args) > 1 else None) in BY_NAMES
