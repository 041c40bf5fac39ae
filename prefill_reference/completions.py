"""The supported part of the OpenAI chat-completions schema: requests, with their bounds, and answers."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from prefill_client import Image

MAX_MESSAGES = 1024  # a long conversation; the model bounds the prompt's tokens
MAX_PARTS = 1024
DEFAULT_ANSWER_TOKENS = 256


class _Strict(BaseModel):
    """A schema that refuses unknown fields by name instead of ignoring them."""

    model_config = ConfigDict(extra="forbid")


class ImageUrl(_Strict):
    """The URL of an image. `detail` is accepted but ignored: the model decides the resolution."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(_Strict):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class VideoUrl(_Strict):
    """The URL of a video."""

    url: str


class VideoPart(_Strict):
    """A video in a message, in the format of vLLM and SGLang."""

    type: Literal["video_url"]
    video_url: VideoUrl


class TextPart(_Strict):
    """A text in a message."""

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
    user: str = ""  # accepted but ignored

    @property
    def answer_tokens(self) -> int:
        """Maximum number of tokens to generate."""
        return self.max_completion_tokens or self.max_tokens or DEFAULT_ANSWER_TOKENS

    def finish_reason(self, generated: int, room: int) -> str:
        """Return why an answer ended after `generated` tokens, if the model had room for `room` after the prompt."""
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
        """Return the messages in the form that `Chat` takes, with images and videos in place of their URLs."""
        remaining_images, remaining_videos = iter(images), iter(videos)

        def with_media(part: ImagePart | VideoPart | TextPart) -> Mapping[str, Any]:
            if isinstance(part, TextPart):
                return {"type": "text", "text": part.text}
            if isinstance(part, VideoPart):
                return {"type": "video", "video": next(remaining_videos)}
            return {"type": "image", "image": next(remaining_images)}

        return [
            {
                "role": message.role,
                "content": message.content
                if isinstance(message.content, str)
                else [with_media(part) for part in message.content],
            }
            for message in self.messages
        ]

    def _parts(self) -> list[ImagePart | VideoPart | TextPart]:
        return [
            part for message in self.messages if isinstance(message.content, list) for part in message.content
        ]


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the usage object. The KV cache covered `cached_tokens` of the prompt."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def completion(identity: str, model: str, text: str, finish: str, used: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
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
    """Return one piece of a streamed answer. Without a delta, it is the last piece, which holds only the usage."""
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
    """Return the body of an error response, or of the event that ends a streamed answer early."""
    kind = (
        "invalid_request_error" if code.startswith(("Invalid", "ImageLimit", "Forbidden")) else "server_error"
    )
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
