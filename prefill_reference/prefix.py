"""KV caches of prompts that were answered, found again by content: a follow-up turn starts behind what it repeats."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from transformers.cache_utils import DynamicLayer

from prefill_client import Layout, Span
from prefill_client.prompt import TokenIds


@dataclass(frozen=True, eq=False)
class Prefix:
    """The KV cache of the first `tokens` tokens of a prompt."""

    cache: Any
    tokens: int


@dataclass(frozen=True, eq=False)
class _Kept:
    token_ids: TokenIds  # of every token in the cache
    spans: tuple[Span, ...]
    digests: tuple[bytes, ...]
    cache: Any


class PrefixCache:
    """Keeps the KV caches of the last prompts, at most `max_tokens` tokens of them.

    Two prompts share a prefix as far as their token ids are equal and their images have equal content digests: the
    model, and with it everything else in an image's address, is the same for all prompts of a process. A cache
    serves one request at a time: `take` removes it. To be used from one thread.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._kept: list[_Kept] = []  # oldest first; a handful, so a scan is cheaper than a tree

    @property
    def tokens(self) -> int:
        """How many tokens are kept."""
        return sum(len(kept.token_ids) for kept in self._kept)

    def put(self, layout: Layout, generated: Sequence[int], digests: Sequence[bytes], cache: Any) -> None:
        """Keep the cache of a whole prompt and the tokens generated behind it; the oldest give way."""
        token_ids = np.concatenate([layout.token_ids, np.array(generated, dtype=np.int64)])
        if len(token_ids) > self._max_tokens:
            return
        self._kept.append(_Kept(token_ids, layout.spans, tuple(digests), cache))
        while self.tokens > self._max_tokens:
            self._kept.pop(0)

    def take(self, layout: Layout, digests: Sequence[bytes]) -> Prefix | None:
        """Return the longest usable prefix of this prompt, its cache cut to it, or None.

        The last token is never covered: its logits are what prefill is for.
        """
        usable = [
            (min(_common(kept, layout, digests), layout.tokens - 1), kept) for kept in reversed(self._kept)
        ]
        usable = [
            (tokens, kept)
            for tokens, kept in usable
            if tokens > 0 and (tokens == len(kept.token_ids) or _can_be_cut(kept.cache))
        ]
        if not usable:
            return None
        tokens, kept = max(usable, key=lambda found: found[0])
        self._kept.remove(kept)
        if tokens < len(kept.token_ids):
            _cut(kept.cache, tokens)
        return Prefix(kept.cache, tokens)


def _common(kept: _Kept, layout: Layout, digests: Sequence[bytes]) -> int:
    """Return how many tokens the two have in common from the start."""
    shorter = min(len(kept.token_ids), layout.tokens)
    differing = np.flatnonzero(kept.token_ids[:shorter] != layout.token_ids[:shorter])
    common = int(differing[0]) if len(differing) else shorter
    theirs = zip(kept.spans, kept.digests, strict=True)
    ours = zip(layout.spans, digests, strict=True)
    for pair in zip_longest(theirs, ours):
        if pair[0] != pair[1]:
            common = min(common, *(span.begin for span, _ in filter(None, pair)))
            break
    return common


def _can_be_cut(cache: Any) -> bool:
    """Tell whether the cache has a history: a linear-attention layer has one state, good for all or nothing."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _cut(cache: Any, tokens: int) -> None:
    for layer in cache.layers:
        layer.keys = layer.keys[..., :tokens, :]
        layer.values = layer.values[..., :tokens, :]
