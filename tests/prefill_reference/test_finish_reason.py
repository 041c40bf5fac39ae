"""The finish reason of an answer, for the request's limit and the model's limit."""

import json
import shutil
from pathlib import Path

import pytest
import transformers

from prefill_client import EncoderClient
from prefill_reference.http_service import Limits
from prefill_reference.schema import ChatRequest
from tests.prefill_reference.test_http_service import MODEL, serving, user

QUESTION = "What is this?"
ROOM = 3


@pytest.fixture
def short(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint with a limit that leaves this much room after the question."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "short"))
    prompt = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [user(QUESTION)], add_generation_prompt=True, return_dict=True
    )
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = len(prompt["input_ids"]) + ROOM
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def test_an_answer_cut_off_by_the_models_limit_has_finish_reason_length(
    client: EncoderClient, short: Path
) -> None:
    async with serving(client, short, Limits()) as service:
        whole = await service.ask(user(QUESTION), max_tokens=ROOM + 5)
        stream = await service.ask(user(QUESTION), max_tokens=ROOM + 5, stream=True)
        ends = [piece.choices[0].finish_reason async for piece in stream if piece.choices]
    assert whole.usage.completion_tokens == ROOM
    assert whole.choices[0].finish_reason == "length"
    assert ends[-1] == "length"


@pytest.mark.parametrize(
    ("generated", "room", "said"),
    [(5, 9, "length"), (4, 9, "stop"), (3, 3, "length"), (2, 3, "stop"), (0, 0, "length")],
)
def test_finish_reason_is_stop_only_below_both_limits(generated: int, room: int, said: str) -> None:
    message = {"role": "user", "content": QUESTION}
    asked = ChatRequest.model_validate({"model": MODEL, "messages": [message], "max_tokens": 5})
    assert asked.finish_reason(generated, room) == said
