"""The backward pass of both losses: scales the gradients that the forward pass wrote by the gradient of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 22
"""Largest number of elements to multiply at once on a CPU, where half-precision ones are copied to float32."""


def wants_gradient(leaf: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of an input of a loss. Inside ``forward``, the answer is always no."""
    return torch.is_grad_enabled() and leaf is not None and leaf.requires_grad


def keep_gradients(
    ctx: Any, leaves: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, once: bool
) -> None:
    """Keep the gradient of each leaf, None if it is not needed, for :func:`scale_gradients`.

    ``once``: whether backward runs at most once, so that it may scale gradients in place.
    """
    ctx.save_for_backward(*gradients)
    ctx.set_materialize_grads(False)  # else autograd fills in zeros for unused outputs
    ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
    ctx.once, ctx.has_run = once, False


def scale_gradients(ctx: Any, grad_loss: Tensor | None) -> list[Tensor | None]:
    """The kept gradients times ``grad_loss``, one for each leaf.

    Raises:
        RuntimeError: the loss is differentiated twice, or backward runs again although it may run only once.
    """
    if grad_loss is None:
        return [None] * len(ctx.dtypes)
    if grad_loss.requires_grad:
        raise RuntimeError("the fused policy loss has no second derivative")
    if ctx.once and ctx.has_run:
        raise RuntimeError("backward runs a second time, which LossOptions.backward_once excludes")
    ctx.has_run = True
    scaled: list[Tensor | None] = []
    for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
        if gradient is None:
            scaled.append(None)
        elif not (ctx.once and gradient.dtype == dtype):
            scaled.append(scale_gradient(gradient, grad_loss, gradient.new_empty(gradient.shape, dtype=dtype)))
        elif gradient.is_cuda or grad_loss != 1:  # on a GPU the comparison would wait for the forward pass
            scaled.append(scale_gradient(gradient, grad_loss, gradient))
        else:
            scaled.append(gradient)
    return scaled


def scale_gradient(gradient: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Write ``gradient * scale`` to ``out``, which may be the gradient; multiply in float32 or wider and round once."""
    # A tensor of no dimensions would be rounded to the gradient's dtype before the multiplication.
    factor = scale.reshape(1)
    if gradient.is_cuda or gradient.dtype == out.dtype == factor.dtype:
        return torch.mul(gradient, factor, out=out)
    rows = max(1, _BLOCK_ELEMENTS // max(1, gradient[:1].numel()))
    for start, end in pairwise([*range(0, len(gradient), rows), len(gradient)]):
        torch.mul(gradient[start:end], factor, out=out[start:end])
    return out
