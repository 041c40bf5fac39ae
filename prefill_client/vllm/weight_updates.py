"""New weights in a running engine: after each call that may have written some, the engine core asks its workers.

Trainers write weights by calls of all workers (`/update_weights`, `/collective_rpc`), which run between two steps. The
core therefore knows before its next step whether the vision weights are still those of the encoder service. If not, it
takes rows only of a service with the new ones. The same calls end what the engine's encoder caches hold.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer

from prefill_client.vllm.worker_weights import WeightsReport, WorkerWeights, begin, report

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger("vllm.encoder_service")

QUERY = "encoder_service_weights"
"""The call of all workers that the core itself answers, with `WeightUpdates.told`."""
START, FINISH, RELOAD = "start_weight_update", "finish_weight_update", "reload_weights"
SESSION = (START, "update_weights", FINISH)
"""The calls of an update that takes several."""
BY_NAMES = frozenset(("nccl", "ipc"))
"""The backends of weight transfer that pass each tensor to the model's `load_weights`."""
LEAVE_WEIGHTS = frozenset(
    (
        "add_lora", "check_health", "compute_weight_checksums", "get_encoder_timing_stats", "get_supported_tasks",
        "init_weight_transfer_engine", "list_loras", "pin_lora", "profile", "remove_lora", "reset_encoder_cache",
        "reset_mm_cache", "save_sharded_state", "save_tensorized_model", "shutdown_weight_transfer_engine", "sleep",
        "start_draft_weight_update", "synchronize_device", "update_config", "update_max_model_len", "wake_up",
    )
)  # fmt: skip
"""vLLM's own calls of all workers that change no weights of the model."""
RESET = "reset_encoder_cache"
"""The only one of them that empties the workers' encoder caches."""

CallWorkers = Callable[..., list[Any]]
"""Calls a function with each worker as its first argument, on all workers, and returns the results by rank."""


class WeightUpdates:
    """What the engine core knows of the engine's vision weights. Used by its only thread."""

    def __init__(self, config: "VllmConfig", changed: Callable[[bytes | None], None]) -> None:
        """`changed` is called with each new fingerprint, and with None if it is unknown."""
        transfer = config.weight_transfer_config
        self._by_names = transfer is None or transfer.backend in BY_NAMES
        limits = config.model_config.multimodal_config
        self._has_tower = any(limits.get_limit_per_prompt(kind) for kind in ("image", "video"))
        self._changed = changed
        self._at_start: bytes | None = None
        self._fingerprint: bytes | None = None
        self._has_begun = False
        self._doubt = False
        self._workers: CallWorkers = lambda *_, **__: []
        self._is_calling = False
        # Calls that load tensors by their names: the model's own method, and those of extensions.
        self._loaders: set[object] = {WorkerWeights.load}
        self._unsettled: object = None  # the last of them that is not compared yet
        self.is_running = False
        """Whether an update runs that takes several calls: until it ends, nobody knows the weights."""

    @property
    def told(self) -> str | None:
        """The fingerprint, as hexadecimal digits; empty if it is that of the start, None if it is unknown."""
        self.settle()
        if self._fingerprint == self._at_start and (self._at_start is not None or not self._has_begun):
            return ""
        return None if self._fingerprint is None else self._fingerprint.hex()

    def watch(
        self,
        workers: CallWorkers,
        method: object,
        options: Mapping[str, Any] | None,
        call: Callable[[], Any],
        *,
        are_asleep: bool = False,
    ) -> Any:
        """Return the result of a call of all workers, after the vision weights were compared.

        `options` are its keyword arguments, None if it also has others. `are_asleep`: nobody can read or write the
        weights. A call within another one is a part of it.
        """
        if self._is_calling:
            return call()
        if method not in self._loaders:
            self.settle()
        if isinstance(method, str) and method in LEAVE_WEIGHTS:
            return self._result_of(call)
        self._workers = workers
        loads = self._loads(method, options)
        if not self.is_running:
            self._begin(memory=not (loads or are_asleep))
        elif not loads and method not in SESSION:  # parts of the tower may have no memory now
            self._doubt = True
        try:
            result = self._result_of(call)
        except BaseException:
            self._doubt, self.is_running = True, False
            self._compare(method)
            raise
        if method in (START, FINISH):
            self.is_running = method == START
            self._doubt |= not (
                self._by_names or self._has_tower
            )  # a tower may have been sent, and nobody knows
        if method in self._loaders:
            self._unsettled = method
        elif not self.is_running:
            self._compare(method)
        return result

    def _result_of(self, call: Callable[[], Any]) -> Any:
        self._is_calling = True
        try:
            return call()
        finally:
            self._is_calling = False

    def settle(self) -> None:
        """Compare what calls of extensions have written. There may be one for each tensor, so they do not."""
        if self._unsettled is not None and not self.is_running:
            method, self._unsettled = self._unsettled, None
            self._compare(method)

    def _loads(self, method: object, options: Mapping[str, Any] | None) -> bool:
        """Whether a call writes weights only by `load_weights` of the model."""
        if method == RELOAD:
            return options is not None and options.get("is_checkpoint_format", True) is True
        return (method in SESSION and self._by_names) or method in self._loaders

    def _begin(self, *, memory: bool) -> None:
        fingerprint = self._workers(begin, kwargs={"memory": memory})[0]
        if not self._has_begun:
            self._has_begun, self._at_start, self._fingerprint = True, fingerprint, fingerprint

    def _compare(self, method: object) -> None:
        doubt, self._doubt = self._doubt, False
        try:
            first = self._reported(method, doubt=doubt)
        except Exception as error:  # noqa: BLE001 - the call that was watched has its own result
            first = WeightsReport(None, repr(error))
        if first.fingerprint == self._fingerprint:
            if first.fingerprint is not None and first.compared.tensors:
                _log.info("an update left the vision weights as they are: compared %s", first.compared)
            return
        self._fingerprint = first.fingerprint
        self._changed(first.fingerprint)
        if first.fingerprint is None:
            _log.error(
                "an update wrote unknown vision weights, so the encoder service encodes no images: %s. It does again "
                "when an update has named every vision tensor, or the engine restarts",
                first.why_unknown,
            )
        else:
            _log.warning(
                "an update changed the vision weights: images are encoded by an encoder service with the model "
                "fingerprint %s, once one answers (compared %s)",
                first.fingerprint.hex(),
                first.compared,
            )

    def _reported(self, method: object, *, doubt: bool) -> WeightsReport:
        """Return the report of the first rank. What was not written by `load_weights` makes all weights doubtful."""
        is_of_extension = method not in (*SESSION, RELOAD)
        options = {"trusts_names": is_of_extension, "doubt": doubt}
        reports: list[WeightsReport] = self._workers(report, kwargs=options)
        if is_of_extension and reports[0].loaded:
            self._loaders.add(method)
        elif method in self._loaders or any(each.memory_changed for each in reports):
            reports = self._workers(report, kwargs={**options, "doubt": True})
        return reports[0]


