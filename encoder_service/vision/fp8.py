"""Products in 8-bit floating point: weights are quantised once per output, activations at every product per row."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_contract.tower_spec import full_blocks
from encoder_service.vision.layers import Linear
from encoder_service.vision.pointwise import Norm, Pointwise, Quantised

# In FP8 the matrix units take products whose sides are multiples of this.
FP8_MULTIPLE = 16


class Fp8Linear(Linear):
    """A product of e4m3 values (three bits of mantissa); each row of both sides has its own scale.

    On CUDA this is `torch._scaled_mm`, whose running sums may keep fewer bits than float32. On the CPU the same values
    are multiplied in float32, which is exact except for the order of the sums.
    """

    def __init__(self, product: Linear, pointwise: Pointwise) -> None:
        """Quantise the weights of `product` on their device."""
        super().__init__(0, 0, bias=False)
        values, scales = pointwise.quantised(product.weight)
        self.bias = product.bias
        self._dtype = product.weight.dtype
        self._pointwise = pointwise
        self._scales = scales[None]
        # On the CPU, in the type of the product; on CUDA, column by column, as the matrix units read them.
        self._values = values.t() if values.is_cuda else values.float().t()

    def norm_for(
        self, pointwise: Pointwise, residual: Tensor, delta: Tensor | None, norm: Norm
    ) -> Tensor | Quantised:
        """See `Linear`. The norm is quantised in the same pass."""
        return pointwise.add_norm_quantised(residual, delta, norm)

    def gelu_tanh_for(self, product: Linear, x: Tensor | Quantised) -> Tensor | Quantised:
        """See `Linear`. The GELU is quantised in the same pass."""
        return self._pointwise.gelu_tanh_quantised(product(x))

    def forward(self, x: Tensor | Quantised) -> Tensor:
        """[rows, inputs] → [rows, outputs], in the weights' type before quantisation."""
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
        """Return the tanh GELU of the product, computed in a separate pass."""
        return functional.gelu(self(x), approximate="tanh")

    def pack(self, rows: int) -> None:
        """Do nothing: FP8 weights are not packed."""


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a GPU multiplies 8-bit floating point, as Ada, Hopper and later ones do."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def quantise_blocks(blocks: nn.ModuleList, pointwise: Pointwise) -> None:
    """Quantise the linear layers of all blocks but the first `full_blocks`, if their sides are multiples of 16."""
    for block in list(blocks)[full_blocks(len(blocks)) :]:
        for parent in list(block.modules()):
            for name, part in list(parent.named_children()):
                if isinstance(part, Linear) and not any(side % FP8_MULTIPLE for side in part.weight.shape):
                    setattr(parent, name, Fp8Linear(part, pointwise))
