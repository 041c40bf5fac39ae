"""The OpenAI chat-completions schema: the part of it that is served, with its bounds, and the answers."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from prefill_client import Image

MAX_MESSAGES = 1024  # a long conversation; the prompt's tokens are bounded by the model
MAX_PARTS = 1024
DEFAULT_ANSWER_TOKENS = 256


class _Strict(BaseModel):
    """Unsupported fields are refused by name and never silently ignored."""

    model_config = ConfigDict(extra="forbid")


class ImageUrl(_Strict):
    """Where an image is. `detail` is accepted and has no effect: resolution is the model's own."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(_Strict):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class VideoUrl(_Strict):
    """Where a video is."""

    url: str


class VideoPart(_Strict):
    """A video of a message, as vLLM and SGLang take it."""

    type: Literal["video_url"]
    video_url: VideoUrl


class TextPart(_Strict):
    """A text of a message."""

    type: Literal["text"]
    text: str


Part = Annotated[ImagePart | VideoPart | TextPart, Field(discriminator="type")]


class ChatMessage(_Strict):
    """One message of the conversation."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS)]


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool = False


class ChatRequest(_Strict):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""  # accepted, unused

    @property
    def answer_tokens(self) -> int:
        """At most this many tokens are generated."""
        return self.max_completion_tokens or self.max_tokens or DEFAULT_ANSWER_TOKENS

    def finish_reason(self, generated: int, room: int) -> str:
        """Say why an answer of `generated` tokens ended, behind whose prompt the model has room for `room`."""
        return "length" if generated == min(self.answer_tokens, room) else "stop"

    @property
    def image_urls(self) -> list[str]:
        """The URLs of all images, in prompt order."""
        return [part.image_url.url for part in self._parts() if isinstance(part, ImagePart)]

    @property
    def video_urls(self) -> list[str]:
        """The URLs of all videos, in prompt order."""
        return [part.video_url.url for part in self._parts() if isinstance(part, VideoPart)]

    def prompt_messages(
        self, images: Sequence[bytes | Image], videos: Sequence[bytes] = ()
    ) -> list[Mapping[str, Any]]:
        """Return the messages as the chat takes them, with images and videos in place of their URLs."""
        left_images, left_videos = iter(images), iter(videos)

        def filled(part: ImagePart | VideoPart | TextPart) -> Mapping[str, Any]:
            if isinstance(part, TextPart):
                return {"type": "text", "text": part.text}
            if isinstance(part, VideoPart):
                return {"type": "video", "video": next(left_videos)}
            return {"type": "image", "image": next(left_images)}

        return [
            {
                "role": message.role,
                "content": message.content
                if isinstance(message.content, str)
                else [filled(part) for part in message.content],
            }
            for message in self.messages
        ]

    def _parts(self) -> list[ImagePart | VideoPart | TextPart]:
        return [
            part for message in self.messages if isinstance(message.content, list) for part in message.content
        ]


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the usage object; `cached_tokens` of the prompt were in the KV cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def completion(identity: str, model: str, text: str, finish: str, used: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole answer."""
    message = {"role": "assistant", "content": text}
    return {
        "id": identity,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": used,
    }


def piece(
    identity: str, model: str, delta: Mapping[str, str] | None, finish: str | None = None
) -> dict[str, Any]:
    """Return one piece of a streamed answer; without a delta it is the last one, which holds the usage only."""
    choices = (
        [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]
    )
    return {
        "id": identity,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
    }


def error_body(message: str, code: str) -> dict[str, Any]:
    """Return the body of an error, or of the event that ends a streamed answer early."""
    kind = (
        "invalid_request_error" if code.startswith(("Invalid", "ImageLimit", "Forbidden")) else "server_error"
    )
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
