"""The backward pass of both losses: the gradients that the forward pass wrote, times that of the loss."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from magrpo_kernels.inputs import NUM_ARGUMENTS, read_arguments

_BLOCK_ELEMENTS = 1 << 22
"""Elements multiplied at once on a CPU, which makes float32 copies of half-precision ones."""


def keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the gradients for :func:`scale_gradients`: the last outputs, one for each tensor before the arguments.

    The last input says which of them are wanted.
    """
    num_leaves = len(inputs) - NUM_ARGUMENTS - 1
    ctx.save_for_backward(*output[-num_leaves:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros as large as the gradients
    ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in inputs[:num_leaves]]
    ctx.wants = inputs[-1]
    ctx.once, ctx.has_run = read_arguments(inputs[num_leaves:])[1].backward_once, False


def scale_gradients(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """The saved gradients times ``grad_output``, as the gradients of all inputs.

    Raises:
        RuntimeError: the loss is differentiated twice, or backward runs again although it may run only once.
    """
    scaled: list[Tensor | None] = [None] * len(ctx.dtypes)
    if grad_output is not None:
        if grad_output.requires_grad:
            raise RuntimeError("the fused policy loss has no second derivative")
        if ctx.once and ctx.has_run:
            raise RuntimeError("backward runs a second time, which LossOptions.backward_once excludes")
        ctx.has_run = True
        for i, (gradient, dtype, wanted) in enumerate(zip(ctx.saved_tensors, ctx.dtypes, ctx.wants, strict=True)):
            if wanted and ctx.once and gradient.dtype == dtype:
                torch.ops.magrpo.scale_(gradient, grad_output)
                scaled[i] = gradient
            elif wanted:
                scaled[i] = scale_gradient(gradient, grad_output, dtype)
    return *scaled, *[None] * (NUM_ARGUMENTS + 1)


def scale_gradient(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * scale``, multiplied in float32 or wider and rounded once to ``dtype``."""
    factor = scale.reshape(1)  # of one dimension: one without any would be rounded to the gradient's dtype first
    scaled = gradient.new_empty(gradient.shape, dtype=dtype)
    if gradient.is_cuda or gradient.dtype == dtype == factor.dtype:
        return torch.mul(gradient, factor, out=scaled)
    rows = max(1, _BLOCK_ELEMENTS // max(1, gradient[:1].numel()))
    for start, end in pairwise([*range(0, len(gradient), rows), len(gradient)]):
        torch.mul(gradient[start:end], factor, out=scaled[start:end])
    return scaled


@torch.library.custom_op("magrpo::scale_", mutates_args=("values",))
def _scale_(values: Tensor, scale: Tensor) -> None:
    """Multiply in place, or leave the values alone where the scale is 1, as it is for the loss that a step takes."""
    if values.is_cuda and values.dtype != torch.float64:
        from magrpo_kernels.row_triton import scale_triton_  # triton, which not every machine has

        scale_triton_(values, scale)
    elif scale != 1:
        values.copy_(scale_gradient(values, scale, values.dtype))


@_scale_.register_fake
def _(values: Tensor, scale: Tensor) -> None:
    """Nothing to say about shapes."""
