"""The KV cache reaches the model under the name of each release of `transformers`; an ignored cache is an error."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prefill_client import expand_prompt, plan
from prefill_reference.engine import Engine
from prefill_reference.language_model import LanguageModel, load_language_model
from tests.processes import run

pytestmark = pytest.mark.slow

TOKENS = range(10, 60)
# Releases from 5.40 on take the cache under its new name only, and ignore the old one. This removes the old name.
LATER_RELEASE = """
import sys, torch
import transformers.utils.deprecation as deprecation
deprecation.deprecate_kwarg = lambda *names, **options: lambda forward: forward
from tests.prefill_reference.test_cache_argument import largest_difference
print(largest_difference(sys.argv[1]))
"""


def last_logits(language_model: LanguageModel, chunk_tokens: int) -> torch.Tensor:
    engine = Engine(language_model, row_width=language_model.width)
    layout = expand_prompt([*TOKENS], language_model.image_token, [])
    prompt, logits = engine.start(layout, []), torch.empty(0)
    for chunk in plan(layout, chunk_tokens):
        logits = engine.run(prompt, chunk, engine.embed(prompt, chunk, []))
    return logits


def largest_difference(folder: str) -> float:
    """Return the largest relative difference between the logits of a prompt in one chunk and in five."""
    language_model = load_language_model(folder, dtype=torch.float32)
    whole, in_chunks = (last_logits(language_model, chunk_tokens) for chunk_tokens in (50, 10))
    return float((in_chunks - whole).abs().max() / whole.abs().max())


def test_chunks_see_those_before_them_in_a_release_without_the_old_name(
    kept_checkpoint: Callable[..., Path],
) -> None:
    ran = run("python", "-c", LATER_RELEASE, kept_checkpoint("qwen3_vl"))
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 5e-6


def test_a_model_that_ignores_the_cache_is_an_error(kept_checkpoint: Callable[..., Path]) -> None:
    language_model = load_language_model(kept_checkpoint("qwen3_vl"), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="added 0 of 10 tokens to the KV cache"):
        last_logits(replace(language_model, cache_argument="a_name_of_no_release"), 10)
