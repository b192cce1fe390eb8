"""Attention over packed rows gives what the mask over all pairs gives, from fewer pairs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from magrpo.model import packed_attention
from magrpo.model.collate import collate, make_attention_mask
from magrpo.model.forward import hidden_states
from magrpo.model.packed_attention import Packing, attend_packed, find_packing
from magrpo.types import Sample

SEGMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] + [3] * 6, [0] * 3 + [1] * 7 + [-1] * 6])


class Layer(nn.Module):
    is_causal = True

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.num_key_value_groups = repeats


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_outputs_and_gradients_are_those_of_the_mask(repeats: int, scaling: float | None) -> None:
    torch.manual_seed(0)
    num_rows, length = SEGMENTS.shape
    shapes = [(num_rows, 2 * repeats, length, 8), (num_rows, 2, length, 8), (num_rows, 2, length, 8)]
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    weights = torch.randn(num_rows, length, 2 * repeats, 8) * (SEGMENTS >= 0)[:, :, None, None]  # nothing reads padding

    mask = make_attention_mask(SEGMENTS, torch.float32)

    def compute(packing: Packing | None) -> tuple[Tensor, ...]:
        output, _ = attend_packed(Layer(repeats), query, key, value, mask, packing=packing, scaling=scaling)
        weighted = output * weights
        return weighted, *torch.autograd.grad(weighted.sum(), [query, key, value])

    for packed, masked in zip(compute(find_packing(SEGMENTS, mask)), compute(None), strict=True):
        torch.testing.assert_close(packed, masked, rtol=1e-5, atol=1e-5)


class PairCount(TorchFunctionMode):
    """Counts pairs of a query and a key in calls of attention, over all heads."""

    pairs = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.scaled_dot_product_attention:
            query, key, *_ = args
            self.pairs += query[..., 0].numel() * key.shape[2]
        return function(*args, **(kwargs or {}))


def test_an_update_computes_no_pairs_of_two_completions(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    siblings = [Sample((1, 2, 3), (4,) * length, (0.0,) * length, 0.0, 1.0, 0, 0) for length in (5, 3)]
    batch = collate(siblings, [(0, 1)])

    def count_pairs() -> int:
        with PairCount() as count, torch.no_grad():
            hidden_states(model, batch)
        pairs, rest = divmod(count.pairs, model.config.num_hidden_layers * model.config.num_attention_heads)
        assert rest == 0
        return pairs

    # The last token of a completion is not an input.
    assert count_pairs() == (3 + 4 + 2) ** 2, "a short row of a narrow model keeps the mask"
    monkeypatch.setattr(packed_attention, "WORTHWHILE", 0)
    assert count_pairs() == 3 * 3 + 4 * (3 + 4) + 2 * (3 + 2)


def test_it_pays_for_long_rows_of_wide_models() -> None:
    long, short = (Packing((parts,), torch.empty(0)) for parts in ((200, *[60] * 8), (50, *[25] * 16)))
    assert long.is_worthwhile(576), "eight answers of a SmolLM2 author"
    assert not long.is_worthwhile(128)
    assert not short.is_worthwhile(192), "programs of the embedded agents"


def test_a_layer_with_a_mask_of_its_own_keeps_it() -> None:
    """As Doge, whose layers add a mask that depends on their states."""
    torch.manual_seed(0)
    mask = make_attention_mask(SEGMENTS, torch.float32)
    query, key, value = (torch.randn(len(SEGMENTS), 2, SEGMENTS.shape[1], 8) for _ in range(3))
    more = mask + torch.randn(mask.shape)
    packed, _ = attend_packed(Layer(1), query, key, value, more, packing=find_packing(SEGMENTS, mask))
    assert packed.equal(attend_packed(Layer(1), query, key, value, more)[0])
    assert not packed.equal(attend_packed(Layer(1), query, key, value, mask)[0])
