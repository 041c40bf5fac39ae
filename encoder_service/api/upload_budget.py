"""Uploads: space is reserved before the bytes are sent, and released when they stop arriving."""

from collections.abc import Collection
from time import monotonic

from encoder_contract.errors import ImageLimitError
from encoder_service.scheduler.shares import Shares

# A slower upload counts as stalled: an occasional byte must not hold space that others wait for.
MIN_BYTES_PER_S = 64 << 10


class Upload:
    """The pieces of one image, in order."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size = 0
        self._pieces: list[bytes] = []
        self._began = monotonic()

    @property
    def seconds(self) -> float:
        """Time since the image was named."""
        return monotonic() - self._began

    def add(self, piece: bytes) -> None:
        """Append a piece."""
        self._pieces.append(piece)
        self.size += len(piece)

    def joined(self) -> bytes:
        """Return the whole image."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


class Uploads:
    """The images of one call that are being uploaded, by the caller's index.

    The call reserves space for the largest of them, which is enough to send one after another. A caller that
    interleaves images may hold more, up to the size of the largest image allowed, if there is space.
    """

    def __init__(
        self, room: Shares, holders: Collection[str], *, max_image_bytes: int, idle_s: float
    ) -> None:
        """`room` is shared by all callers; `holders` are the names that this caller's share counts against."""
        self._room = room
        self._holders = holders
        self._max_bytes = min(max_image_bytes, room.size)
        self._idle_s = idle_s
        self._images: dict[int, Upload] = {}
        self._set_aside = 0
        self.patience_s = idle_s
        """How much longer to wait for the next piece."""

    @property
    def expected(self) -> list[int]:
        """The images that are not complete."""
        return list(self._images)

    def expect(self, index: int, size_bytes: int) -> None:
        """Reserve space for an image; size 0 is unknown. Raises `ImageLimitError` and `OverloadedError`."""
        if size_bytes > self._max_bytes:
            raise ImageLimitError(f"the image is larger than max_image_bytes = {self._max_bytes}")
        if not self._images:
            self.patience_s = self._idle_s
        self._reserve(max(self._set_aside, size_bytes or self._max_bytes))
        self._images[index] = Upload(size_bytes or self._max_bytes)

    def add(self, index: int, piece: bytes) -> Upload:
        """Append a piece and return the upload; raises what `expect` does, before the piece is kept."""
        upload, size = self._images[index], len(piece)
        if upload.size + size > upload.max_bytes:
            limit = "max_image_bytes" if upload.max_bytes == self._max_bytes else "size_bytes of its name"
            raise ImageLimitError(f"the image is larger than {limit} = {upload.max_bytes}")
        held = size + sum(other.size for other in self._images.values())
        if held > self._max_bytes:
            raise ImageLimitError(
                f"the call holds pieces of images that are not complete over max_image_bytes = {self._max_bytes}: "
                "send one after another"
            )
        self._reserve(max(self._set_aside, held))
        self.patience_s = min(self.patience_s + size / MIN_BYTES_PER_S, self._idle_s)
        upload.add(piece)
        return upload

    def drop(self, index: int) -> None:
        """Forget an image that is complete or failed, and release the space that the others do not need."""
        del self._images[index]
        largest = max((upload.max_bytes for upload in self._images.values()), default=0)
        self._reserve(max(largest, sum(upload.size for upload in self._images.values())))

    def _reserve(self, size: int) -> None:
        if size > self._set_aside:
            self._room.take(self._holders, size - self._set_aside)
        else:
            self._room.give_back(self._holders, self._set_aside - size)
        self._set_aside = size
