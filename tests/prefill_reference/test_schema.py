"""Which requests the reference service accepts, and why an answer ends."""

import pytest
from pydantic import ValidationError

from prefill_reference.schema import ChatRequest

NULLS = dict.fromkeys(("text", "image_url", "video_url", "input_audio", "uuid", "detail"))


def test_null_fields_are_absent() -> None:
    """As clients write them that have one class for all parts."""
    image = {**NULLS, "type": "image_url", "image_url": {"url": "data:x", "detail": None}}
    message = {"role": "user", "content": [{**NULLS, "type": "text", "text": "hi"}, image], "name": None}
    request = ChatRequest.model_validate({"model": "m", "messages": [message], "n": None, "tools": None})
    assert request.urls("image") == ["data:x"]
    assert request.n == 1


def test_unknown_fields_are_refused_by_name() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hi", "image_url": {"url": "data:x"}}]}
    with pytest.raises(ValidationError, match="image_url"):
        ChatRequest.model_validate({"model": "m", "messages": [message]})


@pytest.mark.parametrize(
    ("generated", "room", "said"),
    [(5, 9, "length"), (4, 9, "stop"), (3, 3, "length"), (2, 3, "stop"), (0, 0, "length")],
)
def test_finish_reason_is_stop_only_below_both_limits(generated: int, room: int, said: str) -> None:
    message = {"role": "user", "content": "What is this?"}
    asked = ChatRequest.model_validate({"model": "m", "messages": [message], "max_tokens": 5})
    assert asked.finish_reason(generated, room) == said
