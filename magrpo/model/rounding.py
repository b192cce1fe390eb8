"""Frozen linear layers that multiply in bfloat16 inside a float32 model, for ``model.dtype = "mixed"``.

Processors with instructions for it compute such products about twice as fast; norms, attention and adapters would be
slower in bfloat16, and are not rounded. The bias is added in float32, because those of Qwen2 are large.
"""

from time import perf_counter

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_ROWS, _WIDTH, _TRIALS = 64, 1024, 20
LARGE = 50_000_000
"""Parameters of a base from which on its matrix products take most of the time."""
WORTHWHILE = 1.5
"""Speed-up of the products from which on ``auto`` takes them, and they are recommended to others."""


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


def recommend_dtype(model: PreTrainedModel) -> str:
    """A line if another ``model.dtype`` would be faster for a model with adapters on this CPU; empty otherwise."""
    is_rounded = any(type(module) is RoundedLinear for module in model.modules())
    is_large = model.dtype == torch.float32 and model.num_parameters() >= LARGE
    if model.device.type != "cpu" or not (is_rounded or is_large):
        return ""
    speed_up = measure_speed_up()
    measured = describe_speed_up(speed_up)
    if is_rounded and speed_up < 1:
        return f'{measured}: model.dtype = "float32" is faster'
    if not is_rounded and speed_up >= WORTHWHILE:
        return f'{measured}: model.dtype = "mixed" is faster (docs/engines.md)'
    return ""


def describe_speed_up(speed_up: float) -> str:
    """A clause for messages that say which precision is faster."""
    return f"this processor multiplies in bfloat16 {speed_up:.1f} times as fast as in float32"


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
