"""Converts between protobuf messages and the server's own types, and turns errors into gRPC statuses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from encoder_contract.digest import DIGEST_BYTES
from encoder_contract.errors import EncoderError, InvalidRequestError, Status
from encoder_contract.geometry import Geometry, Grid, GridRule
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.video import Frames
from encoder_service.images import LookupResult
from encoder_service.keys import MAX_SALT_BYTES, ImageKey, Recipe
from encoder_service.scheduler.policy import MAX_PRIORITY, MIN_PRIORITY

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
M = TypeVar("M", bound=Message)

# A request without a list has names, proofs and addresses of tens of bytes, and a `Caller` of some hundreds.
SMALL_BYTES = 2048
# A name in a Submit or Fetch with every field at its largest, including the tag and length of each field.
NAME_BYTES = 256
# Files in one message of a Submit. The bytes of an incomplete message count towards no limit.
PIECE_BYTES = 1 << 20
# An `ImageBytes` besides its data.
PIECE_FIELDS_BYTES = 16
MAX_REQUEST_ID_BYTES = 128  # an identifier, not a payload; each queued image has a copy
# The most fields that a request has besides the names of images.
OTHER_FIELDS = 64
# The tags of fields with a length; a field with the same number and another type is unknown, as for protobuf.
_OPEN, _NAMES, _BYTES = (
    number << 3 | 2
    for number in (
        pb.SubmitRequest.OPEN_FIELD_NUMBER,
        pb.SubmitRequest.NAMES_FIELD_NUMBER,
        pb.SubmitRequest.BYTES_FIELD_NUMBER,
    )
)
_CODES: Mapping[Status, grpc.StatusCode] = {
    s: c for s in Status for c in grpc.StatusCode if c.value[0] == s.value
}


def names_bytes(max_images: int) -> int:
    """Return the largest allowed size of a request that names `max_images` images."""
    return SMALL_BYTES + NAME_BYTES * max_images


def max_request_bytes(max_images: int) -> int:
    """Return the largest allowed size of any request, if calls name `max_images` images."""
    return names_bytes(max_images) + PIECE_BYTES + PIECE_FIELDS_BYTES * max_images


def parse(kind: type[M], raw: bytes, max_bytes: int = SMALL_BYTES) -> M:
    """Return the message; raises `InvalidRequestError` for bytes that are not such a message, or too many.

    For requests without a list: a bound on their size is enough to bound the sub-messages in them.
    """
    _check_bytes(kind, raw, max_bytes)
    return _parsed(kind, raw)


def _parsed(kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequestError(
            f"the {len(raw)} bytes of the request are not a valid {kind.__name__}"
        ) from error


def parse_fetch(raw: bytes, max_images: int) -> pb.FetchRequest:
    """Return the message of a Fetch, after its fields are counted. Raises `InvalidRequestError`.

    A sub-message of two bytes can take a hundred bytes in memory, and a field has no fewer. Counting takes about 1 µs
    for each, and stops at the limit.
    """
    _check_bytes(pb.FetchRequest, raw, names_bytes(max_images))
    most = max_images + OTHER_FIELDS
    if len(raw) > 2 * most and len(_fields(raw, most)) > most:
        raise _too_many(max_images)
    return _parsed(pb.FetchRequest, raw)


@dataclass(frozen=True, slots=True)
class RawSubmit:
    """A message of a Submit call whose fields are counted. It is parsed once there is space for its files."""

    raw: bytes
    open: bytes | None
    """The serialised caller; None if the message has none."""
    file_bytes: int
    """Bytes of the files in it."""

    def caller(self) -> pb.Caller:
        """Return the caller. Raises `InvalidRequestError` if the message has none."""
        if self.open is None:
            raise InvalidRequestError("the first message of a Submit call must have `open`")
        return parse(pb.Caller, self.open)

    def parsed(self, *, with_files: bool = True) -> pb.SubmitRequest:
        """Return the message, with or without files. Raises `InvalidRequestError` if it is not valid."""
        raw = self.raw
        if not with_files:
            begin, kept = 0, []
            for tag, _, end in _fields(raw, len(raw)):
                if tag != _BYTES:
                    kept.append(raw[begin:end])
                begin = end
            raw = b"".join(kept)
        return _parsed(pb.SubmitRequest, raw)


def parse_submit(raw: bytes, max_images: int) -> RawSubmit:
    """Count the fields of a message of a Submit, as `parse_fetch` does, and the bytes of its files.

    Raises `InvalidRequestError` if it has more names, pieces or bytes than `max_images` images need.
    """
    caller, file_bytes, pieces, others = None, 0, 0, 0
    most_others = max_images + OTHER_FIELDS
    for tag, begin, end in _fields(raw, most_others + max_images):
        if tag == _BYTES:
            pieces += 1
            file_bytes += end - begin
            continue
        others += 1
        if tag == _OPEN:
            caller = raw[begin:end]
        elif tag == _NAMES:
            others += len(_fields(raw[begin:end], most_others))
        if max(others - most_others, pieces - max_images) > 0:
            raise _too_many(max_images)
    if file_bytes > (most := PIECE_BYTES + PIECE_FIELDS_BYTES * pieces):
        raise InvalidRequestError(
            f"a SubmitRequest has {file_bytes} bytes of files, the limit is {most}: send files one after another, in "
            "pieces of at most max_message_bytes"
        )
    if len(raw) - file_bytes > (most := names_bytes(max_images)):
        raise InvalidRequestError(
            f"SubmitRequest has {len(raw) - file_bytes} bytes besides files, the limit is {most}"
        )
    return RawSubmit(raw, caller, file_bytes)


def _check_bytes(kind: type[Message], raw: bytes, max_bytes: int) -> None:
    if len(raw) > max_bytes:
        raise InvalidRequestError(f"{kind.__name__} has {len(raw)} bytes, the limit is {max_bytes}")


def check_caller(caller: pb.Caller) -> None:
    """Raise `InvalidRequestError` if a field of the caller exceeds its limit."""
    for field, value in (("request_id", caller.request_id), ("client_id", caller.client_id)):
        if (size := len(value.encode())) > MAX_REQUEST_ID_BYTES:
            raise InvalidRequestError(f"{field} may have at most {MAX_REQUEST_ID_BYTES} bytes, got {size}")
    if not MIN_PRIORITY <= caller.priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be from {MIN_PRIORITY} to {MAX_PRIORITY}, got {caller.priority}"
        )
    if len(caller.tenant_salt) > MAX_SALT_BYTES:
        raise InvalidRequestError(
            f"tenant_salt may have at most {MAX_SALT_BYTES} bytes, got {len(caller.tenant_salt)}"
        )


def image_key(recipe: Recipe, name: pb.ImageName | pb.FetchImage, salt: bytes) -> ImageKey:
    """Return the key of the image, or pair of frames, that a message names. Raises `InvalidRequestError`."""
    if len(name.digest) != DIGEST_BYTES:
        raise InvalidRequestError(f"a digest must have {DIGEST_BYTES} bytes, got {len(name.digest)}")
    is_video = isinstance(name, pb.ImageName) and name.video
    if (is_video or name.HasField("frames")) and not recipe.video:
        raise InvalidRequestError(
            "this server takes no videos (`video_decoder` of its description is empty): submit images, or ask "
            "its operator"
        )
    if name.HasField("frames"):
        return recipe.frames_key(name.digest, _frames(name), salt)
    return recipe.key(name.digest, name.variant.min_pixels, name.variant.max_pixels, salt)


def _frames(name: pb.ImageName | pb.FetchImage) -> Frames:
    frames, grid = name.frames, name.grid
    if not name.HasField("grid") or name.variant.min_pixels or name.variant.max_pixels:
        raise InvalidRequestError("frames of a video must be named with their grid, and without a variant")
    if frames.first > frames.second or (isinstance(name, pb.ImageName) and name.video):
        raise InvalidRequestError(
            f"frames {frames.first} and {frames.second}: the first must not come after the second, and a name is "
            "either that of a video or of its frames"
        )
    bilinear = frames.bilinear_height, frames.bilinear_width
    if bilinear != (0, 0) and 0 in bilinear:
        raise InvalidRequestError("bilinear_height and bilinear_width of frames must be given together")
    size = None if bilinear == (0, 0) else bilinear
    return Frames(frames.first, frames.second, Grid(grid.t, grid.h, grid.w), size)


def geometry_message(rule: GridRule) -> pb.Geometry | None:
    """Return the message of a geometry; None for a rule that only the server can compute."""
    if not isinstance(rule, Geometry):
        return None
    return pb.Geometry(
        patch_size=rule.patch_size,
        merge_size=rule.merge_size,
        min_pixels=rule.min_pixels,
        max_pixels=rule.max_pixels,
    )


def grid_message(grid: tuple[int, int, int]) -> pb.Grid:
    t, h, w = grid
    return pb.Grid(t=t, h=h, w=w)


def claimed_grid(name: pb.ImageName) -> Grid | None:
    """Return the grid that the caller computed, None if the name has none."""
    return Grid(name.grid.t, name.grid.h, name.grid.w) if name.HasField("grid") else None


def state_message(index: int, address: bytes, known: LookupResult, tokens: int) -> pb.ImageState:
    state = pb.ImageState(index=index, address=address)
    if known.video is not None:
        video = known.video
        state.state = pb.STATE_PROBED
        state.video.CopyFrom(
            pb.VideoState(
                frames=video.frames,
                readable_frames=video.readable_frames,
                fps=video.fps,
                width=video.width,
                height=video.height,
                rotation=video.rotation,
            )
        )
    elif known.grid is None:
        state.state = pb.STATE_NEEDS_BYTES
    else:
        state.state = pb.STATE_CACHED if known.cached else pb.STATE_QUEUED
        state.grid.CopyFrom(grid_message(known.grid))
        state.tokens = tokens
    return state


def error_message(index: int, error: EncoderError) -> pb.ImageError:
    return pb.ImageError(
        index=index, code=error.status.value, message=error.message, retry_after_ms=error.retry_after_ms
    )


def failed_state(index: int, error: EncoderError) -> pb.ImageState:
    return pb.ImageState(index=index, state=pb.STATE_FAILED, error=error_message(index, error))


def submit_refusal(error: EncoderError) -> pb.SubmitResponse:
    return pb.SubmitResponse(error=error_message(0, error))


def end_with(context: Context, error: EncoderError) -> None:
    """Set the status of an error; the call ends with it when its handler returns.

    `context.abort` is not used: gRPC keeps the exception that it raises, in a reference cycle with every frame of the
    handler, so the request would stay in memory until a garbage collection. It also fails if the caller has left.
    """
    context.set_code(_CODES[error.status])
    context.set_details(error.message)
    if error.retry_after_ms:
        context.set_trailing_metadata((("retry-after-ms", str(error.retry_after_ms)),))


def _too_many(max_images: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the request has more fields than a call of {max_images} images needs: name fewer images"
    )


def _fields(raw: bytes, most: int) -> list[tuple[int, int, int]]:
    """Return the tag of each field of a message, and where its content begins and ends; stop above `most` fields.

    Raises `InvalidRequestError` for bytes that are not a message, and for groups, which the contract does not use.
    """
    fields: list[tuple[int, int, int]] = []
    at = 0
    while at < len(raw) and len(fields) <= most:
        tag, at = (raw[at], at + 1) if raw[at] < 0x80 else _varint(raw, at)
        begin = at
        match tag & 7:
            case 0:
                _, at = _varint(raw, at)
            case 1:
                at += 8
            case 2:
                is_short = at < len(raw) and raw[at] < 0x80
                size, begin = (raw[at], at + 1) if is_short else _varint(raw, at)
                at = begin + size
            case 5:
                at += 4
            case _:
                raise InvalidRequestError("the request is not a valid message")
        if at > len(raw):
            raise InvalidRequestError("the request is not a valid message: its last field is truncated")
        fields.append((tag, begin, at))
    return fields


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at == len(raw):
            break
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise InvalidRequestError("the request is not a valid message: it contains an unterminated varint")
