"""The model as the server has it: the facts that its devices report. Only their processes compute with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from encoder_contract.geometry import Grid, GridRule
from encoder_service.config import Config, ConfigError, flag
from encoder_service.devices.device_process import CHANGED, DeviceProcess
from encoder_service.devices.device_reports import ModelFacts
from encoder_service.families.counted_rows import CountedRows
from encoder_service.image.decoder import FileDecoder
from encoder_service.image.decoder_child import DecoderStartError
from encoder_service.image.decoder_pool import files_decoder
from encoder_service.image.source import Source


class ServedRows(CountedRows):
    """A geometry rule that asks a device process for the rows of each size."""

    def __init__(self, devices: Sequence[DeviceProcess], max_rows: int) -> None:
        super().__init__(lambda *_: Grid(1, 0, 1), max_rows)  # not called: `counted` is overridden
        self._devices = devices

    def counted(self, width: int, height: int) -> Grid | str:
        """Ask the first device that is up."""
        return min(self._devices, key=lambda device: not device.is_up).counted(width, height)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the server knows of its model."""

    facts: ModelFacts
    geometry: GridRule
    files: FileDecoder
    """Reads headers of rare formats and opens videos. The devices decode."""

    @classmethod
    def of(cls, devices: Sequence[DeviceProcess], files: FileDecoder) -> Self:
        """Return the model that all of these devices have loaded."""
        facts = devices[0].facts
        return cls(facts, facts.rule or ServedRows(devices, facts.max_tokens), files)

    def can_batch(self, source: Source) -> bool:
        """Whether the devices decode this image in batches."""
        return self.facts.jpegs and source.is_whole_jpeg


def load_devices(config: Config, devices: Sequence[DeviceProcess]) -> FileDecoder:
    """Wait until all devices have loaded; return the server's own decoder, which is ready too.

    Raises `ConfigError` naming what a device cannot load.
    """
    files = files_decoder(config, threads=1)
    try:
        load_all(devices)
        files.start()
    except BaseException as error:
        for device in devices:
            device.end()
        files.close()
        if isinstance(error, DecoderStartError | OSError):
            raise ConfigError(f"{flag('model')} {config.model}: {error}") from error
        raise
    return files


def load_all(devices: Sequence[DeviceProcess]) -> None:
    """Wait until all devices have loaded one model. Raises `ConfigError` naming what a device cannot load."""
    for device in devices:
        device.load()
    for device in devices:
        device.facts.plan.check()
        device.name = device.facts.device
        if device.facts.recipe != devices[0].facts.recipe:
            raise ConfigError(f"{device.name} has loaded other weights than {devices[0].name}: {CHANGED}")
