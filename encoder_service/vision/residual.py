"""The residual stream of one pack, tile by tile."""

from collections.abc import Sequence

import torch
from torch import Tensor

from encoder_service.vision.linear import Linear
from encoder_service.vision.pointwise import Norm, Pointwise


class Residual:
    """Sums of products, whose norms the next products take.

    Where a product cannot add to the stream as its epilogue, the next norm does, in one pass over both.
    """

    def __init__(self, tiles: Sequence[Tensor], pointwise: Pointwise) -> None:
        """`tiles` [patches, embed] are used up."""
        self._tiles = list(tiles)
        self._pending: list[Tensor | None] = [None] * len(self._tiles)
        self._pointwise = pointwise

    def __len__(self) -> int:
        return len(self._tiles)

    def add(self, number: int, product: Linear, x: Tensor) -> None:
        """Add the product of `x` to a tile whose norm was taken since it was last added to."""
        assert self._pending[number] is None
        if product.adds:
            self._tiles[number] = product.plus(self._tiles[number], x)
        else:
            self._pending[number] = product(x)

    def normed(self, number: int, norm: Norm) -> Tensor:
        """Return the norm of a tile."""
        delta, self._pending[number] = self._pending[number], None
        return self._pointwise.add_norm(self._tiles[number], delta, norm)

    def whole(self) -> Tensor:
        """Return the stream [patches, embed]."""
        for number, delta in enumerate(self._pending):
            if delta is not None:
                self._tiles[number].add_(delta)
                self._pending[number] = None
        return self._tiles[0] if len(self._tiles) == 1 else torch.cat(self._tiles)
