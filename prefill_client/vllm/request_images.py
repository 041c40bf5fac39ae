"""The images and videos of a request body: finds them in the JSON, and replaces them by names, stand-ins or text.

A stand-in is a blank image of the same size. vLLM accepts an image without pixels only for models whose grid is known
to callers. For all others, vLLM's own processor has to write the tokens around and between the rows, so it gets a blank
image whose `uuid` is the name of the real one. The connector fetches the rows of that name, and `connector.py` makes
sure that no tower encodes the blank.
"""

import base64
import struct
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar
from uuid import uuid4

from encoder_contract.errors import ForbiddenError, InvalidImageError, InvalidRequestError
from encoder_contract.header import FORMATS, format_of, read_header
from prefill_client.vllm.image_name import NameSigner, RequestInfo
from prefill_client.vllm.parts import EMBEDDED, IMAGES, VIDEO, extra_fields, kind_of, reference_of
from prefill_client.vllm.videos import (
    IMAGE_PLACEHOLDER,
    OPTIONS,
    VIDEO_BEGIN,
    VIDEO_END,
    VIDEO_PLACEHOLDER,
    Sampling,
    UnsupportedVideoError,
)

Item = TypeVar("Item")

_FRAMES = "data:video/jpeg"  # a list of frames, which vLLM accepts as a video
_OTHER_MEDIA = {*IMAGES, VIDEO, "image"}  # Anthropic's type is `image`
_URLS = ("images", "videos")  # of vLLM's structured decisions
_NESTED = frozenset((dict, list, str))  # the types of JSON that can be a name or contain one


@dataclass(frozen=True, slots=True)
class ApiShape:
    """How the requests of an API carry images: in lists of parts under these keys of each message.

    `named` has the other keys of a named part without pixels, besides its name and grid. A `batched` request has a list
    of conversations instead of messages.
    """

    messages: str
    parts: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    batched: bool = False


CHAT = ApiShape("messages", ("content",), (("type", "image_embeds"),))
BATCH = replace(CHAT, batched=True)
# vLLM checks these with OpenAI's types, which lack `image_embeds`. It recognises a part with a `uuid` by its keys.
RESPONSES = ApiShape("input", ("content", "output"), (("type", "input_image"), ("detail", "auto")))


@dataclass(frozen=True, slots=True)
class NamedImage:
    """What vLLM gets for an image or a pair of frames: its identifier, and its grid or the URL of its stand-in."""

    identifier: str
    grid: list[int]
    stand_in: str = ""


