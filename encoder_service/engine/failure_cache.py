"""The failure cache: images that can never be encoded, so that the same broken file is decoded only once."""

from cachetools import FIFOCache

from encoder_contract.errors import EncoderError, ImageLimitError, InvalidImageError
from encoder_service.address import ImageKey

FAILURES = 4096  # a few hundred bytes each


class FailureCache:
    """A bounded map from images to their errors, oldest out first. Used on the event loop.

    By source and not by address: a file that cannot be decoded cannot be in any of its variants. What is too large in
    one variant may fit in another.
    """

    def __init__(self) -> None:
        self._errors: FIFOCache[bytes, InvalidImageError] = FIFOCache(FAILURES)

    def note(self, key: ImageKey, error: EncoderError) -> None:
        """Remember `error` if it is the image's own fault; other failures may be temporary."""
        if isinstance(error, InvalidImageError):
            self._errors[key.address if isinstance(error, ImageLimitError) else key.source_key] = error

    def check(self, key: ImageKey) -> None:
        """Raise the error remembered for the image, if there is one."""
        error = self._errors.get(key.source_key) or self._errors.get(key.address)
        if error is not None:
            raise type(error)(error.message)
