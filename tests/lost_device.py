"""A server that loses its device at one stage, or one of whose threads dies: the real command, with one failing part.

The server is forked from a process that has imported torch already, so a start takes a second. `main` is the target of
its device process, which runs the stage; `LOSING` names it.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from encoder_contract.errors import EncoderError
from encoder_service import app, cli
from encoder_service.cluster.leases import Leases
from encoder_service.config import Config
from encoder_service.devices import (
    device_link,
    device_main,
    device_process,
    dispatcher,
    torch_device,
    watchdog,
)
from encoder_service.devices import model as loading
from encoder_service.devices.model import Model
from encoder_service.devices.torch_device import CudaStream, Device
from encoder_service.devices.workers import CopyOut, Prepare, Vit
from encoder_service.image.device_decoder import Decoder
from encoder_service.image.source import Source
from encoder_service.store import moves, tensors
from encoder_service.store import store as storing
from encoder_service.vision import Tower
from tests.device_bench import Changed, in_batches

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["encoder_service.app", "tests.lost_device"])

LOSING = "TORCH_TEST_LOSING"
"""Where processes fail, one after another, and a folder of files named after those that have; without a folder, all
processes fail at the first. The prefix is one that a device's process gets."""

_lost = threading.Event()


def lose(*_: Any) -> NoReturn:
    """Lose the device, like a kernel that accesses invalid memory."""
    _lost.set()
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class LosableDevice(Device):
    """The CPU, which fails every call once it is lost."""

    def synchronize(self) -> None:
        if _lost.is_set():
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class LostEvent:
    """An event after work that lost the device."""

    synchronize = staticmethod(lose)


class LosingStream(CudaStream):
    """A stream whose work loses the device."""

    def mark(self) -> Any:
        return LostEvent()


class LosingDevice(LosableDevice):
    """A device that its streams lose."""

    def stream(self) -> CudaStream:
        return LosingStream("cpu")


class HangingEvent:
    """An event that never passes."""

    def synchronize(self) -> NoReturn:
        while True:
            time.sleep(1)


class HangingStream(CudaStream):
    """A stream whose work never ends."""

    def mark(self) -> Any:
        return HangingEvent()


class HangingDevice(Device):
    """A device that fails no call, and whose work never ends."""

    can_hang = True  # type: ignore[assignment]

    def stream(self) -> CudaStream:
        return HangingStream("cpu")


class LosingMemory(Tensor):
    """A tensor on a device that is lost when it is read: by a copy from it, or by making it contiguous."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        source = (
            arguments[1] if name == "copy_" else arguments[0] if name in ("contiguous", "permute") else None
        )
        if isinstance(source, cls):
            lose()
        return super().__torch_function__(function, kinds, arguments, options or {})


def _decoder(model: Model, **methods: Callable[..., Any]) -> Model:
    return replace(model, decoder=cast(Decoder, Changed(model.decoder, **methods)))


def _tower(model: Model, encode: Callable[..., Any]) -> Model:
    return replace(model, tower=cast(Tower, Changed(model.tower, encode=encode)))


def _losing(results: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: [each.as_subclass(LosingMemory) for each in results(*given)]


def _flat(model: Model) -> Model:
    """Return a model whose pixels have an unexpected shape: the thread that handles them dies."""
    return _decoder(in_batches(model), decode_batch=lambda sources: [torch.empty(1)] * len(sources))


def _deadly(model: Model) -> Model:
    """Return a model whose process is killed while it decodes a dangerous image, as when memory runs out."""

    def decode(source: Source) -> Tensor | EncoderError:
        if source.header.upright == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        return model.decoder.decode(source)

    return _decoder(model, decode=decode)


# How the model of each stage is made from the real one.
STAGES: dict[str, Callable[[Model], Model]] = {
    "decode": lambda model: _decoder(in_batches(model), decode_batch=lose),
    "decode single": lambda model: _decoder(model, can_batch=lambda _: False, decode=lose),
    "patches": lambda model: _decoder(
        in_batches(model), decode_batch=_losing(in_batches(model).decoder.decode_batch)
    ),
    "tower": lambda model: _tower(model, lose),
    "copy-out": lambda model: replace(model, device=LosingDevice("cpu")),
    "put": lambda model: _tower(model, _losing(model.tower.encode)),
    "a dead thread": _flat,
    "a hung device": lambda model: replace(model, device=HangingDevice("cpu")),
}
# Width and height of a dangerous image, and the stage of a process that such images kill.
DEADLY = 80, 80
KILLED = {"deadly image": _deadly}
LOAD_HANGS = "load hangs"
# Of the server itself: where its device tier is lost.
TIERS = ("to host", "mover")


# Threads and tasks that die outside of what they guard: the class and method in which each meets its end.
DEATHS_THERE: dict[str, tuple[type, str]] = {
    "vit dies": (Vit, "_overtaking"),
    "copy-out dies": (CopyOut, "_copy_out"),
    "prepare-single dies": (Prepare, "_prepare_single"),
}
DEATHS: dict[str, tuple[type, str]] = {
    "tier-migrator dies": (moves.Moves, "_demote"),
    "cluster-leases dies": (Leases, "send"),
    "link dies": (device_link.Link, "_left_decoding"),
    "dispatch dies": (device_link.Link, "_decode"),
}


def die(*_: Any) -> NoReturn:
    """Raise an error that no code handles."""
    raise LookupError("a bug of ours")


async def _hang(_: object) -> None:
    """Never end."""
    await asyncio.Event().wait()


def main(descriptors: list[int], *, parent: int) -> None:
    """Run a failing device process."""
    stages, _, folder = os.environ[LOSING].partition(":")
    load_model = loading.load_model

    def load(config: Config, *numbers: int) -> Model:
        if stages == LOAD_HANGS:
            threading.Event().wait()
        model = replace(load_model(config, *numbers), device=LosableDevice("cpu"))
        left = [stage for stage in stages.split(", ") if not folder or not Path(folder, stage).exists()]
        if not left:
            return model
        what = left[0]
        if folder:
            Path(folder, what).touch()
        if what in DEATHS_THERE:
            setattr(*DEATHS_THERE[what], die)
            return model
        return (STAGES | KILLED)[what](model)

    watchdog.TICK_S, watchdog.HUNG_S = 0.05, 1.0
    vars(device_main)["load_model"] = load
    device_main.main(descriptors, parent=parent)


def serve(what: str, failed: str, log: Path, flags: list[str]) -> None:
    """Serve, losing a device at its stages, or a thread: the target of a process."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    app.EXIT_S = 1.0
    dispatcher.MOST_FAILURES = 3  # each takes seconds
    if what in DEATHS:
        setattr(*DEATHS[what], die)
    elif what == "drain hangs":
        vars(app)["Server"]._stop_serving = _hang
    elif what in TIERS:
        vars(storing)["_in_place"] = lambda *given: tensors.tensor_over(*given).as_subclass(LosingMemory)
        vars(torch_device)["Device"] = LosableDevice
    else:
        device_process._MODULE = "tests.lost_device"
        os.environ[LOSING] = f"{what}:{failed}"
    os._exit(cli.main(["serve", *flags]))  # a process that returns here did not end by itself
