"""Internal errors: an unexpected exception becomes an `InternalError` with an id that is in the log."""

import logging
from uuid import uuid4

from encoder_contract.errors import EncoderError, InternalError

log = logging.getLogger(__name__)


def known_error(error: Exception) -> EncoderError:
    """Return `error` itself if it is an `EncoderError`, else an `InternalError` with the id of a log line."""
    if isinstance(error, EncoderError):
        return error
    incident = uuid4().hex[:12]
    log.error("internal error %s", incident, exc_info=error)
    return InternalError(f"internal error {incident}; the server's log has the details")
