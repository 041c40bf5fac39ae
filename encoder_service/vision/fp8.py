"""Products in 8-bit floating point: weights quantised once by output, activations at every product by row."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_contract.tower_spec import full_blocks
from encoder_service.vision.layers import Linear
from encoder_service.vision.pointwise import Norm, Pointwise, Quantised

# The sides of a product that the matrix units take in FP8.
FP8_MULTIPLE = 16


class Fp8Linear(Linear):
    """A product of e4m3 values (three bits of mantissa), each row of both sides with a scale of its own.

    On CUDA `torch._scaled_mm`, whose running sums may keep fewer bits than float32. Elsewhere the same values are
    multiplied in float32, which is exact but for the order of the sums.
    """

    def __init__(self, product: Linear, pointwise: Pointwise) -> None:
        """Quantise the weights of `product`, on the device where they lie."""
        super().__init__(0, 0, bias=False)
        values, scales = pointwise.quantised(product.weight)
        self.bias = product.bias
        self._dtype = product.weight.dtype
        self._pointwise = pointwise
        self._scales = scales[None]
        # On the CPU in the type that they are multiplied in; on CUDA column by column, as the matrix units read it.
        self._values = values.t() if values.is_cuda else values.float().t()

    def norm_for(
        self, pointwise: Pointwise, residual: Tensor, delta: Tensor | None, norm: Norm
    ) -> Tensor | Quantised:
        """See `Linear`: quantised while the row is at hand."""
        return pointwise.add_norm_quantised(residual, delta, norm)

    def gelu_tanh_for(self, product: Linear, x: Tensor | Quantised) -> Tensor | Quantised:
        """See `Linear`: quantised in the pass of the GELU."""
        return self._pointwise.gelu_tanh_quantised(product(x))

    def forward(self, x: Tensor | Quantised) -> Tensor:
        """[rows, inputs] → [rows, outputs], in the type of the weights before they were quantised."""
        values, scales = x if isinstance(x, Quantised) else self._pointwise.quantised(x)
        if values.is_cuda:
            return torch._scaled_mm(
                values,
                self._values,
                scale_a=scales[:, None],
                scale_b=self._scales,
                bias=self.bias,
                out_dtype=self._dtype,
                use_fast_accum=True,
            )
        product = (values.float() @ self._values) * scales[:, None] * self._scales
        return (product if self.bias is None else product + self.bias.float()).to(self._dtype)

    def gelu_tanh(self, x: Tensor | Quantised) -> Tensor:
        """The product's GELU in its tanh form, in a pass of its own."""
        return functional.gelu(self(x), approximate="tanh")

    def pack(self, rows: int) -> None:
        """Nothing: it is in its form already."""


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a GPU multiplies 8-bit floating point: Ada, Hopper or later."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def quantise_blocks(blocks: nn.ModuleList, pointwise: Pointwise) -> None:
    """Replace the products of all blocks but the first `full_blocks`, where their sides are multiples of 16."""
    for block in list(blocks)[full_blocks(len(blocks)) :]:
        for parent in list(block.modules()):
            for name, part in list(parent.named_children()):
                if isinstance(part, Linear) and not any(side % FP8_MULTIPLE for side in part.weight.shape):
                    setattr(parent, name, Fp8Linear(part, pointwise))
