"""The geometry of a family that cannot tell its rules: the model's own processor counts the rows of each size."""

import threading
from collections.abc import Callable

from cachetools import LRUCache

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.geometry import Grid

MAX_ROWS = 32768  # of an image: twice the largest published bound
MAX_REASON = 400  # characters of another library's message
MAX_SIZES = 65536  # image sizes whose rows are cached, which takes 10 MB


class CountedRows:
    """A `GridRule` whose grids count rows, by a function that may take milliseconds. Thread-safe.

    The grids of recent sizes are cached, and so are the reasons why a size has none.
    """

    def __init__(self, count: Callable[[int, int], Grid], max_rows: int = MAX_ROWS) -> None:
        """`count(width, height)` returns (1, h, w) for h × w rows.

        If it raises, the size is refused with the error's message, except for a `MemoryError`.
        """
        self._count = count
        self.max_tokens = max_rows
        self._lock = threading.Lock()
        self._known: LRUCache[tuple[int, int], Grid | str] = LRUCache(MAX_SIZES)

    def __str__(self) -> str:
        return f"rows counted by the server, at most {self.max_tokens} an image"

    def at_once(self, width: int, height: int) -> bool:
        """Whether the rows of this size are cached."""
        with self._lock:
            return (width, height) in self._known

    def grid(self, width: int, height: int) -> Grid:
        """Return the grid of rows. Raises `InvalidImageError` for a size that the model does not take."""
        with self._lock:
            found = self._known.get((width, height))
        if found is None:
            found = self.counted(width, height)
            with self._lock:
                self._known[width, height] = found
        if isinstance(found, str):
            raise InvalidImageError(found)
        return found

    def tokens(self, grid: Grid) -> int:
        """Return the rows in a grid."""
        return grid.patches

    def has(self, grid: Grid) -> bool:
        """Whether an image may have this grid."""
        return grid.t == 1 and min(grid) > 0 and grid.patches <= self.max_tokens

    def variant(self, min_pixels: int = 0, max_pixels: int = 0) -> "CountedRows":
        """Return this rule. Raises `ImageLimitError` for any variant, because this rule has none."""
        if min_pixels or max_pixels:
            raise ImageLimitError("this model has no variants: leave min_pixels and max_pixels out")
        return self

    def counted(self, width: int, height: int) -> Grid | str:
        """Return the grid of this size, or why it has none. Raises errors that a retry may not meet."""
        try:
            grid = self._count(width, height)
        except MemoryError:
            raise  # a retry may succeed
        except Exception as error:  # noqa: BLE001 - the family's code, on a size that any caller can send
            return refusal(width, height, error)
        if not self.has(grid):
            return (
                f"an image of {width}x{height} pixels has {grid.patches} rows; from 1 to {self.max_tokens} are"
                " served"
            )
        return grid


def refusal(width: int, height: int, error: Exception) -> str:
    """Return the message for an image of this size on which the model's processor failed."""
    why = f"{type(error).__name__}: {one_line(error)}"
    return f"the model's image processor refuses an image of {width}x{height} pixels: {why}"


def one_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())[:MAX_REASON]
