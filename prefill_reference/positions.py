"""M-RoPE positions: where each token of a prompt lies in time, height and width for the rotary embedding."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from encoder_contract.geometry import Grid
from prefill_client import Layout


def mrope_positions(
    layout: Layout, grids: Sequence[Grid], merge_size: int, later: Sequence[int | None] = ()
) -> NDArray[np.int64]:
    """Return int64 [3, tokens]: time, height, width of every token of the prompt.

    Text advances all three by one. An image's tokens share the time at which it begins and spread over its
    merged grid; the text behind it goes on after the longer side. This is `get_rope_index` of `transformers`'
    Qwen2.5-VL, Qwen3-VL and Qwen3.5; the first generated token's position is the maximum plus one.

    `later` says of an image that it is a pair of frames of the video that the image before it belongs to, shown so much
    later than the first of them, in positions: it lies where that does, but in time. None, or nothing: it is not.
    """
    positions = np.empty((3, layout.tokens), dtype=np.int64)
    token, position, begin = 0, 0, 0
    for span, grid, so_much in zip(layout.spans, grids, later or [None] * len(grids), strict=True):
        text = span.begin - token
        positions[:, token : span.begin] = np.arange(position, position + text)
        rows, columns = grid.h // merge_size, grid.w // merge_size
        assert grid.t * rows * columns == span.tokens, "the grid has as many tokens as the image's span"
        if so_much is None:
            begin = position + text
            position = begin + max(rows, columns)
        inside = np.indices((grid.t, rows, columns)).reshape(3, -1)
        inside[0] += so_much or 0
        positions[:, span.begin : span.end] = begin + inside
        token = span.end
    positions[:, token:] = np.arange(position, position + layout.tokens - token)
    return positions
