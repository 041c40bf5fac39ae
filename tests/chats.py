"""A chat of the reference service over a client."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from encoder_contract.video import VideoSettings
from prefill_client import EncoderClient
from prefill_reference.chat import Chat
from prefill_reference.engine import Engine
from prefill_reference.language_model import load_language_model
from prefill_reference.prefix import PrefixCache


@contextmanager
def chat_of(client: EncoderClient, folder: Path) -> Iterator[Chat]:
    """Chat for the length of a `with` block, with the language model of a checkpoint in float32."""
    language_model = load_language_model(folder, dtype=torch.float32)
    chat = Chat(
        client,
        Engine(language_model, row_width=client.description.width),
        transformers.AutoTokenizer.from_pretrained(folder),
        chunk_tokens=50,
        prefixes=PrefixCache(10_000),
        videos=VideoSettings.from_folder(folder),
    )
    yield chat
    chat.close()
