"""A matrix product with an epilogue: torch's linear layer, or weights packed once for the CPU's matrix unit."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Activation = Literal["none", "gelu_tanh", "gelu_erf"]

# oneDNN's name and algorithm of an epilogue.
_EPILOGUES: dict[Activation, tuple[str, str]] = {
    "none": ("none", ""),
    "gelu_tanh": ("gelu", "tanh"),
    "gelu_erf": ("gelu", "none"),
}


class Linear(nn.Module):
    """`x @ weight.T + bias` with an activation or a sum into the residual as its epilogue.

    On the CPU in bfloat16 the weights are reordered once into the blocks the matrix unit reads (oneDNN through the
    operator that torch.compile itself emits), which saves that reordering at every call and applies the epilogue to
    the float32 sums before they are rounded.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self._packed: Tensor | None = None

    def pack(self, rows: int) -> None:
        """Reorder the weights for products of about `rows` rows where that pays; the plain ones are dropped."""
        if self.weight.device.type == "cpu" and self.weight.dtype is torch.bfloat16 and packing_available():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, rows)
            self.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor, activation: Activation = "none") -> Tensor:
        """[rows, inputs] → [rows, outputs]."""
        if self._packed is not None:
            name, algorithm = _EPILOGUES[activation]
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._packed, self.bias, name, [], algorithm
            )
            return packed
        if activation == "gelu_tanh" and x.is_cuda and x.dtype is not torch.float32 and self.bias is not None:
            # cuBLASLt's GELU epilogue is the tanh form; torch falls back to product + gelu_("tanh") without it.
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        product = functional.linear(x, self.weight, self.bias)
        if activation == "none":
            return product
        return functional.gelu(product, approximate="tanh" if activation == "gelu_tanh" else "none")

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual` [rows, outputs] + the product; `residual` is used up."""
        if self._packed is not None:
            operator = torch.ops.mkldnn._linear_pointwise.binary
            total: Tensor = operator(x, residual, self._packed, self.bias, "add")
            return total
        return residual.add_(functional.linear(x, self.weight, self.bias))


def packing_available() -> bool:
    """Whether this build of torch has the packed product and this CPU the instructions for bfloat16."""
    return (
        bool(torch._C._has_mkldnn)
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
