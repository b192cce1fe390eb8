"""Frozen linear layers in bfloat16 inside a float32 model: for ``model.dtype = "mixed"``, and in the references of full
copies, to save memory.

Processors with instructions for it compute such products about twice as fast; norms, attention and adapters would be
slower in bfloat16, and are not rounded in a mixed model. There the bias is added in float32, because those of Qwen2 are
large.
"""

from time import perf_counter

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_ROWS, _WIDTH, _TRIALS = 64, 1024, 20


class RoundedLinear(nn.Linear):
    """A linear layer with a bfloat16 weight, whose inputs, bias and outputs are float32."""

    def forward(self, input: Tensor) -> Tensor:
        return multiply_rounded(input, self.weight, self.bias)


def multiply_rounded(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``inputs W^T + bias`` in the dtype of ``inputs``, the factors of the product rounded to that of the weight."""
    if inputs.dtype == weight.dtype:
        return nn.functional.linear(inputs, weight, bias)
    product = nn.functional.linear(inputs.to(weight.dtype), weight).to(inputs.dtype)
    return product if bias is None else product.add_(bias)


def round_linear_layers(model: PreTrainedModel) -> None:
    """Let the frozen linear layers of a model, except its head, compute as :class:`RoundedLinear`."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    kept = {head.weight, model.get_input_embeddings().weight}
    for module in model.modules():
        if type(module) is nn.Linear and module.weight not in kept:
            module.__class__ = RoundedLinear  # which has no attributes of its own
            module.weight = nn.Parameter(module.weight.to(torch.bfloat16), requires_grad=False)


def list_untied_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """List the linear layers of a model, except a head that is tied to the embeddings."""
    embeddings = model.get_input_embeddings().weight
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module.weight is not embeddings]


def round_linear_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Store the weights of untied linear layers in ``dtype``, to which autocast would round them for each product."""
    for layer in list_untied_layers(model):
        layer.weight.data = layer.weight.to(dtype)


@torch.no_grad()
def measure_speed_up() -> float:
    """How many times as fast as in float32 a core of this processor multiplies in bfloat16, in a product of decoding.

    On one core, because a product on several waits for the slowest: beside other work the ratio would be chance.
    """
    inputs, weight = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = []
    for factor in (weight, weight.to(torch.bfloat16)):
        times = []
        for _ in range(_TRIALS):
            started = perf_counter()
            multiply_rounded(inputs, factor, None)
            times.append(perf_counter() - started)
        seconds.append(min(times))
    torch.set_num_threads(num_threads)
    return seconds[0] / seconds[1]