def watch_calls(updates: WeightUpdates | None) -> None:
    """Patch this process's engine core to compare vision weights after calls of its workers. Does nothing again.

    `updates` also watches a worker in this process.
    """
    from vllm.v1.engine.core import EngineCore

    if updates is not None and has_ec_transfer():
        here = getattr(get_ec_transfer(), "weights", None)
        if here is not None:
            here.watch = updates.watch
    if not hasattr(EngineCore.collective_rpc, "__wrapped__"):
        EngineCore.collective_rpc = _watched(EngineCore.collective_rpc)


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def collective_rpc(
        core: Any,
        method: object,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        call = partial(original, core, method, timeout, args, kwargs)
        connector: Any = getattr(getattr(core, "scheduler", None), "ec_connector", None)
        if not hasattr(connector, "updates"):
            return call()
        updates: WeightUpdates | None = connector.updates
        if updates is not None and method == QUERY:
            return [updates.told]
        try:
            if updates is None:
                return call()
            return updates.watch(
                core.model_executor.collective_rpc,
                method,
                None if args else kwargs or {},
                call,
                are_asleep="weights" in core.model_executor.sleeping_tags,
            )
        finally:
            if method == RESET or not (isinstance(method, str) and method in LEAVE_WEIGHTS):
                _empty_encoder_caches(core)

    return collective_rpc


def _empty_encoder_caches(core: Any) -> None:
    """Empty the encoder caches of the scheduler and of its workers.

    What writes weights may empty those of the workers alone, as `reload_weights` does. The engine would end at the next
    step that reads a row on which the scheduler counts. Or it leaves rows that the engine's own tower has encoded with
    the old weights. The table has the rows of the service until no request needs them.
    """
    if getattr(core.scheduler.encoder_cache_manager, "cached", ()):  # not of encoder-decoder models
        core.scheduler.reset_encoder_cache()
        core.model_executor.reset_encoder_cache()
