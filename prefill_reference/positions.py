"""M-RoPE positions: the time, height and width of each prompt token, for the rotary embedding."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from encoder_contract.geometry import Grid
from prefill_client import Layout


def mrope_positions(
    layout: Layout, grids: Sequence[Grid], merge_size: int, time_offsets: Sequence[int | None] = ()
) -> NDArray[np.int64]:
    """Return int64 [3, tokens]: time, height and width of every token of the prompt.

    A text token advances all three by one. An image's tokens share one time and spread over the image's merged grid;
    the text after an image continues past its longer side. The first generated token's position is the maximum plus
    one. The source is `get_rope_index` of Qwen2.5-VL, Qwen3-VL and Qwen3.5 in `transformers`.

    `time_offsets` has one value per image. A number marks a pair of video frames that continues the video of the image
    before it: the pair starts at the position of the video's first pair, plus this offset in time. None marks any other
    image. Empty means that no image continues a video.
    """
    positions = np.empty((3, layout.tokens), dtype=np.int64)
    token, position, begin = 0, 0, 0
    for span, grid, offset in zip(layout.spans, grids, time_offsets or [None] * len(grids), strict=True):
        text = span.begin - token
        positions[:, token : span.begin] = np.arange(position, position + text)
        rows, columns = grid.h // merge_size, grid.w // merge_size
        assert grid.t * rows * columns == span.tokens, "the grid has as many tokens as the image's span"
        if offset is None:
            begin = position + text
            position = begin + max(rows, columns)
        inside = np.indices((grid.t, rows, columns)).reshape(3, -1)
        inside[0] += offset or 0
        positions[:, span.begin : span.end] = begin + inside
        token = span.end
    positions[:, token:] = np.arange(position, position + layout.tokens - token)
    return positions
