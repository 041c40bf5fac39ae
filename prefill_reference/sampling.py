"""How the next token is chosen from logits: greedily, or sampled as `transformers` samples."""

import torch
import transformers
from torch import Tensor

from prefill_reference.engine import Choose, greedy


def sampler(temperature: float, top_p: float, seed: int | None) -> Choose:
    """Return how to choose tokens; temperature 0 is greedy, a seed makes the same choices again."""
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
