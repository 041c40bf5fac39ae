"""Keeps an engine with LoRA within its own limit while a request waits for rows.

Requests of at most `--max-loras` adapters may be in a step, and an engine with more ends. Up to vLLM 0.32, a scheduler
admits a request by the adapters of the step that it plans. A request that waits for rows is in no step, so another
adapter would get its place. A function of the scheduler is therefore patched: it admits by the adapters of all running
requests, as vLLM 0.33 does by itself.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any


def count_waiting_adapters() -> None:
    """Patch this process's scheduler. Does nothing again."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler._handle_blocked_waiting_request, "__wrapped__"):
        Scheduler._handle_blocked_waiting_request = _within_limit(Scheduler._handle_blocked_waiting_request)


def _within_limit(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    adapters: set[int] = set()
    counted: tuple[object, ...] = ()

    @wraps(original)
    def _handle_blocked_waiting_request(scheduler: Any, request: Any) -> bool:
        nonlocal adapters, counted
        if not original(scheduler, request):
            return False
        if scheduler.lora_config is None or request.lora_request is None:
            return True
        # While it admits requests, a step only adds to those that run. A thousand may ask.
        now = (id(scheduler), scheduler.current_step, len(scheduler.running))
        if now != counted:
            running = (each.lora_request for each in scheduler.running)
            adapters, counted = {each.lora_int_id for each in running if each is not None}, now
        return request.lora_request.lora_int_id in adapters or len(adapters) < scheduler.lora_config.max_loras

    return _handle_blocked_waiting_request
