"""The messages between the server and a device's process: all one-way, over one socket.

A batch costs two messages each way: `Decode` and `Prepared`, `Encode` and `Encoded`. Both sides name an image by the
number that the server gave it; numbers are not reused. A number ends once: with `Dropped` or `Retry`, with its
`Encoded` batch, with a `Failed` batch of this image alone, or with `Gone` once it is decoded. After a `Failed` batch of
several images, their numbers stay valid. If `Gone` arrives while an image is being decoded, the report of the decoding
ends the number.

A message is pickled, because a device's process is as trusted as the server. Files travel beside the pickle, so that
neither side copies them into it.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from encoder_contract.errors import EncoderError
    from encoder_contract.geometry import Grid
    from encoder_contract.header import Header
    from encoder_service.config import Config
    from encoder_service.devices.device_reports import DeviceState
    from encoder_service.keys import ImageKey

Place = tuple[str, list[tuple[int, int]]]
"""Where the rows of an image go: the tier, and (offset, length) of each extent in its memory, in bytes."""

# Server to device


@dataclass(frozen=True, slots=True)
class Load:
    """The first message to a process: load the model. `processes` devices load at the same time.

    Beside the weights, `beside_bytes` of the device must be free: what the tower takes for images, if that is known.
    """

    config: Config
    number: int
    processes: int
    beside_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Begin:
    """The server is ready: map its store, and wait for images.

    `segment` and `data_offset` tell where the host tier lies, `tier` is the name and size of the device tier, if there
    is one. `rendezvous` is the port where devices form groups; 0 if there is one device.
    """

    segment: Path
    data_offset: int
    tier: tuple[bytes, int] | None
    rendezvous: int


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image to decode. `key` is given for frames of a video, `video` is then the path of the file, and its size."""

    number: int
    data: bytes | pickle.PickleBuffer = field(repr=False)
    header: Header
    grid: Grid
    key: ImageKey | None = None
    video: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode these images in one batch, or, if it is `single`, the only one by itself."""

    images: list[ImageFile]
    single: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """An image that all devices encode together: the number of their group, and the device that has the patches."""

    number: int
    leader: int
    devices: int
    grid: Grid


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode these images in one batch, named by its number, and write their rows to their places.

    An `urgent` batch is encoded in the middle of the current one, or else before those that wait. With a group, the
    other devices help with its only image. `seconds` is the time that it should take; 0 if that is unknown.
    """

    batch: int
    images: list[int]
    places: list[Place]
    seconds: float
    urgent: bool = False
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Encode this device's share of another device's image. `seconds` as in `Encode`."""

    group: Group
    seconds: float


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Connect to the other devices as the group of this number, before an image needs it."""

    number: int


ForTower = Encode | JoinGroup | FormGroup
"""Work for the tower's thread, in order."""


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Another device of this group failed: stop waiting for it."""

    number: int


@dataclass(frozen=True, slots=True)
class Gone:
    """Nobody wants these images any more: free their patches, or stop decoding them."""

    images: list[int]


@dataclass(frozen=True, slots=True)
class Close:
    """No more work will come: finish the batches that were sent, and end."""


# Device to server


@dataclass(frozen=True, slots=True)
class Prepared:
    """The patches of these images are ready. `decoder` decoded them together; times are on time.monotonic's clock.

    `seconds` is what a thread spent on decoding them. `pixels` are the digests of frames, else empty.
    """

    images: list[int]
    decoder: str
    seconds: float
    decode_began: float
    decode_ended: float
    cut_began: float
    cut_ended: float
    pixels: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Retry:
    """The batch decoder failed on these images, in so many seconds: they are to be decoded one by one."""

    images: list[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """An image failed before it was in a batch. `seconds` were spent on decoding it, from `began` on."""

    image: int
    error: EncoderError
    began: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch has ended: the error of each image, or None if its rows are written.

    `seconds` is the time that all its `devices` were busy with it, `vit_s` the time from `vit_began` to its end on the
    device, with the images that overtook it.
    """

    batch: int
    errors: list[EncoderError | None]
    seconds: float
    devices: int
    flops: float
    vit_began: float
    vit_s: float
    copy_began: float
    copy_ended: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A batch failed as a whole. Its patches are kept if it has several images, for smaller batches."""

    batch: int
    error: EncoderError


@dataclass(frozen=True, slots=True)
class LeftGroup:
    """The device has formed the group, or has done its share of an image of it; or it failed to."""

    number: int
    failed: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The process lives; sent every `REPORT_S`. `state` is given when it has changed."""

    state: DeviceState | None


REPORT_S = 0.25

_HEAD = struct.Struct("!II")  # bytes of the pickle, number of files
_SIZE = struct.Struct("!Q")


def beside(data: bytes) -> pickle.PickleBuffer:
    """Return a file for a message, to be sent beside its pickle. It arrives as bytes."""
    return pickle.PickleBuffer(data)


def packed(message: object) -> list[bytes | memoryview]:
    """Return the pieces of a message, in order. Files are not copied."""
    files: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, 5, buffer_callback=files.append)
    views = [file.raw() for file in files]
    sizes = b"".join(_SIZE.pack(len(view)) for view in views)
    return [_HEAD.pack(len(body), len(views)) + sizes + body, *views]


class Unpacker:
    """Puts messages together again, from bytes as they arrive. For messages without files, as devices send them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> Iterator[Any]:
        """Add bytes; yield the messages that are complete now."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            size, files = _HEAD.unpack_from(self._buffer)
            assert not files, "devices send no files"
            end = _HEAD.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield pickle.loads(body)  # noqa: S301 - from our own process


def send(connection: socket.socket, message: object) -> None:
    """Send a message on a blocking socket. Raises `OSError` if the other side has gone."""
    for piece in packed(message):
        connection.sendall(piece)


def receive(connection: socket.socket) -> Any:
    """Wait for a message on a blocking socket. Raises `OSError` if the other side has gone."""
    size, files = _HEAD.unpack(_read(connection, _HEAD.size))
    sizes = [_SIZE.unpack(_read(connection, _SIZE.size))[0] for _ in range(files)]
    body = _read(connection, size)
    return pickle.loads(body, buffers=[_read(connection, each) for each in sizes])  # noqa: S301 - from the server


def _read(connection: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes."""
    data = connection.recv(size, socket.MSG_WAITALL) if size else b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data), socket.MSG_WAITALL)):
            raise ConnectionError("the other side has closed the connection")
        data += more
    return data
