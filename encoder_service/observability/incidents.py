"""Bugs of ours: any exception becomes an error of the family, under an id that is in the log."""

import logging
from uuid import uuid4

from encoder_contract.errors import EncoderError, InternalError

log = logging.getLogger(__name__)


def known_error(error: Exception) -> EncoderError:
    """Return `error` itself if it is of our family, else an `InternalError` whose id the log explains."""
    if isinstance(error, EncoderError):
        return error
    incident = uuid4().hex[:12]
    log.error("internal error %s", incident, exc_info=error)
    return InternalError(f"internal error {incident}; the server's log has the details")
