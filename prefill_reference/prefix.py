"""Prefix cache: KV caches of answered prompts, found by content, so that a follow-up turn prefills only new tokens."""

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
class _Entry:
    token_ids: TokenIds  # of every token in the cache
    spans: tuple[Span, ...]
    digests: tuple[bytes, ...]
    cache: Any


class PrefixCache:
    """Keeps the KV caches of the latest prompts, up to `max_tokens` tokens in total. Not thread-safe.

    Two prompts share a prefix as far as their token ids and the content digests of their images are equal. Comparing
    digests is enough, because all prompts of a process use one model. A cache serves one request at a time: `take`
    removes it.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._entries: list[_Entry] = []  # oldest first; so few that a scan is cheaper than a tree

    @property
    def tokens(self) -> int:
        """Number of tokens in the cache."""
        return sum(len(entry.token_ids) for entry in self._entries)

    def put(self, layout: Layout, generated: Sequence[int], digests: Sequence[bytes], cache: Any) -> None:
        """Store the KV cache of a prompt and the tokens generated after it. Evict the oldest entries to make room."""
        token_ids = np.concatenate([layout.token_ids, np.array(generated, dtype=np.int64)])
        if len(token_ids) > self._max_tokens:
            return
        self._entries.append(_Entry(token_ids, layout.spans, tuple(digests), cache))
        while self.tokens > self._max_tokens:
            self._entries.pop(0)

    def take(self, layout: Layout, digests: Sequence[bytes]) -> Prefix | None:
        """Remove the entry with the longest usable prefix of this prompt; return it, truncated to that prefix, or None.

        The prefix never covers the last token, because the caller needs that token's logits.
        """
        candidates = [
            (min(_common_tokens(entry, layout, digests), layout.tokens - 1), entry)
            for entry in reversed(self._entries)
        ]
        usable = [
            (tokens, entry)
            for tokens, entry in candidates
            if tokens > 0 and (tokens == len(entry.token_ids) or _can_be_truncated(entry.cache))
        ]
        if not usable:
            return None
        tokens, entry = max(usable, key=lambda candidate: candidate[0])
        self._entries.remove(entry)
        if tokens < len(entry.token_ids):
            _truncate(entry.cache, tokens)
        return Prefix(entry.cache, tokens)


def _common_tokens(entry: _Entry, layout: Layout, digests: Sequence[bytes]) -> int:
    """Return the length of the longest common prefix, in tokens."""
    shorter = min(len(entry.token_ids), layout.tokens)
    differing = np.flatnonzero(entry.token_ids[:shorter] != layout.token_ids[:shorter])
    common = int(differing[0]) if len(differing) else shorter
    cached_images = zip(entry.spans, entry.digests, strict=True)
    prompt_images = zip(layout.spans, digests, strict=True)
    for pair in zip_longest(cached_images, prompt_images):
        if pair[0] != pair[1]:
            common = min(common, *(span.begin for span, _ in filter(None, pair)))
            break
    return common


def _can_be_truncated(cache: Any) -> bool:
    """Return whether every layer keeps one entry per token. A linear-attention layer keeps only its last state."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _truncate(cache: Any, tokens: int) -> None:
    for layer in cache.layers:
        layer.keys = layer.keys[..., :tokens, :]
        layer.values = layer.values[..., :tokens, :]
