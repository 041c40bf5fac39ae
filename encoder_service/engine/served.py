"""The model as the server has it: the devices' processes have loaded it, and only they compute with it."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from encoder_contract.geometry import Grid
from encoder_service.config import Config, ConfigError, flag
from encoder_service.engine.device import Device
from encoder_service.engine.devices import DeviceProcess
from encoder_service.engine.facts import TOWER_COUNTS, ModelFacts
from encoder_service.engine.model import Model, files_decoder
from encoder_service.families.model import CountedRows, VisionModel
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.decoder import Decoder, FileDecoder
from encoder_service.image.decoder_pool import DecoderStartError
from encoder_service.image.source import Source


class ServedRows(CountedRows):
    """A geometry rule that asks a device process for the rows of each size."""

    def __init__(self, devices: Sequence[DeviceProcess], max_rows: int) -> None:
        super().__init__(lambda *_: Grid(1, 0, 1), max_rows)  # not called: `counted` is overridden
        self._devices = devices

    def counted(self, width: int, height: int) -> Grid | str:
        """Ask the first device that is up."""
        return min(self._devices, key=lambda device: not device.is_up).counted(width, height)


class ServedTower:
    """The devices' tower, for the server: implements the part of `VisionModel` that the server needs."""

    def __init__(self, facts: ModelFacts, devices: Sequence[DeviceProcess]) -> None:
        self._facts = facts
        self._devices = devices
        self.geometry = facts.rule or ServedRows(devices, facts.max_tokens)

    def __getattr__(self, name: str) -> Any:
        if name in TOWER_COUNTS:
            return sum(device.counts[name] for device in self._devices)
        return getattr(self._facts, name)


class ServedDecoder(Decoder):
    """The devices' decoder, for the server: reads headers here; the device processes decode."""

    def __init__(self, files: FileDecoder, facts: ModelFacts, devices: Sequence[DeviceProcess]) -> None:
        super().__init__(torch.device("cpu"), files)
        self._facts = facts
        self._devices = devices

    @property
    def name(self) -> str:
        return self._facts.decoder

    @property
    def deaths(self) -> Mapping[str, int]:
        return {
            reason: local + sum(device.counts[reason] for device in self._devices)
            for reason, local in self._files.deaths.items()
        }

    @property
    def messages(self) -> int:
        return self._files.messages + sum(device.counts["messages"] for device in self._devices)

    def can_batch(self, source: Source) -> bool:
        return self._facts.jpegs and source.video is None and DaliJpegs.takes(source)


def served_model(config: Config, devices: Sequence[DeviceProcess]) -> Model:
    """Wait until all devices have loaded; return the server's view of their model.

    Raises `ConfigError` naming what a device cannot load.
    """
    files = files_decoder(config, threads=1)  # for headers
    try:
        for device in devices:
            device.load()
        for device in devices:
            device.facts.plan.check()
        files.start()
    except BaseException as error:
        for device in devices:
            device.end()
        files.close()
        if isinstance(error, DecoderStartError | OSError):
            raise ConfigError(f"{flag('model')} {config.model}: {error}") from error
        raise
    for device in devices:
        device.name = device.facts.device
    facts = devices[0].facts
    return Model(
        cast(VisionModel, ServedTower(facts, devices)),
        facts.recipe,
        ServedDecoder(files, facts, devices),
        Device(facts.device),
        facts.videos,
        facts.no_videos,
    )
