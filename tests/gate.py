"""A real decoder that tests can block."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from torch import Tensor

from encoder_contract.errors import EncoderError
from encoder_contract.header import Header
from encoder_contract.video import Frames, VideoInfo
from encoder_service.devices.model import Model
from encoder_service.image.device_decoder import Decoder
from encoder_service.image.pillow import Pixels
from encoder_service.image.source import Source, VideoFile
from tests.waiting import START_S


class Gate:
    """A real decoder behind a gate: while the gate is closed, decoding waits, as on a busy machine."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._open, self._frames_open = threading.Event(), threading.Event()
        self._open.set()
        self._frames_open.set()
        self.name, self.deaths, self.messages = decoder.name, decoder.deaths, decoder.messages
        self.device_bytes = decoder.device_bytes
        self.decodes_batches = decoder.decodes_batches
        self.files = self
        self.frames: list[Frames] = []
        """The requested pairs of frames, in order."""

    def before(self, model: Model) -> Model:
        """Return the model with this gate in front of its decoder."""
        return replace(model, decoder=cast(Decoder, self))

    def can_batch(self, source: Source) -> bool:
        """Forward to the decoder."""
        return self._decoder.can_batch(source)

    def read_header(self, file: bytes, formats: Sequence[str]) -> Header | EncoderError:
        """Forward to the decoder."""
        return self._decoder.files.read_header(file, formats)

    def open_video(self, key: bytes, file: VideoFile) -> VideoInfo | EncoderError:
        """Forward to the decoder."""
        return self._decoder.files.open_video(key, file)

    def decode_frames(
        self, source: Source, frames: Frames, is_wanted: Callable[[], bool]
    ) -> Pixels | EncoderError:
        """Wait for the gate, then decode."""
        self.frames.append(frames)
        for gate in (self._open, self._frames_open):
            assert gate.wait(START_S), "the gate stayed closed"
        return self._decoder.decode_frames(source, frames, is_wanted)

    def on_device(self, pixels: Pixels) -> Tensor:
        """Forward to the decoder."""
        return self._decoder.on_device(pixels)

    def decode_batch(self, sources: Sequence[Source]) -> list[Tensor | None]:
        """Wait for the gate, then decode."""
        assert self._open.wait(START_S), "the gate stayed closed"
        return self._decoder.decode_batch(sources)

    def decode(self, source: Source) -> Tensor | EncoderError:
        """Wait for the gate, then decode."""
        assert self._open.wait(START_S), "the gate stayed closed"
        return self._decoder.decode(source)

    @contextmanager
    def closed(self, *, frames_only: bool = False) -> Iterator[None]:
        """Keep the gate closed, for everything or for the frames of videos only."""
        gate = self._frames_open if frames_only else self._open
        gate.clear()
        try:
            yield
        finally:
            gate.set()
