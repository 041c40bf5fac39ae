"""The supported part of the OpenAI chat-completions schema. Unknown fields are refused by name; null means absent."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_MESSAGES = 1024  # a long conversation; the model bounds the prompt's tokens
MAX_PARTS = 1024
DEFAULT_ANSWER_TOKENS = 256


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: object) -> object:
        """Drop null fields, known or not: clients that use one class for all parts send every field."""
        if not isinstance(fields, Mapping):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class _Url(_Strict):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"  # accepted but ignored: the model decides the resolution


class _Image(_Strict):
    type: Literal["image_url"]
    image_url: _Url


class _Video(_Strict):
    type: Literal["video_url"]  # as in vLLM and SGLang
    video_url: _Url


class _Text(_Strict):
    type: Literal["text"]
    text: str


_Part = Annotated[_Image | _Video | _Text, Field(discriminator="type")]


class _Message(_Strict):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[_Part], Field(max_length=MAX_PARTS)]


class _StreamOptions(_Strict):
    include_usage: bool = False


class ChatRequest(_Strict):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    user: str = ""  # accepted but ignored

    @property
    def answer_tokens(self) -> int:
        """Maximum number of tokens to generate."""
        return self.max_completion_tokens or self.max_tokens or DEFAULT_ANSWER_TOKENS

    def finish_reason(self, generated: int, room: int) -> str:
        """Return why an answer ended after `generated` tokens, if the model had room for `room` after the prompt."""
        return "length" if generated == min(self.answer_tokens, room) else "stop"

    def urls(self, kind: Literal["image", "video"]) -> list[str]:
        """Return the URLs of all images or videos, in prompt order."""
        contents = [message.content for message in self.messages if not isinstance(message.content, str)]
        parts = [part for content in contents for part in content if part.type == f"{kind}_url"]
        return [getattr(part, part.type).url for part in parts]

    def prompt_messages(self, images: Sequence[bytes], videos: Sequence[bytes]) -> list[Mapping[str, Any]]:
        """Return the messages in the form that `Chat` takes, with the files in place of their URLs."""
        files = {"image": iter(images), "video": iter(videos)}

        def loaded(part: _Image | _Video | _Text) -> Mapping[str, Any]:
            kind = part.type.removesuffix("_url")
            return {"type": kind, kind: part.text if isinstance(part, _Text) else next(files[kind])}

        def content(whole: str | list[_Part]) -> Any:
            return whole if isinstance(whole, str) else [loaded(part) for part in whole]

        return [{"role": message.role, "content": content(message.content)} for message in self.messages]
