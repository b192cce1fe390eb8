"""The adapted linear layer as one autograd function, against peft's own forward pass."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from magrpo.model.lora import FusedLoraLinear, fuse_adapters

PARTS = ("output", "x", "A", "B")


def make_layer(dtype: torch.dtype, *, bias: bool) -> FusedLoraLinear:
    """A fused layer with the adapters ``one``, which is active, and ``two``, both random so that neither adds zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40, bias=bias, dtype=dtype))
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=["0"]), adapter_name="one")
    adapted.add_adapter("two", LoraConfig(r=3, target_modules=["0"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    fuse_adapters(adapted)
    layer = adapted.eval().get_submodule("base_model.model.0")
    assert isinstance(layer, FusedLoraLinear)
    return layer


def run_layer(layer: LoraLinear, inputs: Tensor, slopes: Tensor, *, fused: bool) -> dict[str, Tensor]:
    """The output and the gradients of x, A and B."""
    x = inputs.clone().requires_grad_()
    output = layer(x) if fused else LoraLinear.forward(layer, x)
    [name] = layer.active_adapters
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    gradients = torch.autograd.grad(output, (x, down, up), slopes)
    return dict(zip(PARTS, (output.detach(), *gradients), strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 24), (2, 5, 24)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_it_computes_what_peft_computes(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], bias: bool
) -> None:
    layer = make_layer(dtype, bias=bias)
    inputs, slopes = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 40, dtype=dtype)
    ours, theirs = (run_layer(layer, inputs, slopes, fused=fused) for fused in (True, False))
    for part in PARTS:
        assert ours[part].dtype == theirs[part].dtype
        torch.testing.assert_close(ours[part], theirs[part], rtol=tolerance, atol=tolerance * 10)


def test_the_other_adapter_and_none_are_peft_s() -> None:
    layer, x = make_layer(torch.float32, bias=True), torch.randn(5, 24)
    layer.set_adapter("two")
    torch.testing.assert_close(layer(x), LoraLinear.forward(layer, x))
    layer.set_adapter(["one", "two"])
    assert torch.equal(layer(x), LoraLinear.forward(layer, x))
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.get_base_layer()(x))


def test_an_input_without_gradient_gets_none() -> None:
    layer, x = make_layer(torch.float32, bias=False), torch.randn(5, 24)
    layer(x).sum().backward()
    assert x.grad is None
    assert layer.lora_A["one"].weight.grad is not None


def test_layers_that_read_one_input_keep_it_once_in_its_own_dtype() -> None:
    first, second = make_layer(torch.bfloat16, bias=True), make_layer(torch.bfloat16, bias=True)
    x = torch.randn(64, 24, dtype=torch.bfloat16, requires_grad=True)
    weights = {parameter.data_ptr() for layer in (first, second) for parameter in layer.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = first(x), second(x)
    sizes = [size for address, size in kept.items() if address not in weights]
    assert len(outputs) == 2
    assert sorted(sizes) == [64 * 4 * 4] * 2 + [x.nbytes], "the reduced inputs of each, and the input"
