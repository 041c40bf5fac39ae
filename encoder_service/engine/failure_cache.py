"""Images that can never be encoded, remembered, so that the same broken file is decoded once."""

from collections import OrderedDict

from encoder_contract.errors import EncoderError, InvalidImageError

REFUSALS = 4096  # a few hundred bytes each


class FailureCache:
    """A bounded map from the key of a source to its error, least recently added out first. Used from the event loop.

    By source and not by address: a file that cannot be decoded cannot be in any of its variants.
    """

    def __init__(self) -> None:
        self._errors: OrderedDict[bytes, InvalidImageError] = OrderedDict()

    def note(self, key: bytes, error: EncoderError) -> None:
        """Remember `error` if it is the image's own fault; anything else may pass."""
        if isinstance(error, InvalidImageError):
            self._errors[key] = error
            if len(self._errors) > REFUSALS:
                self._errors.popitem(last=False)

    def check(self, key: bytes) -> None:
        """Raise the error remembered for the source of this key, if there is one."""
        error = self._errors.get(key)
        if error is not None:
            raise type(error)(error.message)
