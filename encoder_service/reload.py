"""Loads another checkpoint beside the one that is served, in device processes of its own, and compares the two."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from encoder_service.config import Config, ConfigError
from encoder_service.devices.device_process import DeviceProcess, start_devices
from encoder_service.devices.device_reports import ModelFacts
from encoder_service.devices.served_model import load_all
from encoder_service.families.choice import check_model

MAY_DIFFER = frozenset({"model", "plan", "torch"})
"""Fields of `ModelFacts` and `Recipe` that a reload may change: fingerprint, measured memory, and torch's version."""


def checkpoint_path(folder: str) -> Path:
    """Return the folder that a path names; if that is a link, later processes must not follow it elsewhere.

    Raises `ConfigError` for a relative path, and if there is no checkpoint that the server may be able to serve.
    """
    if not folder.startswith("/"):
        raise ConfigError(f"{folder or 'the folder'}: give an absolute path")
    try:
        path = Path(folder).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{folder!r}: {reason}") from error
    check_model(path)
    return path


async def load_beside(config: Config, served: ModelFacts) -> list[DeviceProcess]:
    """Load `config.model` on the devices that serve a model, in new processes. Return them once all are ready.

    Return none if the weights are those that are served.

    Raises `ConfigError`, in one line, if the folder has no checkpoint of the served architecture, memory is short, or a
    process ends or hangs. None of the new processes is left then, nor if this is cancelled.
    """
    # The device tier is there already. A process ends with the thread that starts it, so this thread does.
    try:
        devices = start_devices(replace(config, store_device_gib=0.0), served.plan.beside)
    except OSError as error:
        raise ConfigError(f"no process can be started: {error}") from error
    loading = asyncio.ensure_future(asyncio.to_thread(load_all, devices))
    try:
        await asyncio.shield(loading)
        _check(served, [device.facts for device in devices])
        if devices[0].facts.recipe == served.recipe:
            await asyncio.to_thread(_end, devices)
            return []
    except BaseException:
        for device in devices:
            device.kill()  # `load` notices
        await asyncio.gather(asyncio.shield(loading), return_exceptions=True)
        await asyncio.to_thread(_end, devices)
        raise
    return devices


def _end(devices: Sequence[DeviceProcess]) -> None:
    for device in devices:
        device.end()


def _check(served: ModelFacts, loaded: Sequence[ModelFacts]) -> None:
    for facts in loaded:
        if difference := next(_differences(served, facts), ""):
            raise ConfigError(
                f"the checkpoint differs from the served one in more than weights: {difference}"
            )
        if facts.plan.total and facts.plan.left < 0:
            raise ConfigError(
                f"{facts.device} has too little memory for both, until the calls of the first have ended ({facts.plan})"
            )


def _differences(ours: Any, theirs: Any) -> Iterator[str]:
    """Yield each field in which two models differ, with both values."""
    for name in (field.name for field in fields(ours) if field.name not in MAY_DIFFER):
        one, other = getattr(ours, name), getattr(theirs, name)
        if is_dataclass(one) and type(one) is type(other):
            yield from _differences(one, other)
        elif one != other:
            shown = [value.hex()[:12] if isinstance(value, bytes) else value for value in (other, one)]
            yield f"its {name} is {shown[0]}, not {shown[1]}"
