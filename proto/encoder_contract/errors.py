"""The errors of the contract: each has a gRPC status and says whether a retry helps.

`Status` names the gRPC canonical codes without importing gRPC. The server turns an error into a status in one place
(`api/messages.py`), and the client turns a status back into an error with `from_status`.
"""

from enum import Enum
from typing import ClassVar, Self


class Status(Enum):
    """The gRPC canonical codes that this contract uses, with their numbers on the wire."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    CANCELLED = 1
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class EncoderError(Exception):
    """The base class: an error with a status that says whether a retry helps.

    `message` is for people. `retry_after_ms` is how long to wait before a retry; 0 if the server does not say. `image`
    is the position of the image, from 0, in the call or prompt that failed because of it; None if it is not known.
    """

    status: ClassVar[Status] = Status.INTERNAL
    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, retry_after_ms: int = 0, image: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.image = image

    def about(self, what: str, image: int) -> Self:
        """Return the same error with `what` in front of its message: the image or video at position `image`."""
        return type(self)(f"{what}: {self.message}", retry_after_ms=self.retry_after_ms, image=image)


class InvalidImageError(EncoderError):
    """The bytes are not an image, are truncated, or have a format that the server does not accept."""

    status, retryable = Status.INVALID_ARGUMENT, False


class ImageLimitError(InvalidImageError):
    """The image exceeds a limit (bytes, pixels, tokens, aspect ratio). The message names the limit."""


class UndecodableImageError(InvalidImageError):
    """A decoder crashed on the image, or exceeded its limit of time or memory."""


class DigestMismatchError(InvalidImageError):
    """The bytes do not have the digest that the caller named."""


class InvalidRequestError(EncoderError):
    """The call breaks the contract: a missing field, a row window outside the image, unexpected bytes."""

    status, retryable = Status.INVALID_ARGUMENT, False


class UnknownImageError(EncoderError):
    """The image was not submitted within the grace, or its file expired: submit it again."""

    status, retryable = Status.NOT_FOUND, True


class LostImageError(UnknownImageError):
    """No server has the image any more, and this caller has no file: whoever has the file must submit it again."""

    retryable = False


class OverloadedError(EncoderError):
    """A queue or the store is full. `retry_after_ms` says when to retry."""

    status, retryable = Status.RESOURCE_EXHAUSTED, True


class UnavailableError(EncoderError):
    """The server is draining, unreachable, or has lost its device: try another server."""

    status, retryable = Status.UNAVAILABLE, True


class StaleHandleError(UnavailableError):
    """The server no longer holds the rows of a handle, or its segment is gone: fetch again."""


class DeadlineError(EncoderError):
    """The caller's deadline passed, its request or upload stalled, or it did not read the answers."""

    status, retryable = Status.DEADLINE_EXCEEDED, False


class ModelMismatchError(EncoderError):
    """Client and server do not match: their fingerprints differ (the message has both), or the server has no tower."""

    status, retryable = Status.FAILED_PRECONDITION, False


class UnauthenticatedError(EncoderError):
    """The call has no valid token or certificate of a tenant, or its token cannot be sent safely."""

    status, retryable = Status.UNAUTHENTICATED, False


class ForbiddenError(EncoderError):
    """The tenant lacks the right, an operator's call the proof of access, or an image URL is not allowed."""

    status, retryable = Status.PERMISSION_DENIED, False


class AbandonedError(EncoderError):
    """All callers of the image have left. No caller sees this error."""

    status, retryable = Status.CANCELLED, True


class InternalError(EncoderError):
    """A bug in the server; the message has the id of the log line with the details. Or an image that ends devices."""

    status, retryable = Status.INTERNAL, True


_BY_STATUS: dict[Status, type[EncoderError]] = {
    Status.INVALID_ARGUMENT: InvalidImageError,
    Status.NOT_FOUND: UnknownImageError,
    Status.RESOURCE_EXHAUSTED: OverloadedError,
    Status.UNAVAILABLE: UnavailableError,
    Status.DEADLINE_EXCEEDED: DeadlineError,
    Status.FAILED_PRECONDITION: ModelMismatchError,
    Status.UNAUTHENTICATED: UnauthenticatedError,
    Status.PERMISSION_DENIED: ForbiddenError,
    Status.CANCELLED: AbandonedError,
    Status.INTERNAL: InternalError,
}


def from_status(code: int, message: str, *, retry_after_ms: int = 0) -> EncoderError:
    """Return the error for a status number from the wire. An unknown number becomes an `InternalError`."""
    try:
        kind = _BY_STATUS[Status(code)]
    except ValueError:
        kind = InternalError
    return kind(message, retry_after_ms=retry_after_ms)
