"""Internal errors: an unexpected exception becomes an `InternalError` with an id that is in the log."""

import logging
from uuid import uuid4

from encoder_contract.errors import EncoderError, InternalError

log = logging.getLogger(__name__)


def known_error(error: Exception) -> EncoderError:
    """Return `error` itself if it is an `EncoderError`, else an `InternalError` with the id of a log line.

    Call it where the error ends, to become an answer: it drops the traceback of the error and of those before it. Their
    frames often refer to the error in turn, and such a cycle would keep a call's messages until a garbage collection.
    """
    known = error
    if not isinstance(known, EncoderError):
        incident = uuid4().hex[:12]
        log.error("internal error %s", incident, exc_info=error)
        known = InternalError(f"internal error {incident}; the server's log has the details")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return known
