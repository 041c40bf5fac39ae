"""Chunked prefill: one forward pass per chunk, with the chunk's image rows; the KV cache carries over."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from encoder_contract.errors import InvalidRequestError
from encoder_contract.geometry import Grid
from prefill_client import Chunk, Layout
from prefill_reference.language_model import LanguageModel, Levels
from prefill_reference.positions import mrope_positions
from prefill_reference.prefix import Prefix

# choose(logits [vocab]) -> the next token.
Choose = Callable[[Tensor], int]


def greedy(logits: Tensor) -> int:
    """Return the most likely token."""
    return int(logits.argmax())


def sampler(temperature: float, top_p: float, seed: int | None) -> Choose:
    """Return a function that samples tokens as `transformers` does; temperature 0 is greedy, a seed is repeatable."""
    if temperature == 0:
        return greedy
    warp = transformers.LogitsProcessorList(
        [transformers.TemperatureLogitsWarper(temperature), transformers.TopPLogitsWarper(top_p)]
    )
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)

    def choose(logits: Tensor) -> int:
        scores = warp(None, logits[None].float().cpu())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))

    return choose


@dataclass(eq=False)
class Prompt:
    """A prompt in progress: its tokens, their positions, and the KV cache of the first `done` tokens.

    `generated` lists the generated tokens that the cache holds as well.
    """

    token_ids: Tensor  # int64 [1, tokens]
    positions: Tensor  # int64 [3, 1, tokens]
    cache: Any
    done: int
    generated: list[int] = field(default_factory=list)

    @property
    def next_position(self) -> int:
        """Position of the next generated token, on all three axes: one past the largest position so far."""
        return int(self.positions.max()) + 1 if self.positions.numel() else 0


@dataclass(frozen=True, eq=False)
class Embedded:
    """The model's input for one chunk: embeddings [1, tokens, hidden] and DeepStack levels. A copy of the rows."""

    embeddings: Tensor
    levels: Levels | None


class Engine:
    """Runs prompts through a language model chunk by chunk. The methods block: do not call them on an event loop."""

    def __init__(self, language_model: LanguageModel, *, row_width: int) -> None:
        """Raises `ModelMismatchError` if the model cannot take rows of `row_width` elements."""
        language_model.require_width(row_width)
        self.language_model = language_model

    def start(
        self,
        layout: Layout,
        grids: Sequence[Grid],
        prefix: Prefix | None = None,
        time_offsets: Sequence[int | None] = (),
    ) -> Prompt:
        """Return a new prompt, of which the tokens of `prefix` are done. See `mrope_positions` for `time_offsets`.

        Raises `InvalidRequestError` if the prompt is longer than the model allows.
        """
        model = self.language_model
        if layout.tokens > model.max_tokens:
            raise InvalidRequestError(f"{layout.tokens} tokens exceed the model's {model.max_tokens}")
        positions = torch.from_numpy(mrope_positions(layout, grids, model.merge_size, time_offsets))
        token_ids = torch.from_numpy(layout.token_ids.copy())
        return Prompt(
            token_ids=token_ids[None].to(model.device),
            positions=positions[:, None].to(model.device),
            cache=prefix.cache if prefix else model.new_cache(),
            done=prefix.tokens if prefix else 0,
        )

    @torch.inference_mode()
    def embed(self, prompt: Prompt, chunk: Chunk, rows: Sequence[Tensor]) -> Embedded:
        """Return the model's input for a chunk, with a copy of its rows. Does not change the prompt.

        `rows` holds [window.rows, width] for each window of the chunk, in order. Borrowed rows may change at any time:
        the caller checks them after this copy and before `run`.
        """
        embeddings = self.language_model.embed(prompt.token_ids[:, chunk.begin : chunk.end])
        return Embedded(embeddings, self._put_in(embeddings, chunk, rows) if chunk.windows else None)

    @torch.inference_mode()
    def run(self, prompt: Prompt, chunk: Chunk, embedded: Embedded) -> Tensor:
        """Run the chunk that follows the last one; return the logits [vocab] of its last token."""
        assert chunk.begin == prompt.done, "chunks are run in order"
        positions = prompt.positions[:, :, chunk.begin : chunk.end]
        logits = self.language_model.forward(embedded.embeddings, positions, prompt.cache, embedded.levels)
        prompt.done = chunk.end
        return logits

    def room(self, prompt: Prompt) -> int:
        """Return how many tokens the model can generate after a prompt before it reaches its limit."""
        return self.language_model.max_tokens - prompt.token_ids.shape[1]

    @torch.inference_mode()
    def decode(self, prompt: Prompt, logits: Tensor, choose: Choose = greedy) -> Iterator[int]:
        """Yield the tokens that `choose` picks after a prefilled prompt, up to an end token or the model's limit."""
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
        """Write the rows' first `hidden` elements into the embeddings [1, n, hidden]; return their DeepStack levels."""
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
