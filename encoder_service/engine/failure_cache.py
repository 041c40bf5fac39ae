"""The failure cache: images that can never be encoded, so that the same broken file is decoded only once."""

from cachetools import FIFOCache

from encoder_contract.errors import EncoderError, InvalidImageError

FAILURES = 4096  # a few hundred bytes each


class FailureCache:
    """A bounded map from the key of a source to its error, oldest out first. Used on the event loop.

    By source and not by address: a file that cannot be decoded cannot be in any of its variants.
    """

    def __init__(self) -> None:
        self._errors: FIFOCache[bytes, InvalidImageError] = FIFOCache(FAILURES)

    def note(self, key: bytes, error: EncoderError) -> None:
        """Remember `error` if it is the image's own fault; other failures may be temporary."""
        if isinstance(error, InvalidImageError):
            self._errors[key] = error

    def check(self, key: bytes) -> None:
        """Raise the error remembered for the source of this key, if there is one."""
        error = self._errors.get(key)
        if error is not None:
            raise type(error)(error.message)
