"""What differs on a render server (`vllm launch render`), which lays out requests for engines and has no engine itself.

It takes the two options of an engine, `--middleware` and `--ec-transfer-config`. vLLM makes no connector of the second,
and does not tell its renderer of it: `take_names` does.
"""

import copy
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

from prefill_client.vllm.service_check import check_configuration

CHAT_RENDER = "/v1/chat/completions/render"
MESSAGES_RENDER = "/v1/messages/render"


def take_names(state: Any) -> None:
    """Let the renderer of a render server lay out images without pixels, as that of an engine with our connector does.

    `state` is that of the server's application. Raises `RuntimeError` if this release of vLLM cannot, and `ValueError`
    for a configuration with which names would differ from those of an engine.
    """
    check_configuration(state.vllm_config)
    try:
        renderer = state.online_renderer.renderer
        multimodal = renderer.model_config.multimodal_config
        if renderer.mm_processor is None:
            raise ValueError(
                "--limit-mm-per-prompt takes no image: a render server lays out none then, so raise the limit"
            )
        # vLLM derives both from the connector's configuration.
        multimodal.enable_mm_embeds = multimodal.allow_missing_mm_embeddings = True
        info = renderer.mm_processor.info
        vars(info).pop("data_parser", None)  # made before this, and cached
        takes_names = info.data_parser.allow_missing_mm_embeddings
    except AttributeError as error:
        raise RuntimeError(f"this release of vLLM cannot render without pixels: {error}") from error
    if not takes_names:
        raise RuntimeError("this release of vLLM cannot render without pixels: its parser demands embeddings")


async def chat_of(state: Any, body: Any) -> bytes | None:
    """Return the chat that vLLM renders for a request of Anthropic's API; None for a request that it refuses.

    The API's images have no place for a name, those of a chat do. An engine without `--enable-scale-out` renders none.
    """
    if (converts := getattr(state, "serving_render", None)) is None:
        return None
    chats: list[Any] = []

    async def noted(chat: Any, *_: object, **__: object) -> None:
        chats.append(chat)

    converter = copy.copy(converts)
    converter.render_chat_request = noted
    try:
        await converter.render_messages_request(AnthropicMessagesRequest.model_validate(body))
    except Exception:  # noqa: BLE001 - vLLM converts it again, and answers
        return None
    return chats[0].model_dump_json(exclude_unset=True).encode() if chats else None
