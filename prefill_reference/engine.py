"""Chunked prefill: one forward per chunk with the image rows that lie in it, the KV cache carried over."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from encoder_contract.errors import InvalidRequestError
from encoder_contract.geometry import Grid
from prefill_client import Chunk, Layout, plan
from prefill_reference.language_model import LanguageModel, Levels
from prefill_reference.positions import mrope_positions
from prefill_reference.prefix import Prefix

# rows(image, row_begin, row_end) -> [row_end - row_begin, width]: where the engine gets an image's rows from.
RowSource = Callable[[int, int, int], Awaitable[Tensor]]

# choose(logits [vocab]) -> the next token.
Choose = Callable[[Tensor], int]


def greedy(logits: Tensor) -> int:
    """Return the likeliest token."""
    return int(logits.argmax())


@dataclass(eq=False)
class Prompt:
    """A prompt under way: its tokens and positions, and the KV cache of the `done` tokens already run.

    `generated` are the tokens behind the prompt that the cache holds too.
    """

    token_ids: Tensor  # int64 [1, tokens]
    positions: Tensor  # int64 [3, 1, tokens]
    cache: Any
    done: int
    generated: list[int] = field(default_factory=list)

    @property
    def next_position(self) -> int:
        """Where the next generated token lies: all three axes go on behind the furthest token."""
        return int(self.positions.max()) + 1 if self.positions.numel() else 0


@dataclass(frozen=True, eq=False)
class Embedded:
    """A chunk as the model takes it, in memory of its own: its embeddings [1, tokens, hidden], and DeepStack levels."""

    embeddings: Tensor
    levels: Levels | None


class Engine:
    """Runs prompts through a language model chunk by chunk. Its methods block: not for the event loop."""

    def __init__(self, language_model: LanguageModel, *, row_width: int) -> None:
        """Raises `ModelMismatchError` if the model cannot take rows of `row_width` elements."""
        language_model.require_width(row_width)
        self.language_model = language_model

    def start(
        self,
        layout: Layout,
        grids: Sequence[Grid],
        prefix: Prefix | None = None,
        later: Sequence[int | None] = (),
    ) -> Prompt:
        """Return a prompt of which nothing, or the given prefix, is done; for `later` see `mrope_positions`.

        Raises `InvalidRequestError` when it is longer than the model's limit.
        """
        model = self.language_model
        if layout.tokens > model.max_tokens:
            raise InvalidRequestError(f"{layout.tokens} tokens exceed the model's {model.max_tokens}")
        positions = torch.from_numpy(mrope_positions(layout, grids, model.merge_size, later))
        token_ids = torch.from_numpy(layout.token_ids.copy())
        return Prompt(
            token_ids=token_ids[None].to(model.device),
            positions=positions[:, None].to(model.device),
            cache=prefix.cache if prefix else model.new_cache(),
            done=prefix.tokens if prefix else 0,
        )

    def prefill(self, prompt: Prompt, chunk: Chunk, rows: Sequence[Tensor]) -> Tensor:
        """Run one chunk, which begins where the last one ended; return its last token's logits [vocab].

        `rows` holds [window.rows, width] for each window of the chunk, in order. Those that lie in memory of others may
        change while the chunk runs: `embed` copies them, so that they can be checked before `run`.
        """
        return self.run(prompt, chunk, self.embed(prompt, chunk, rows))

    @torch.inference_mode()
    def embed(self, prompt: Prompt, chunk: Chunk, rows: Sequence[Tensor]) -> Embedded:
        """Return what goes into the model for a chunk: its text and, copied, its rows. The prompt stays as it is."""
        embeddings = self.language_model.embed(prompt.token_ids[:, chunk.begin : chunk.end])
        return Embedded(embeddings, self._put_in(embeddings, chunk, rows) if chunk.windows else None)

    @torch.inference_mode()
    def run(self, prompt: Prompt, chunk: Chunk, embedded: Embedded) -> Tensor:
        """Run an embedded chunk, which begins where the last one ended; return its last token's logits [vocab]."""
        assert chunk.begin == prompt.done, "chunks are run in order"
        positions = prompt.positions[:, :, chunk.begin : chunk.end]
        logits = self.language_model.forward(embedded.embeddings, positions, prompt.cache, embedded.levels)
        prompt.done = chunk.end
        return logits

    def room(self, prompt: Prompt) -> int:
        """Return how many tokens fit behind a prompt, to the model's limit."""
        return self.language_model.max_tokens - prompt.token_ids.shape[1]

    @torch.inference_mode()
    def decode(self, prompt: Prompt, logits: Tensor, choose: Choose = greedy) -> Iterator[int]:
        """Yield the tokens that `choose` takes behind a prefilled prompt, to the end token or the model's limit."""
        assert prompt.done == prompt.token_ids.shape[1], "the whole prompt is prefilled"
        model, position = self.language_model, prompt.next_position
        for _ in range(self.room(prompt)):
            token = choose(logits)
            if token in model.end_tokens:
                return
            yield token
            embedding = model.embed(torch.tensor([[token]], device=model.device))
            at = torch.full((3, 1, 1), position, device=model.device)
            logits = model.forward(embedding, at, prompt.cache, None)
            prompt.generated.append(token)
            position += 1

    def _put_in(self, embeddings: Tensor, chunk: Chunk, rows: Sequence[Tensor]) -> Levels | None:
        """Write the rows' main part into the embeddings [1, n, hidden]; return their DeepStack levels."""
        model = self.language_model
        for window, image_rows in zip(chunk.windows, rows, strict=True):
            if image_rows.shape[0] != window.rows:
                raise InvalidRequestError(
                    f"image {window.image}: {image_rows.shape[0]} rows, not {window.rows}"
                )
            model.require_width(image_rows.shape[1])
        together = torch.cat([image_rows.to(model.device, model.dtype) for image_rows in rows])
        mask = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=model.device)
        for window in chunk.windows:
            mask[0, window.offset : window.offset + window.rows] = True
        main, *levels = torch.split(together, model.hidden, dim=1)
        embeddings[mask] = main
        return Levels(mask, levels) if levels else None


async def prefill(
    engine: Engine, layout: Layout, grids: Sequence[Grid], chunk_tokens: int, rows: RowSource
) -> Tensor:
    """Prefill a prompt, fetching each chunk's rows just before it; return the last token's logits [vocab]."""
    prompt = engine.start(layout, grids)
    logits = torch.empty(0)
    for chunk in plan(layout, chunk_tokens):
        fetched = [await rows(window.image, window.row_begin, window.row_end) for window in chunk.windows]
        logits = await asyncio.to_thread(engine.prefill, prompt, chunk, fetched)
    return logits
