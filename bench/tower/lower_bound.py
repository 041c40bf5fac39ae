"""The lower bound of a forward: every product and attention call it makes, recorded, then timed alone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CALLS_S = 1.0  # the best of many calls is found early; on a slow machine they add up to minutes


@dataclass
class Clock:
    """What time is measured with: the wall, unless the machine is busy with others' work."""

    now: Callable[[], float] = time.perf_counter


clock = Clock()


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the products and attention calls of a forward, with their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []
        self.bare: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and keep it if it counts."""
        name, given = str(func), kwargs or {}
        if "_linear_pointwise" in name:
            x, weight, bias = (args[0], *args[2:4]) if "binary" in name else args[:3]
            plain = torch.ops.mkldnn._linear_pointwise.default
            self.calls.append(lambda: func(*args))
            self.bare.append(lambda: plain(x, weight, bias, "none", [], ""))
        elif any(part in name for part in ("aten.linear", "aten.addmm", "aten.mm", "attention")):
            self.calls.append(lambda: func(*args, **given))
            self.bare.append(self.calls[-1])
        return func(*args, **given)


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = clock.now()
    call()
    return clock.now() - started


def best_of(most: int, call: Callable[[], object]) -> float:
    """Return the best of so many calls, or of as many as fit into `CALLS_S`, but of three at least."""
    times: list[float] = []
    while len(times) < most and (len(times) < 3 or sum(times) < CALLS_S):
        times.append(seconds(call))
    return min(times)


class LowerBound:
    """Calls timed alone, over several replays.

    `best` [s] is the sum of the best replay: a minimum over as many rounds as the forward it is compared with has.
    `luckiest` [s] adds up the best time of each call, wherever it fell: a bound that no replay reached, and the
    further below them the more calls and rounds there are.
    """

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.best = float("inf")
        self._calls = calls
        self._each = [float("inf")] * len(calls)

    @property
    def luckiest(self) -> float:
        """See above."""
        return sum(self._each)

    @torch.inference_mode()
    def replay(self) -> None:
        """Time each call once more."""
        times = [seconds(call) for call in self._calls]
        self.best = min(self.best, sum(times))
        self._each = [min(pair) for pair in zip(self._each, times, strict=True)]
