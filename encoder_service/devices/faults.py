"""What an error means for the device of this process: it is lost, short of memory, or the error is one image's."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from encoder_contract.errors import EncoderError, OverloadedError, UnavailableError
from encoder_service.logs import known_error

if TYPE_CHECKING:
    from encoder_service.devices.torch_device import Device

log = logging.getLogger(__name__)

DEVICE_LOST = "the server lost its device"
SHORT_RETRY_MS = 500  # other images in the pipeline release memory soon


class Faults:
    """What an error means for the device of this process, if it uses one. Thread-safe."""

    def __init__(self, device: "Device | None", abort: Callable[[str, BaseException], None]) -> None:
        """`abort(why, error)` ends the process; it is called if the device is lost."""
        self._device = device
        self._abort = abort

    def known_error(self, error: Exception) -> EncoderError:
        """Translate an error for the callers that wait for an image. Call it on the thread that caught the error.

        Ends the process if the device is lost; see `is_loss`.
        """
        if self.is_loss(error):
            return UnavailableError(DEVICE_LOST)
        if self._device is not None and self._device.is_full(error):
            log.warning("the device is short of memory", exc_info=error)
            return OverloadedError("the device is out of memory: retry", retry_after_ms=SHORT_RETRY_MS)
        return known_error(error)

    def is_loss(self, error: Exception) -> bool:
        """Check the device after `error`. Return whether it is lost, and then end the process.

        If the device is only out of memory, free memory.
        """
        if self._device is None or isinstance(error, EncoderError):
            return False
        if not self._device.is_lost():
            if self._device.is_full(error):
                self._device.recover(error)
            return False
        self._abort(DEVICE_LOST, error)
        return True
