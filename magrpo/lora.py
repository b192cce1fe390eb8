"""Linear layers with a LoRA adapter as one autograd function, which keeps their input once, in its own dtype.

peft's layer has three products: the adapter's keep a copy of the input in float32, one for every layer that reads it.
"""

from typing import Any

import torch
from jaxtyping import Float
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def fuse_adapters(model: PeftModel) -> None:
    """Let the adapted linear layers of a model compute as :class:`FusedLoraLinear`; they stay layers of peft."""
    for layer in model.modules():
        if type(layer) is LoraLinear:
            layer.__class__ = FusedLoraLinear


class FusedLoraLinear(LoraLinear):
    """peft's layer. With one active adapter that is not merged, without dropout, it is ``x W^T + s (x A^T) B^T``."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output (..., out) for the input (..., in)."""
        names = self.active_adapters
        base = self.get_base_layer()
        if self.disable_adapters or self.merged or len(names) != 1 or kwargs or type(base) is not nn.Linear:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        [name] = names
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        adapted: Tensor = _AdaptedProduct.apply(x, base.weight, base.bias, down, up, self.scaling[name])  # type: ignore[no-untyped-call]
        return adapted


class _AdaptedProduct(torch.autograd.Function):
    """``x W^T + bias + s (x A^T) B^T``; W (out, in) is frozen, A (rank, in) and B (out, rank) have their own dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (N, in)
        reduced = rows.to(down.dtype) @ down.t()  # (N, rank)
        output = nn.functional.linear(rows, weight, bias)
        output = _add_product(output, reduced, up.t(), scaling)
        ctx.save_for_backward(x, weight, down, up, reduced)
        ctx.scaling = scaling
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, None, None, Float[Tensor, "rank in"], Float[Tensor, "out rank"], None]:
        x, weight, down, up, reduced = ctx.saved_tensors
        rows, slopes = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        scaled = slopes.to(up.dtype)
        of_reduced = (scaled @ up).mul_(ctx.scaling)  # (N, rank)
        of_up = (scaled.t() @ reduced).mul_(ctx.scaling)
        of_down = of_reduced.t() @ rows.to(down.dtype)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _add_product(slopes @ weight, of_reduced, down, 1.0).view(x.shape)
        return of_x, None, None, of_down, of_up, None


def _add_product(total: Tensor, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """``total + scaling * left @ right``, in the dtype of ``total``, which may be consumed."""
    if total.dtype == left.dtype:
        return total.addmm_(left, right, alpha=scaling)
    return torch.addmm(total.to(left.dtype), left, right, alpha=scaling).to(total.dtype)