class RequestImages:
    """A parsed request body. Raises `InvalidRequestError` or `ForbiddenError` for images that cannot be served."""

    def __init__(self, body: Any, form: ApiShape) -> None:
        self.body = body
        self._form = form
        self._images: list[dict[str, Any]] = []
        self._videos: list[dict[str, Any]] = []
        check_parameters(body)
        for part in _parts(body, form):
            kind = _allowed_kind(part)
            if kind in IMAGES:
                self._images.append(part)
            elif kind == VIDEO:
                self._videos.append(part)
        if self._videos:
            self._check_videos()
            self._place_videos()
        self.sampling = Sampling.read(body) if len(self) else Sampling()
        """Which frames of videos the model is shown."""

    def _check_videos(self) -> None:
        if self._form is RESPONSES or self._form.batched:
            raise UnsupportedVideoError("send videos to /v1/chat/completions: this route takes images alone")
        template = self.body.get("chat_template_kwargs")
        if isinstance(template, dict) and template.get("add_vision_id"):
            raise UnsupportedVideoError(
                "add_vision_id is not supported with videos: it would number their frames"
            )

    def _place_videos(self) -> None:
        """Move each video to the placeholder that vLLM would fill with it.

        vLLM fills the first placeholders of the prompt, in order: those that the caller's text contains, and those that
        the template writes for videos. A placeholder that is left over stays in the prompt as a token.
        """
        waiting, own = deque(self._videos), {id(video) for video in self._videos}
        written = _users_texts(self.body)
        self._check_placeholders(written)

        def placed(part: Any) -> Iterator[Any]:
            if id(part) in own:
                pieces, text = [VIDEO_BEGIN, VIDEO_END], _text("")
            elif id(part) in written and VIDEO_PLACEHOLDER in part["text"]:
                pieces, text = part["text"].split(VIDEO_PLACEHOLDER), part
            else:
                yield part
                return
            yield {**text, "text": pieces[0]}
            for piece in pieces[1:]:
                yield waiting.popleft() if waiting else {**text, "text": VIDEO_PLACEHOLDER}
                yield {**text, "text": piece}

        for parts in _part_lists(self.body, self._form):
            parts[:] = [new for part in parts for new in placed(part)]

    def _check_placeholders(self, written: set[int]) -> None:
        """Raise `UnsupportedVideoError` for placeholders where no video can be put, or which would take a frame."""
        media = {id(part) for part in (*self._images, *self._videos)}
        remaining = [(self.body, value) for key, value in self.body.items() if key != "chat_template"]
        while remaining:
            owner, value = remaining.pop()
            if isinstance(value, str):
                if IMAGE_PLACEHOLDER in value:
                    raise UnsupportedVideoError(f"a text beside a video contains {IMAGE_PLACEHOLDER}")
                if VIDEO_PLACEHOLDER in value and id(owner) not in written:
                    raise UnsupportedVideoError(
                        f"beside a video, only the text of users may contain {VIDEO_PLACEHOLDER}"
                    )
            elif isinstance(value, dict):
                fields = extra_fields(value) if id(value) in media else value
                remaining += [(value, each) for each in fields.values()]
            elif isinstance(value, list):
                remaining += [(value, each) for each in value]

    def __len__(self) -> int:
        return len(self._images) + len(self._videos)

    @property
    def previous_response(self) -> str:
        """The id of the response whose conversation this request continues; empty if there is none."""
        response_id = self._response_field("previous_response_id")
        return response_id if isinstance(response_id, str) else ""

    @property
    def in_background(self) -> bool:
        """Whether vLLM answers at once and generates the response later."""
        return bool(self._response_field("background"))

    @property
    def loses_parameters(self) -> bool:
        """Whether vLLM makes requests of its own for this one, without `ec_transfer_params`."""
        return self._form.batched or (isinstance(self.body, dict) and bool(self.body.get("use_beam_search")))

    def stored_as(self) -> str:
        """Return the id of the response, and set one if there is none; empty if the response will not be stored."""
        if self._form is not RESPONSES or self.body.get("store") is False:
            return ""
        response_id = self.body.setdefault("request_id", f"resp_{uuid4().hex}")
        return response_id if isinstance(response_id, str) else ""

    @property
    def has_options(self) -> bool:
        """Whether the request sets how its media are loaded or processed."""
        return any(self.body.get(option) for option in OPTIONS)

    def references(self) -> list[tuple[str, str]]:
        """Return the URL of each image and its `uuid`, in the order of the request; either may be empty."""
        return [*map(reference_of, self._images)]

    def video_urls(self) -> list[str]:
        """Return the URL of each video, in the order of the request."""
        urls = [url for url, _ in map(reference_of, self._videos)]
        if not all(urls):
            raise UnsupportedVideoError("a video needs its video_url, also with a uuid")
        if any(url[: len(_FRAMES)].lower() == _FRAMES for url in urls):
            raise UnsupportedVideoError(
                "single frames (data:video/jpeg) are not supported: send a video file"
            )
        return urls

    def video_fields(self) -> set[str]:
        """Return the fields of videos that reach the chat template in vLLM."""
        return {field for video in self._videos for field in extra_fields(video)}

    def in_order(self, images: Sequence[Item], videos: Sequence[Item]) -> list[Item]:
        """Merge one item for each image and one for each video into the order of the request."""
        by_part = {id(part): item for part, item in zip(self._images, images, strict=True)}
        by_part |= {id(part): item for part, item in zip(self._videos, videos, strict=True)}
        parts = (part for parts in _part_lists(self.body, self._form) for part in parts)
        return [by_part[id(part)] for part in parts if id(part) in by_part]

    def replace(self, replacements: Sequence[Sequence[str | NamedImage]], info: RequestInfo) -> None:
        """Replace each image and each video, in the order of the request, by text and named parts.

        Named parts have no pixels, or a stand-in. The body also gets `info` for the connector.
        """
        # The fields of an image stay with it. A picture of a video gets none.
        fields = {id(part): extra_fields(part) for part in self._images}
        fields |= {id(part): {} for part in self._videos}
        remaining = iter(replacements)

        def replaced(part: Any) -> Iterator[Any]:
            if id(part) in fields:
                yield from (self._part(new, fields[id(part)]) for new in next(remaining))
            else:
                yield part

        for parts in _part_lists(self.body, self._form):
            parts[:] = [new for part in parts for new in replaced(part)]
        for option in OPTIONS:  # vLLM would hash them into the names
            self.body.pop(option, None)
        info.write(self.body)

    def _part(self, replacement: str | NamedImage, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a part for vLLM, with the `fields` of the image that it replaces."""
        if isinstance(replacement, str):
            return _text(replacement)
        named = {key: fields.get(key) or value for key, value in self._form.named}
        if not replacement.stand_in:
            part = {**named, "image_embeds": {"image_grid_thw": replacement.grid}}
        elif self._form is RESPONSES:
            part = {**named, "image_url": replacement.stand_in}
        else:
            part = {"type": "image_url", "image_url": {"url": replacement.stand_in}}
        return {**fields, **part, "uuid": replacement.identifier}

    def _response_field(self, key: str) -> object:
        return self.body.get(key) if self._form is RESPONSES and isinstance(self.body, dict) else None


def _part_lists(body: Any, form: ApiShape) -> Iterator[list[Any]]:
    messages = body.get(form.messages) if isinstance(body, dict) else None
    messages = messages if isinstance(messages, list) else []
    if form.batched:
        messages = [message for each in messages if isinstance(each, list) for message in each]
    for message in messages:
        for key in form.parts:
            parts = message.get(key) if isinstance(message, dict) else None
            if isinstance(parts, list):
                yield parts


def _parts(body: Any, form: ApiShape) -> Iterator[dict[str, Any]]:
    return (part for parts in _part_lists(body, form) for part in parts if isinstance(part, dict))


def check_parameters(body: Any) -> None:
    """Raise `InvalidRequestError` for parameters to which those of the middleware cannot be added."""
    parameters = body.get("ec_transfer_params") if isinstance(body, dict) else None
    if parameters and not isinstance(parameters, dict):
        raise InvalidRequestError("ec_transfer_params must be an object")


def _users_texts(body: dict[str, Any]) -> set[int]:
    """Return the identities of the text parts of a chat's users; a text that is no part becomes one."""
    texts = set()
    users = (each for each in body["messages"] if isinstance(each, dict) and each.get("role") == "user")
    for message in users:
        content = message.get("content")
        parts = [content] if isinstance(content, str) else content
        if isinstance(parts, list):
            message["content"] = parts = [_text(part) if isinstance(part, str) else part for part in parts]
            texts |= {id(part) for part in parts if _is_text(part)}
    return texts


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and kind_of(part) == "text" and isinstance(part.get("text"), str)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _allowed_kind(part: dict[str, Any]) -> str:
    """Return the kind of a part. Raises `ForbiddenError` for embeddings."""
    kind = kind_of(part)
    if kind in EMBEDDED:
        raise ForbiddenError(f"{kind}: callers cannot send embeddings: send images")
    return kind


def check_other_route(body: Any, route: str, signer: NameSigner, *, has_tower: bool) -> None:
    """Check a request of a route whose images the engine's own tower encodes.

    Raises `ForbiddenError` for embeddings and for names of ours, which callers could give another image, and
    `InvalidRequestError` for an image that no tower can encode.
    """
    has_urls = isinstance(body, dict) and any(isinstance(body.get(key), list) and body[key] for key in _URLS)
    if has_urls and not has_tower:
        raise no_tower(route)
    remaining = [body]
    while remaining:
        value = remaining.pop()
        if isinstance(value, str) and signer.is_identifier(value):
            raise ForbiddenError("callers cannot use names of the encoder service: send images")
        if isinstance(value, dict) and _is_medium(value, _allowed_kind(value)) and not has_tower:
            raise no_tower(route)
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not _NESTED.isdisjoint(map(type, inner)):  # a prompt of tokens has a million numbers
            remaining += inner


def no_tower(route: str) -> InvalidRequestError:
    """Return the error of an image on a route whose images the engine's own tower encodes, if it has none."""
    return InvalidRequestError(
        f"images of {route} are not encoded by the encoder service, and this engine has no vision tower: "
        "send them to /v1/chat/completions"
    )


def _is_medium(value: dict[str, Any], kind: str) -> bool:
    """Whether an object is an image or a video of any API; a schema may have a property with such a name."""
    url = value.get(kind)
    has_url = isinstance(url, str) or (isinstance(url, dict) and "url" in url)
    return kind in _OTHER_MEDIA and (kind == value.get("type") or has_url)


def size_of(image: bytes) -> tuple[int, int]:
    """Return (width, height) of an image file, upright.

    Raises `InvalidImageError` for a format that only the service reads.
    """
    if format_of(image) is None:
        raise InvalidImageError(
            f"vLLM cannot lay out an image of this format for this model: send one of {', '.join(FORMATS)}"
        )
    return read_header(image).upright


@lru_cache(4096)
def blank_url(width: int, height: int) -> str:
    """Return the data URL of a black PNG of this size: one bit a pixel, 200 bytes for 1280x720."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + -(-width // 8)) * height), 9)
    chunks = [(b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()
