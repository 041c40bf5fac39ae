"""Image bytes on their way in: pieces collected per image, bounded over all callers."""

from time import monotonic

from encoder_contract.errors import ImageLimitError, OverloadedError

# When the bound over all callers is reached, the next megabytes are one network round away.
RETRY_AFTER_MS = 200


class UploadBudget:
    """Bytes of unfinished uploads over all callers of the server."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0

    def take(self, size: int) -> None:
        """Count `size` bytes in; raises `OverloadedError` when they don't fit."""
        if self.held_bytes + size > self._max_bytes:
            raise OverloadedError("too many bytes are being uploaded", retry_after_ms=RETRY_AFTER_MS)
        self.held_bytes += size

    def give_back(self, size: int) -> None:
        """Count `size` bytes out again."""
        self.held_bytes -= size


class Upload:
    """The pieces of one image, in order."""

    def __init__(self, budget: UploadBudget, max_image_bytes: int) -> None:
        self._budget = budget
        self._max_image_bytes = max_image_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._began = monotonic()

    @property
    def size(self) -> int:
        """Bytes that have arrived."""
        return self._size

    @property
    def seconds(self) -> float:
        """Time since the image was named."""
        return monotonic() - self._began

    def add(self, piece: bytes) -> None:
        """Append a piece; raises `ImageLimitError` or `OverloadedError` before it is kept."""
        if self._size + len(piece) > self._max_image_bytes:
            raise ImageLimitError(f"the image is larger than max_image_bytes = {self._max_image_bytes}")
        self._budget.take(len(piece))
        self._pieces.append(piece)
        self._size += len(piece)

    def take(self) -> bytes:
        """Return the whole image and stop counting it."""
        image = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self.discard()
        return image

    def discard(self) -> None:
        """Drop what has arrived."""
        self._budget.give_back(self._size)
        self._pieces, self._size = [], 0
