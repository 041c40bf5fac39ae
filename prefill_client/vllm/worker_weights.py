"""The worker's part in updates of weights: it compares the vision tensors that its model loads with those it has.

The engine core calls the functions of this module on all workers. Every rank loads full tensors by their names in the
checkpoint, so the first rank compares for all. What is not loaded so changes the tower's memory, which each rank checks
for its own part of the tower.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from encoder_contract.checkpoint import LANGUAGE_MODEL
from prefill_client.plugin.weights import Compared, VisionWeights, digest_of
from prefill_client.vllm.service_check import folder_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What a worker knows after a call that may have written weights."""

    fingerprint: bytes | None
    """The model fingerprint of the engine's weights, 32 bytes; None if it is unknown. Only the first rank's counts."""
    why_unknown: str = ""
    compared: Compared = field(default_factory=Compared)
    loaded: bool = False
    """Whether the model's `load_weights` was called since the last report."""
    memory_changed: bool = False
    """Whether this rank's part of the tower may have changed, if that was checked."""


class WorkerWeights:
    """The vision weights of one worker."""

    def __init__(self, config: "VllmConfig") -> None:
        """Watch the loading of this worker's model."""
        from vllm.model_executor.model_loader import get_model_cls  # slow to import, and only workers need it

        self.watch: Callable[..., Any] | None = None
        """`WeightUpdates.watch` of a core in this process, where a trainer may call `load_weights` itself."""
        self._vision: VisionWeights | None = None
        self._why_unknown = "another rank compares"
        self._is_update = (
            False  # from `begin` to `report`; other loading is of the start, or only a rehearsal
        )
        self._loaded = False
        self._checks_memory = False
        self._memory = b""  # the digest of this rank's part of the tower, if it is known
        if get_tensor_model_parallel_rank() == 0:
            try:
                self._vision = VisionWeights(folder_of(config), config.model_config.dtype)
            except (OSError, ValueError) as error:  # an engine with its own tower starts all the same
                self._why_unknown = str(error)
        model = get_model_cls(config.model_config)
        if not hasattr(model.load_weights, "__wrapped__"):
            model.load_weights = _watched(model.load_weights)

    def load(self, load: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Let the model load weights. In an update, compare those of vision."""
        if self.watch is None:
            return self._load(load, model, weights)
        worker = SimpleNamespace(get_model=lambda: model)
        return self.watch(
            lambda function, kwargs: [function(worker, **kwargs)],
            WorkerWeights.load,
            None,
            lambda: self._load(load, model, weights),
        )

    def _load(self, load: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        self._loaded |= self._is_update
        if self._vision is None or not self._is_update:
            return load(model, weights)
        try:
            return load(model, self._vision.noting(weights))
        except BaseException:  # nobody knows how far it came
            self._vision.doubt()
            raise

    def begin(self, model: Any, *, memory: bool) -> bytes | None:
        """Prepare for a call that may write weights, and return the fingerprint before it.

        With `memory`, the next report says whether the memory of this rank's part of the tower changed.
        """
        self._is_update = True
        self._checks_memory = memory
        if memory and not self._memory:
            self._memory = tower_digest(model)
        return self._fingerprint()[0]

    def report(self, model: Any, *, trusts_names: bool) -> WeightsReport:
        """Report what is known now. With `trusts_names`, memory need not be checked if `load_weights` was called."""
        changed, loaded = False, self._loaded
        if self._checks_memory and not (loaded and trusts_names):
            now = tower_digest(model)
            changed = not now or now != self._memory
        self._memory = b"" if loaded or changed else self._memory
        self._checks_memory = self._loaded = self._is_update = False
        compared = self._vision.take_compared() if self._vision is not None else Compared()
        return WeightsReport(*self._fingerprint(), compared, loaded, changed)

    def _fingerprint(self) -> tuple[bytes | None, str]:
        """Return the fingerprint, or why it is unknown."""
        if self._vision is None:
            return None, self._why_unknown
        try:
            fingerprint = self._vision.fingerprint
        except (OSError, ValueError) as error:
            return None, str(error)
        return fingerprint, "" if fingerprint else self._vision.why_unknown

    def doubt(self) -> None:
        """Note that the tower may have any weights until an update names them all."""
        if self._vision is not None:
            self._vision.doubt()


def begin(worker: Any, *, memory: bool) -> bytes | None:
    """Call `WorkerWeights.begin` of a worker."""
    return _weights().begin(worker.get_model(), memory=memory)


def report(worker: Any, *, trusts_names: bool, doubt: bool) -> WeightsReport:
    """Call `WorkerWeights.report` of a worker; with `doubt`, first `WorkerWeights.doubt`."""
    if doubt:
        _weights().doubt()
    return _weights().report(worker.get_model(), trusts_names=trusts_names)


def tower_digest(model: Any) -> bytes:
    """Return a digest of all parameters outside the language model; empty if one cannot be read.

    vLLM's build for the CPU packs weights into memory that belongs to no parameter, and leaves empty ones.
    """
    outside = [(name, each) for name, each in model.named_parameters() if not LANGUAGE_MODEL.search(name)]
    return digest_of(outside) if all(each.numel() for _, each in outside) else b""


def _weights() -> WorkerWeights:
    weights: WorkerWeights = get_ec_transfer().weights
    return weights


def _watched(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def load_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        watching = getattr(get_ec_transfer(), "weights", None) if has_ec_transfer() else None
        return load(model, weights) if watching is None else watching.load(load, model, weights)

    return load_weights
