"""The parts of a message: what vLLM takes each for, the URL of an image or a video, and the fields of a chat template.

The rules are vLLM's own, and a test compares them with its parser. A part that vLLM takes for a text may have the keys
of an image: clients that use one class for all parts send every field, most of them null.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encoder_contract.errors import InvalidRequestError

IMAGES = frozenset(("image_url", "input_image", "image_pil"))
VIDEO = "video_url"
EMBEDDED = frozenset(("image_embeds", "video_embeds", "audio_embeds"))
# The order in which vLLM looks for a key.
_KEYS = (
    "image_url", "image_pil", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "audio_url",
    "input_audio", "video_url", "tool_reference",
)  # fmt: skip
KNOWN_FIELDS = frozenset(
    (
        "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio",
        "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
    )
)  # fmt: skip
"""The fields of a part that vLLM reads itself. It passes all others to the chat template."""


def kind_of(part: Mapping[str, Any]) -> str:
    """Return the kind that vLLM takes a part for: a type of its API; empty if it takes it for none.

    The type decides. Without one, or with a `uuid`, the first key that the part has decides, even if its value is null.
    """
    kind = part.get("type")
    if kind is None or part.get("uuid") is not None:
        return next((key for key in _KEYS if key in part), "")
    return kind if isinstance(kind, str) else ""


def reference_of(part: Mapping[str, Any]) -> tuple[str, str]:
    """Return the URL of an image or a video, and the `uuid` that its caller gave it; either may be empty.

    As in vLLM, media that a caller has sent with a `uuid` need no URL later. Raises `InvalidRequestError` for a part
    without both. The URL may be a text or an object, whatever the type.
    """
    kind, uuid = kind_of(part), part.get("uuid")
    key = "image_url" if kind == "input_image" else kind
    value = part.get(key)
    url = value.get("url") if isinstance(value, dict) else value
    if (url and not isinstance(url, str)) or (not url and not uuid):
        raise InvalidRequestError(f"a part of the message has no {key}")
    return url or "", "" if uuid is None else str(uuid)


def extra_fields(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a part that reach the chat template."""
    return {key: value for key, value in part.items() if key not in KNOWN_FIELDS}


def template_text(chat_template: str | None) -> str:
    """Return the chat template of `--chat-template`, which is the path of a file or the template itself."""
    try:
        return Path(chat_template).read_text() if chat_template else ""
    except (OSError, ValueError):  # a template is no path, and mostly too long for one
        return chat_template or ""
