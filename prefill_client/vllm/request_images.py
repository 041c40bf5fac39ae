"""The images and videos of a request body: finds them in the JSON, names them, and passes facts to the connector.

In the request's `ec_transfer_params`, the middleware tells the connector who calls and which images the service has.
Any client can write there too. The connector therefore sanitises the values, and uses them only to decide how to wait.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from encoder_contract.errors import ForbiddenError, InvalidRequestError
from encoder_contract.traceparent import trace_id
from prefill_client.vllm.row_fetcher import Caller
from prefill_client.vllm.videos import OPTIONS, Sampling, UnsupportedVideoError

Item = TypeVar("Item")

_IMAGES = {"image_url", "input_image", "image_pil"}
_VIDEO = "video_url"
_FRAMES = "data:video/jpeg"  # frames in a list, which vLLM takes for a video
_EMBEDDED = {"image_embeds", "video_embeds", "audio_embeds"}


@dataclass(frozen=True, slots=True)
class Form:
    """How the requests of an API carry images: in lists of parts under these keys of each message.

    `named` has the other keys of a named part without pixels, besides its name and grid.
    """

    messages: str
    parts: tuple[str, ...]
    named: tuple[tuple[str, str], ...]


CHAT = Form("messages", ("content",), (("type", "image_embeds"),))
# vLLM checks these with OpenAI's types, which lack `image_embeds`. It recognises a part with a `uuid` by its keys.
RESPONSES = Form("input", ("content", "output"), (("type", "input_image"), ("detail", "auto")))


@dataclass(frozen=True, slots=True)
class NamedImage:
    """What vLLM is told of an image or a pair of frames: its identifier, and its grid, or the URL of its stand-in."""

    identifier: str
    grid: list[int]
    stand_in: str = ""


class RequestImages:
    """A parsed request body. Raises `InvalidRequestError` or `ForbiddenError` for images that cannot be served."""

    def __init__(self, body: Any, form: Form) -> None:
        self.body = body
        self._form = form
        parts = [part for parts in _lists(body, form) for part in parts if isinstance(part, dict)]
        for part in parts:
            if embedded := _kinds(part) & _EMBEDDED:
                raise ForbiddenError(f"{min(embedded)}: callers cannot send embeddings: send images")
        self._images = [part for part in parts if _kinds(part) & _IMAGES]
        self._videos = [part for part in parts if _VIDEO in _kinds(part)]
        if any(_kinds(part) & _IMAGES for part in self._videos):
            raise InvalidRequestError("a part is an image or a video, not both")
        if self._videos:
            self._check_videos()
        self.sampling = Sampling.read(body) if len(self) else Sampling()
        """How the frames of videos are chosen."""

    def _check_videos(self) -> None:
        if self._form is RESPONSES:
            raise UnsupportedVideoError("responses take no videos: send them to /v1/chat/completions")
        template = self.body.get("chat_template_kwargs")
        if isinstance(template, dict) and template.get("add_vision_id"):
            raise UnsupportedVideoError(
                "add_vision_id is not supported with videos: it would number their frames"
            )

    def __len__(self) -> int:
        return len(self._images) + len(self._videos)

    @property
    def goes_on_from(self) -> str:
        """The response whose conversation this request continues; empty if there is none."""
        given = self._of_response("previous_response_id")
        return given if isinstance(given, str) else ""

    @property
    def in_background(self) -> bool:
        """Whether vLLM answers at once and generates the response later."""
        return bool(self._of_response("background"))

    def stored_as(self) -> str:
        """Return the id of the response, and set one if there is none; empty if the response will not be stored."""
        if self._form is not RESPONSES or self.body.get("store") is False:
            return ""
        given = self.body.setdefault("request_id", f"resp_{uuid4().hex}")
        return given if isinstance(given, str) else ""

    @property
    def has_options(self) -> bool:
        """Whether the request says how its media are loaded or processed."""
        return any(self.body.get(option) for option in OPTIONS)

    def urls(self) -> list[str]:
        """Return the URL of each image, in the order of the request."""
        return [_url(part, "image_url") for part in self._images]

    def video_urls(self) -> list[str]:
        """Return the URL of each video, in the order of the request."""
        urls = [_url(part, _VIDEO) for part in self._videos]
        if any(url[: len(_FRAMES)].lower() == _FRAMES for url in urls):
            raise UnsupportedVideoError(
                "single frames (data:video/jpeg) are not supported: send a video file"
            )
        return urls

    def in_order(self, images: Sequence[Item], videos: Sequence[Item]) -> list[Item]:
        """Return what belongs to each image and to each video, in the order of the request."""
        of_part = {id(part): item for part, item in zip(self._images, images, strict=True)}
        of_part |= {id(part): item for part, item in zip(self._videos, videos, strict=True)}
        parts = (part for parts in _lists(self.body, self._form) for part in parts)
        return [of_part[id(part)] for part in parts if id(part) in of_part]

    def name(
        self, written: Sequence[Sequence[str | NamedImage]], parameters: tuple[str, dict[str, Any]]
    ) -> None:
        """Replace each image and each video, in the order of the request, by text and named parts.

        Named parts have no pixels, or a stand-in. `parameters` are a key and a value for the connector.
        """
        replaced, left = {id(part) for part in (*self._images, *self._videos)}, iter(written)
        for parts in _lists(self.body, self._form):
            parts[:] = [
                new
                for part in parts
                for new in (map(self._part, next(left)) if id(part) in replaced else [part])
            ]
        for option in OPTIONS:  # vLLM would hash them into the names
            self.body.pop(option, None)
        key, value = parameters
        self.body["ec_transfer_params"] = {**(self.body.get("ec_transfer_params") or {}), key: value}

    def _part(self, written: str | NamedImage) -> dict[str, Any]:
        if isinstance(written, str):
            return {"type": "text", "text": written}
        if written.stand_in:
            part = _stood_in(written.stand_in, self._form)
        else:
            part = {**dict(self._form.named), "image_embeds": {"image_grid_thw": written.grid}}
        return {**part, "uuid": written.identifier}

    def _of_response(self, key: str) -> object:
        return self.body.get(key) if self._form is RESPONSES and isinstance(self.body, dict) else None


def _stood_in(url: str, form: Form) -> dict[str, Any]:
    if form is RESPONSES:
        return {**dict(form.named), "image_url": url}
    return {"type": "image_url", "image_url": {"url": url}}


def _lists(body: Any, form: Form) -> Iterator[list[Any]]:
    messages = body.get(form.messages) if isinstance(body, dict) else None
    for message in messages if isinstance(messages, list) else ():
        for key in form.parts:
            parts = message.get(key) if isinstance(message, dict) else None
            if isinstance(parts, list):
                yield parts


def _kinds(part: dict[str, Any]) -> set[str]:
    """Return every kind that vLLM may recognise a part as: by its type, or by its keys."""
    kind = part.get("type")
    return {*part, kind} if isinstance(kind, str) else {*part}


def _url(part: dict[str, Any], key: str) -> str:
    given = part.get(key)
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise InvalidRequestError(f"a part of the message has no {key}")
    return url


PARAMETERS = "encoder_service"
"""The key of our values in `ec_transfer_params`."""
STORED = "stored"
"""Below it: the indexes of the images that were already encoded when they were submitted."""

SUBMITTED_TO = "submitted_to"
"""Below it: the server to which each image was submitted."""


def caller_of(parameters: Mapping[str, Any] | None, *, request_id: str, tenant_salt: str) -> Caller:
    """Return who calls. vLLM's `request_id` is used for a request that did not pass the middleware."""
    said = _said(parameters)
    priority = said.get("priority", 0)
    return Caller(
        request_id=str(said.get("request_id", request_id))[:128],
        priority=priority if priority in range(-8, 9) else 0,
        traceparent=trace_context(said.get("traceparent")),
        tenant_salt=tenant_salt,
    )


def trace_context(said: object) -> str:
    """Return a well-formed `traceparent`, else nothing: gRPC would fail a call with invalid metadata."""
    return said if isinstance(said, str) and trace_id(said) else ""


def stored_of(parameters: Mapping[str, Any] | None) -> set[int]:
    """Return the indexes of the images that were already encoded when the middleware submitted them."""
    stored = _said(parameters).get(STORED)
    return {index for index in stored if isinstance(index, int)} if isinstance(stored, list) else set()


def submitted_to_of(parameters: Mapping[str, Any] | None) -> list[str]:
    """Return the server to which each image was submitted. The client asks it only if it knows that server."""
    servers = _said(parameters).get(SUBMITTED_TO)
    return [str(server) for server in servers] if isinstance(servers, list) else []


def _said(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    said = (parameters or {}).get(PARAMETERS)
    return said if isinstance(said, Mapping) else {}
