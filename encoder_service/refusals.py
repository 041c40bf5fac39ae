"""Images that can never be encoded, remembered, so that the same broken file is decoded once."""

from collections import OrderedDict

from encoder_contract.errors import EncoderError, InvalidImageError

REFUSALS = 4096  # a few hundred bytes each


class Refusals:
    """A bounded map from address to error, least recently added out first. Used from the event loop only."""

    def __init__(self) -> None:
        self._errors: OrderedDict[bytes, InvalidImageError] = OrderedDict()

    def note(self, address: bytes, error: EncoderError) -> None:
        """Remember `error` if it is the image's own fault; anything else may pass."""
        if isinstance(error, InvalidImageError):
            self._errors[address] = error
            if len(self._errors) > REFUSALS:
                self._errors.popitem(last=False)

    def check(self, address: bytes) -> None:
        """Raise the error remembered for `address`, if there is one."""
        error = self._errors.get(address)
        if error is not None:
            raise type(error)(error.message)
