"""Times calls with the device's clock, and writes each measurement of a part as a JSON line at once."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

LEAST_MS = 1e-6  # not 0, which a coarse clock may measure: rates divide by times


class DeadDeviceError(Exception):
    """The device is lost, so the rest of the part cannot be measured."""


class Probe:
    """The argument of a part: its device, the file for its lines, and its time budget.

    In a dry run the device is the CPU and parts shrink every size: all code runs, but the figures mean nothing.
    """

    def __init__(self, part: str, out: Path, scratch: Path, *, budget_s: float, dry: bool) -> None:
        """Write results into `out`. `scratch` is for files that are deleted when the part ends."""
        self.part, self.out, self.scratch, self.dry = part, out, scratch, dry
        self.device = torch.device("cpu" if dry else "cuda:0")
        self._file = (out / "gpu.jsonl").open("a", buffering=1)
        self._ends = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        """The remaining seconds of the budget; negative when it is exceeded."""
        return self._ends - time.monotonic()

    def note(self, **values: Any) -> None:
        """Write one line."""
        self._file.write(json.dumps({"part": self.part, **values}, default=str) + "\n")

    def attempt(self, label: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> bool:
        """Note what `measure` returns, or its error; return whether it succeeded.

        Raises `DeadDeviceError` if the device is lost after a failure.
        """
        if self.left_s <= 0:
            self.note(**label, skipped="budget")
            return False
        try:
            self.note(**label, **measure())
        except Exception as error:  # noqa: BLE001 - noted; the next measurement may still succeed
            self.note(**label, failed=f"{type(error).__name__}: {str(error)[:200]}")
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
            print(f"{self.part}: the device is lost", file=sys.stderr)
            raise DeadDeviceError(str(error)) from error
