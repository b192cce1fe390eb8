"""Models whose weights are spread over the ranks of an update, by FSDP2 (``torch.distributed.fsdp.fully_shard``).

A rank holds a part of each layer and gathers one layer at a time, in the forward and again in the backward pass. All
ranks must therefore run the same model equally often, but each with its own inputs and adapter.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from magrpo.errors import ConfigError

ResultT = TypeVar("ResultT")


class _Root(nn.Module):
    """Lets FSDP gather a model's weights for a computation that uses them outside the model's own ``forward``."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[PreTrainedModel], Any]) -> Any:
        return compute(self.model)


@dataclass(eq=False)
class Shards:
    """The models that the ranks of ``mesh`` share."""

    mesh: DeviceMesh
    device: torch.device
    _roots: dict[nn.Module, _Root] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes the weights that all ranks gather."""
        return bool(self.mesh.get_rank() == 0)

    def spread_layers(self, model: PreTrainedModel, kept: Set[nn.Parameter] = frozenset()) -> None:
        """Spread the layers of a frozen model, except ``kept``; embeddings, norm and head stay whole on each rank."""
        layers = _find_layers(model)
        layer_parameters = {parameter for layer in layers for parameter in layer.parameters()}
        self._spread(model, layers, set(model.parameters()) - (layer_parameters - kept))

    def spread_model(self, model: PreTrainedModel) -> None:
        """Spread all weights of a model that is trained. Its gradients are sums over ranks, spread in the same way."""
        self._spread(model, _find_layers(model), set())

    def run(self, model: PreTrainedModel, compute: Callable[[PreTrainedModel], ResultT]) -> ResultT:
        """Call ``compute(model)``; the weights of a trained model are whole in it and in the backward pass."""
        result: ResultT = self._roots[model](compute)
        return result

    def _spread(self, model: PreTrainedModel, layers: list[nn.Module], whole: set[nn.Parameter]) -> None:
        root = self._roots[model] = _Root(model)
        for module in (*layers, root):
            # The root, too, frees its weights after forward: if no backward follows, a step would make them stale.
            fully_shard(module, mesh=self.mesh, reshard_after_forward=True, ignored_params=whole)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)  # a sum over ranks, not their mean
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
        nn.Module.to(root, self.device)


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be spread; all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_weights(model: PreTrainedModel) -> dict[str, Any]:
    """Gather the weights of a spread model for ``save_pretrained`` on the first rank; all ranks call it."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    names = dict(model.named_parameters(remove_duplicate=False)).keys()
    distinct = dict(model.named_parameters()).keys()
    tied = names - distinct  # further names of a tensor, which is saved once
    return {name: tensor for name, tensor in whole.items() if name not in tied}


def spread_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Move a whole tensor, which every rank holds, to the device of ``parameter``, and spread it in the same way."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a model. Raises ConfigError if transformers marks none of its modules as layers."""
    if layers := [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        return list[nn.Module](layers)
    kind = f"{type(model).__name__} of {model.name_or_path!r}"
    raise ConfigError(f'place: ranks.shard = "base" finds no layers in {kind}: remove it')
