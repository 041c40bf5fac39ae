"""Times calls with the device's clock, and prints each measurement at once."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.harness.budget import TimeBudget

LEAST_MS = 1e-6  # not 0, which a coarse clock may measure: rates divide by times


class DeadDeviceError(Exception):
    """The device is lost, so the rest of the benchmark cannot be measured."""


class Probe:
    """The argument of a part: its device and its time budget.

    In a dry run the device is the CPU and parts shrink every size: all code runs, but the figures mean nothing.
    `figures` has all measurements.
    """

    def __init__(self, budget: TimeBudget, scratch: Path, *, dry: bool) -> None:
        """`scratch` is for files that are deleted at the end."""
        self.budget, self.scratch, self.dry = budget, scratch, dry
        self.device = torch.device("cpu" if dry else "cuda:0")
        self.figures: dict[str, dict[str, Any]] = {}

    def note(self, what: str, **values: Any) -> None:
        """Print the values of a measurement. It has failed if there is `failed`, or if `passed` is false."""
        self.figures[what] = values
        print(json.dumps({what: values}, default=str), flush=True)

    def failed(self) -> dict[str, str]:
        """Return the measurements that have failed, each with the reason."""
        return {
            what: values.get("failed", "not passed")
            for what, values in self.figures.items()
            if "failed" in values or values.get("passed") is False
        }

    def attempt(self, what: str, measure: Callable[[], Mapping[str, Any]]) -> bool:
        """Note what `measure` returns, or its error; return whether it succeeded.

        Raises `DeadDeviceError` if the device is lost after a failure.
        """
        if not self.budget.affords(what, 0):
            return False
        try:
            self.note(what, **measure())
        except Exception as error:  # noqa: BLE001 - noted; the next measurement may still succeed
            self.note(what, failed=f"{type(error).__name__}: {str(error)[:200]}")
            self._require_device()
            return False
        return True

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def ms(self, call: Callable[[], object], repeats: int = 20) -> dict[str, float]:
        """Return the median time of a call on the device (`ms`) and on this thread (`host_ms`)."""
        for _ in range(1 if self.dry else 3):
            call()
        self.synchronize()
        device_ms, host_ms = [], []
        for _ in range(2 if self.dry else repeats):
            marks = self._marks()
            began = time.perf_counter()
            marks[0]()
            call()
            marks[1]()
            host_ms.append((time.perf_counter() - began) * 1e3)
            device_ms.append(marks[2]())
        return {"ms": max(median(device_ms), LEAST_MS), "host_ms": median(host_ms)}

    def ms_until_done(self, call: Callable[[], object], repeats: int = 7, warm_up: int = 2) -> float:
        """Return the median milliseconds from a call until the device has finished its work."""
        spent = []
        repeats, warm_up = (1, min(warm_up, 1)) if self.dry else (repeats, warm_up)
        for _ in range(warm_up + repeats):
            began = time.perf_counter()
            call()
            self.synchronize()
            spent.append((time.perf_counter() - began) * 1e3)
        return median(spent[warm_up:])

    def _marks(self) -> tuple[Callable[[], object], Callable[[], object], Callable[[], float]]:
        """Return three functions: mark the beginning, mark the end, return the milliseconds between them."""
        if self.device.type == "cpu":
            at: list[float] = []
            return (
                lambda: at.append(time.perf_counter()),
                lambda: at.append(time.perf_counter()),
                lambda: (at[1] - at[0]) * 1e3,
            )
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def between() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end))

        return begin.record, end.record, between

    def _require_device(self) -> None:
        try:
            self.synchronize()
        except RuntimeError as error:
            raise DeadDeviceError(f"the device is lost: {error}") from error
