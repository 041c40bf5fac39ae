"""The images of a request's JSON, and what is refused in their place."""

from typing import Any

import pytest

from encoder_contract.errors import ForbiddenError
from prefill_client.vllm.request_images import CHAT, RESPONSES, Form, RequestImages


def request(form: Form, key: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {form.messages: [{"role": "user", key: list(parts)}]}


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
@pytest.mark.parametrize(("form", "key"), [(CHAT, "content"), (RESPONSES, "content"), (RESPONSES, "output")])
@pytest.mark.parametrize("by", ["type", "key", "null"])
def test_embeddings_of_every_modality_are_refused(modality: str, form: Form, key: str, by: str) -> None:
    kind = f"{modality}_embeds"
    part = {"type": {"type": kind}, "key": {kind: {}, "uuid": "x"}, "null": {"type": "text", kind: None}}[by]
    with pytest.raises(ForbiddenError, match=kind):
        RequestImages(request(form, key, {"type": "text", "text": "x"}, part), form)


def test_images_are_found_among_other_parts() -> None:
    parts = ({"type": "text", "text": "image_embeds"}, {"type": "image_url", "image_url": {"url": "data:x"}})
    assert RequestImages(request(CHAT, "content", *parts), CHAT).urls() == ["data:x"]
