"""Lets the processes of an engine sleep while all of its requests wait for rows.

vLLM steps as long as it has a request. A step that runs nothing takes time of the engine core, of the API server, which
gets its statistics, and of the workers. These look for the next step without a pause until a second after the last. So
two functions of vLLM are patched: the engine core waits for rows, or for a message such as a new request, before it
steps again; and a worker sleeps soon after a step that ran nothing.
"""

import queue
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefill_client.vllm.scheduler_side import SchedulerSide

# How long a worker looks for the next step after one that ran nothing. ZeroMQ, which wakes a worker that sleeps, loses
# the second of two wake-ups within up to 3 ms.
AWAKE_S = 0.004


def let_core_sleep() -> None:
    """Patch this process's engine core. Does nothing again, and for engine cores that step together."""
    from vllm.v1.engine.core import EngineCoreProc

    if not hasattr(EngineCoreProc._process_input_queue, "__wrapped__"):
        EngineCoreProc._process_input_queue = _sleeping(EngineCoreProc._process_input_queue)


def let_worker_sleep() -> None:
    """Patch this process's worker. Does nothing again, and for a worker in the process of its engine core."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    if not hasattr(WorkerProc._execute_worker_rpc, "__wrapped__"):
        WorkerProc._execute_worker_rpc = _resting(WorkerProc._execute_worker_rpc)


def _sleeping(original: Callable[[Any], None]) -> Callable[[Any], None]:
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import DPEngineCoreProc

    @wraps(original)
    def _process_input_queue(core: Any) -> None:
        side: SchedulerSide | None = getattr(
            getattr(core.scheduler, "ec_connector", None), "scheduler_side", None
        )
        if side is not None and not isinstance(core, DPEngineCoreProc):
            side.wake_by(partial(core.input_queue.put_nowait, (EngineCoreRequestType.WAKEUP, None)))
            in_flight = len(core.batch_queue or ())
            if pause_s := side.sleep_s(in_flight, core.scheduler.get_num_unfinished_requests):
                with suppress(queue.Empty):
                    core._handle_client_request(*core.input_queue.get(timeout=pause_s))
        original(core)

    return _process_input_queue


def _resting(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @wraps(original)
    def _execute_worker_rpc(worker: Any, call: tuple[Any, ...]) -> None:
        original(worker, call)
        method, arguments, *_ = call
        # Callers of `/collective_rpc` choose any arguments, and an error here would end the worker.
        step = arguments[0] if method == "execute_model" and arguments else None
        if not getattr(step, "total_num_scheduled_tokens", 1):
            condition = getattr(worker.rpc_broadcast_mq, "_spin_condition", None)
            if condition is not None:  # None on another host than the engine core; a release without it spins
                condition.last_read = monotonic() + AWAKE_S - condition.busy_loop_s

    return _execute_worker_rpc
