"""A device's end of the socket: one thread reads what the server pushes into queues, any thread reports.

`DeviceImage` is an image on its way through the device: file, then patches.
"""

import logging
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NoReturn

import torch

from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Grid
from encoder_service.devices import EXIT_LOST, EXIT_STUCK, messages
from encoder_service.devices.faults import DEVICE_LOST
from encoder_service.devices.watchdog import HungDeviceError
from encoder_service.families.model import Inputs
from encoder_service.image.source import Source, VideoFile
from encoder_service.keys import ImageKey

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class DeviceImage:
    """An image that the device decodes or encodes. `key` is given for frames of a video; `file` is then their video."""

    number: int
    source: Source
    grid: Grid
    key: ImageKey | None
    file: VideoFile | None
    patches: Inputs | None = None
    patches_ready: "torch.cuda.Event | None" = None
    pixels: bytes = b""  # of frames: see `ImageKey.of_pixels`
    is_wanted: bool = True

    @classmethod
    def of(cls, sent: messages.ImageFile) -> "DeviceImage":
        """Return an image that the server has sent."""
        assert isinstance(sent.data, bytes)
        file = _open(*sent.video) if sent.video is not None else None
        reference = weakref.ref(file) if file is not None else None
        source_key = sent.key.source_key if sent.key is not None else b""
        return cls(
            sent.number, Source(source_key, sent.data, sent.header, file=reference), sent.grid, sent.key, file
        )


def _open(path: str, size: int) -> VideoFile | None:
    """Open the file of a video, which the server holds; None if it is closed already."""
    try:
        return VideoFile.of(os.open(path, os.O_RDONLY | os.O_CLOEXEC), size)
    except OSError:
        return None


class Batches:
    """The batches that wait for the tower; urgent ones first. Thread-safe."""

    def __init__(self) -> None:
        self._urgent: deque[messages.Encode] = deque()
        self._usual: deque[messages.ForTower] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, batch: messages.ForTower) -> None:
        """Add a batch."""
        with self._changed:
            if isinstance(batch, messages.Encode) and batch.urgent:
                self._urgent.append(batch)
            else:
                self._usual.append(batch)
            self._changed.notify()

    def take(self) -> messages.ForTower | None:
        """Wait for the next batch; None once `close` was called and none is left."""
        with self._changed:
            while True:
                if self._urgent:
                    return self._urgent.popleft()
                if self._usual:
                    return self._usual.popleft()
                if self._closed:
                    return None
                self._changed.wait()

    def take_urgent(self) -> messages.Encode | None:
        """Return an urgent batch, if one waits."""
        try:
            return self._urgent.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """End `take`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Inbox:
    """The images that the device has, by number, and the queues of its threads."""

    def __init__(self, connection: socket.socket, end: Callable[[int], NoReturn]) -> None:
        """`end(status)` ends the process, or in tests the thread that takes its place."""
        self._connection = connection
        self._end = end
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._images: dict[int, DeviceImage] = {}
        self.is_closed = False
        self.to_decode: SimpleQueue[list[DeviceImage]] = SimpleQueue()
        """Batches to decode; an empty one ends the thread that decodes them."""
        self.to_decode_single: SimpleQueue[DeviceImage | None] = SimpleQueue()
        """Images to decode by themselves; None ends a thread that decodes them."""
        self.batches = Batches()
        self.leave_group: Callable[[int], None] = lambda _number: None
        """Called on the reading thread when another device of the group with this number has failed."""

    def read(self, single_decoders: int) -> None:
        """Read what the server sends until it closes: the target of a thread."""
        try:
            while not self.is_closed:
                self._take(messages.receive(self._connection))
        except OSError:
            self._end(0)  # the server has gone
        finally:
            self.is_closed = True
            self.to_decode.put([])
            for _ in range(single_decoders):
                self.to_decode_single.put(None)
            self.batches.close()

    def _take(self, message: object) -> None:
        if isinstance(message, messages.ForTower):
            self.batches.put(message)
        elif isinstance(message, messages.Decode):
            images = [DeviceImage.of(sent) for sent in message.images]
            with self._lock:
                self._images.update((image.number, image) for image in images)
            if message.single:
                self.to_decode_single.put(images[0])
            else:
                self.to_decode.put(images)
        elif isinstance(message, messages.Gone):
            for number in message.images:
                self._gone(number)
        elif isinstance(message, messages.LeaveGroup):
            self.leave_group(message.number)
        else:
            assert isinstance(message, messages.Close), message
            self.is_closed = True

    def _gone(self, number: int) -> None:
        with self._lock:
            image = self._images.get(number)
            if image is None:  # it was dropped
                return
            image.is_wanted = False
            if image.patches is not None:
                del self._images[number]

    def is_wanted(self, image: DeviceImage) -> bool:
        """Whether somebody still wants an image that is being decoded."""
        return image.is_wanted and not self.is_closed

    def images_of(self, batch: messages.Encode) -> list[DeviceImage]:
        """Return the images of a batch."""
        with self._lock:
            return [self._images[number] for number in batch.images]

    # Reports

    def tell(self, message: object) -> None:
        """Send a report to the server."""
        try:
            with self._sending:
                messages.send(self._connection, message)
        except OSError:
            self._end(0)  # the server has gone

    def prepared(
        self,
        prepared: Sequence[tuple[DeviceImage, Inputs]],
        ready: "torch.cuda.Event | None",
        report: messages.Prepared,
    ) -> None:
        """Keep the patches of these images, which are ready once `ready` has passed, unless nobody wants them."""
        with self._lock:
            for image, patches in prepared:
                image.file = None
                if image.is_wanted:
                    image.patches, image.patches_ready = patches, ready
                else:
                    del self._images[image.number]
        self.tell(report)

    def retry(self, images: Sequence[DeviceImage], seconds: float) -> None:
        """Report that the batch decoder failed on these images."""
        self.tell(messages.Retry(self._forget(images), seconds))

    def drop(self, image: DeviceImage, error: EncoderError, began: float, seconds: float) -> None:
        """Report that an image failed before it was in a batch. `seconds` were spent on decoding it."""
        [number] = self._forget([image])
        self.tell(messages.Dropped(number, error, began, seconds))

    def encoded(self, images: Sequence[DeviceImage], report: messages.Encoded) -> None:
        """Report the end of a batch."""
        self._forget(images)
        self.tell(report)

    def failed(self, batch: int, images: Sequence[DeviceImage], error: EncoderError) -> None:
        """Report that a batch failed as a whole. Several images wait for smaller batches."""
        if len(images) == 1:
            self._forget(images)
        self.tell(messages.Failed(batch, error))

    def abort(self, why: str, error: BaseException) -> NoReturn:
        """End the process: it cannot encode any more."""
        log.critical("%s: ending its process", why, exc_info=error)
        self._end(
            EXIT_STUCK if isinstance(error, HungDeviceError) else EXIT_LOST if why == DEVICE_LOST else 1
        )

    def _forget(self, images: Sequence[DeviceImage]) -> list[int]:
        with self._lock:
            for image in images:
                del self._images[image.number]
        return [image.number for image in images]
