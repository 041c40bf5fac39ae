"""Chats about videos, end to end: prompts, positions and answers are those of `transformers` on the same file."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from encoder_contract.errors import InvalidImageError, InvalidRequestError
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import load_model
from prefill_client import EncoderClient, Trace
from prefill_reference.chat import Chat, Prefilled
from testing.clips import clip, true_frames
from testing.photos import photo
from tests.chats import chat_of
from tests.gate import Gate
from tests.operator_view import fetches_wait_for
from tests.servers import server_of

pytestmark = pytest.mark.slow

MODEL_TYPES = ["qwen3_vl", "qwen2_5_vl", "qwen3_5"]
MAX_ERROR = 5e-5  # as in `test_chat.py`
VIDEO = clip("mp4", frames=70, fps=12.5, seed=40)
PAIRS = 6  # of a clip of six seconds: two frames of each


@asynccontextmanager
async def served_chat(config: Config, folder: Path) -> AsyncIterator[Chat]:
    """A chat with its own model and server."""
    config = replace(config, model=folder)
    model = load_model(config)
    async with server_of(config, model) as server, await EncoderClient.connect(server.endpoint) as client:
        with chat_of(client, folder) as chat:
            yield chat
    model.decoder.close()


def user(text: str, *videos: bytes) -> dict[str, Any]:
    parts = [{"type": "video", "video": video} for video in videos]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class Whole:
    """A checkpoint in `transformers` with its processor, which gets all frames of a file and samples them."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self._processor = transformers.AutoProcessor.from_pretrained(folder)

    def logits(
        self, messages: list[dict[str, Any]], file: bytes, fps: float
    ) -> tuple[list[int], torch.Tensor]:
        """Return the prompt's token ids, and the logits [vocab] of its last token."""
        frames = np.stack(list(true_frames(file)))
        text = self._processor.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        made = self._processor(
            text=[text],
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            videos_kwargs={
                "video_metadata": [{"total_num_frames": len(frames), "fps": fps}],
                "do_sample_frames": True,
                "fps": 2,
            },
            return_tensors="pt",
        )
        with torch.inference_mode():
            logits = self._model(**made).logits[0, -1]
        return made["input_ids"][0].tolist(), logits


@pytest.mark.parametrize("model_type", MODEL_TYPES)
async def test_a_chat_about_a_video_ends_in_the_logits_of_transformers(
    config: Config, kept_checkpoint: Callable[..., Path], model_type: str
) -> None:
    folder = kept_checkpoint(model_type)
    async with served_chat(config, folder) as chat:
        messages = [user("What happens?", VIDEO)]
        prefilled = await chat.prefill(messages)
        ids, logits = Whole(folder).logits(messages, VIDEO, 12.5)
        assert prefilled.layout.token_ids.tolist() == ids
        error = (prefilled.logits - logits).abs().max() / logits.abs().max()
        assert float(error) < MAX_ERROR
        assert len(prefilled.images) > 4
        assert all(run.chunk.rows <= 50 for run in prefilled.runs)


@pytest.fixture
def chat(client: EncoderClient, checkpoint: Path) -> Iterator[Chat]:
    with chat_of(client, checkpoint) as chat:
        yield chat


def pairs_of(prefilled: Prefilled) -> list[tuple[int, int]]:
    return [(image.frames.first, image.frames.second) for image in prefilled.images if image.frames]


async def test_the_second_question_about_a_video_uploads_and_encodes_nothing(
    chat: Chat, server: Server, gate: Gate
) -> None:
    data, trace = clip("mp4", frames=60, fps=10.0, seed=41), Trace("first")
    with gate.closed(frames_only=True):  # no pair is encoded before it is asked for
        prefilling = asyncio.create_task(chat.prefill([user("What happens?", data)], trace=trace))
        await fetches_wait_for(server, PAIRS)
    first = await prefilling
    assert len(first.images) == PAIRS
    assert {name for run in first.runs for name in run.sources} == {"encoded"}
    second = await chat.prefill([user("Who is it?", data)])
    assert pairs_of(second) == pairs_of(first)
    assert all(answer.cached and answer.upload_s is None for answer in second.submitted.values())
    assert {name for run in second.runs for name in run.sources} == {"host"}
    lanes = {span.lane for span in trace.spans if span.lane.startswith("image")}
    assert len(lanes) == len(first.images), "a lane for each pair"


async def test_a_follow_up_prefills_only_tokens_after_the_video(chat: Chat) -> None:
    data = clip("mp4", frames=60, fps=10.0, seed=42)
    messages = [user("What happens?", data)]
    first = await chat.prefill(messages)
    _ = [token async for token in chat.decode(first, max_tokens=3)]
    third = await chat.prefill([*messages, {"role": "assistant", "content": "x"}, user("And now?")])
    assert third.prefix_tokens > third.layout.spans[-1].end
    assert not third.submitted


async def test_equal_frames_of_another_video_share_no_prefix(chat: Chat) -> None:
    first = await chat.prefill([user("What happens?", clip("mp4", frames=60, fps=10.0, seed=42))])
    _ = [token async for token in chat.decode(first, max_tokens=1)]
    second = await chat.prefill([user("What happens?", clip("mp4", frames=60, fps=10.0, seed=43))])
    assert pairs_of(second) == pairs_of(first)
    assert second.prefix_tokens == second.layout.spans[0].begin


async def test_stills_and_videos_are_laid_out_in_order(chat: Chat) -> None:
    content = [
        {"type": "image", "image": photo(300, 220, 1)},
        {"type": "video", "video": VIDEO},
        {"type": "text", "text": "and"},
        {"type": "image", "image": photo(256, 400, 2)},
        {"type": "video", "video": clip("webm", frames=30, fps=10.0, seed=44)},
    ]
    prefilled = await chat.prefill([{"role": "user", "content": content}])
    kinds = [image.frames is not None for image in prefilled.images]
    assert kinds[0] is False
    assert kinds.count(False) == 2
    assert kinds.index(False, 1) == 1 + len(kinds[1:]) - kinds[::-1].index(False) - 1


@pytest.mark.parametrize("data", [b"no video", clip("mp4")[:3000]])
async def test_a_bad_video_is_named_in_the_error(chat: Chat, data: bytes) -> None:
    with pytest.raises(InvalidImageError, match="video 1: "):
        await chat.prefill([user("What happens?", VIDEO, data)])
    assert (await chat.prefill([user("What happens?", VIDEO)])).images


async def test_a_placeholder_in_a_users_text_is_refused(chat: Chat) -> None:
    with pytest.raises(InvalidRequestError, match="placeholders for 2 videos, but the request has 1"):
        await chat.prefill([user("look: <|video_pad|>", VIDEO)])
