"""A matrix product with an epilogue: torch's linear layer, or weights packed once for the CPU's matrix unit."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_service.vision.pointwise import Pointwise


class Linear(nn.Module):
    """`x @ weight.T + bias` with an activation or a sum into the residual as its epilogue.

    On the CPU the weights are reordered once into the blocks that oneDNN's product reads (through the operator that
    torch.compile itself emits), which saves that reordering at every call and applies the epilogue to the float32 sums
    before they are rounded. In float32 torch's own product is MKL's, which does without AVX-512 on AMD's processors:
    oneDNN's is 2.3 times as fast there.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(outputs, inputs))
        self.bias = frozen(torch.empty(outputs)) if bias else None
        self._packed: Tensor | None = None

    def widen_outputs(self, extra: int) -> None:
        """Add outputs that are always zero."""
        self.weight = frozen(functional.pad(self.weight, (0, 0, 0, extra)))
        if self.bias is not None:
            self.bias = frozen(functional.pad(self.bias, (0, extra)))

    def widen_inputs(self, extra: int) -> None:
        """Add inputs that count for nothing."""
        self.weight = frozen(functional.pad(self.weight, (0, extra)))

    def pack(self, rows: int) -> None:
        """Reorder the weights for products of about `rows` rows where that pays; the plain ones are dropped."""
        dtype = self.weight.dtype
        if self.weight.device.type == "cpu" and packing_available(dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, rows)
            self.weight = frozen(torch.empty(0, dtype=dtype))

    @property
    def adds(self) -> bool:
        """Whether `plus` sums as the product's epilogue, and not in a pass of its own."""
        return self._packed is not None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, inputs] → [rows, outputs]."""
        if self._packed is not None:
            return self._packed_product(x, "none", "")
        return functional.linear(x, self.weight, self.bias)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """The product's GELU in its tanh form."""
        if self._packed is not None:
            return self._packed_product(x, "gelu", "tanh")
        if x.is_cuda and x.dtype is not torch.float32 and self.bias is not None:
            # cuBLASLt's GELU epilogue is the tanh form; torch falls back to product + gelu_("tanh") without it.
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        return functional.gelu(self(x), approximate="tanh")

    def gelu_erf(self, x: Tensor, pointwise: Pointwise) -> Tensor:
        """The product's GELU by the error function, which is no product's epilogue on CUDA."""
        if self._packed is not None:
            return self._packed_product(x, "gelu", "none")
        return pointwise.gelu_erf(self(x))

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual` [rows, outputs] + the product; `residual` is used up."""
        if self._packed is not None:
            operator = torch.ops.mkldnn._linear_pointwise.binary
            total: Tensor = operator(x, residual, self._packed, self.bias, "add")
            return total
        return residual.add_(self(x))

    def _packed_product(self, x: Tensor, epilogue: str, algorithm: str) -> Tensor:
        operator = torch.ops.mkldnn._linear_pointwise
        product: Tensor = operator(x, self._packed, self.bias, epilogue, [], algorithm)
        return product


def frozen(values: Tensor) -> nn.Parameter:
    """Return values as a parameter that is never trained."""
    return nn.Parameter(values, requires_grad=False)


def packing_available(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the packed product, and this CPU the instructions for the type."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32
