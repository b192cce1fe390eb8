"""LoRA adapters: their configuration and folders in the format of peft, and a memory-saving adapted layer.

The layer of peft computes three products, and those of the adapter keep a copy of the input in float32 for the backward
pass, one for every layer that reads it. The autograd function here keeps the input once, in its own dtype.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, TaskType
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from magrpo.config.agents import AgentConfig, LoraConfig
from magrpo.errors import ConfigError, quote_error, quote_value
from magrpo.model.rounding import RoundedLinear, multiply_rounded

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_SCALING = ("r", "lora_alpha", "use_rslora")
"""Keys of peft that follow from ``lora.rank`` and ``lora.alpha``."""
_HARMLESS = {
    # where the adapter comes from
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    # which layers have one: the names of the tensors say the same
    *("exclude_modules", "layers_pattern", "target_modules"),
    # used only in training, or by an initialisation that ``init_lora_weights`` names
    *("corda_config", "eva_config", "lora_dropout", "lora_ga_config", "loftq_config"),
    # details of options that are refused themselves
    *("megatron_core", "qalora_group_size"),
}
"""Keys of peft that do not change what an adapter's tensors compute."""
_BASE_UNCHANGED = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base unchanged. Others, such as PiSSA, subtract from it."""
_PLAIN = (nn.Linear, RoundedLinear)
"""Layers whose product is :func:`multiply_rounded`."""


def make_peft_config(agent: AgentConfig, lora: LoraConfig) -> PeftLoraConfig:
    """The peft configuration of the agent's adapter."""
    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes any number
        target_modules=list(lora.target_modules),
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=agent.model,
    )


def check_adapter(folder: Path, agent: AgentConfig, lora: LoraConfig) -> None:
    """Raise ConfigError if the agent would compute something else with the adapter in ``folder`` than peft does.

    The names and shapes of tensors do not show their scale, nor a variant of LoRA; only the peft configuration beside
    them does. A variant is accepted if it computes the same, such as rank-stabilised scaling by an equal factor.
    """
    file = folder / ADAPTER_CONFIG
    facts = PeftLoraConfig().to_dict() | _read_facts(folder, agent)  # type: ignore[no-untyped-call]
    ours = make_peft_config(agent, lora).to_dict()  # type: ignore[no-untyped-call]
    for key, value in facts.items():
        is_known = key in _HARMLESS or key in _SCALING or (key == "init_lora_weights" and value in _BASE_UNCHANGED)
        # ``or None``: peft writes an option that is off as null, {} or false.
        if not is_known and (value or None) != (ours.get(key) or None):
            raise ConfigError(
                f"{file}: {key} = {quote_value(value)} changes what the adapter computes and is not supported here; "
                f"merge the adapter into its base (peft's merge_and_unload), and set the model of agent {agent.name!r} "
                "to the merged model"
            )
    rank, alpha = facts["r"], facts["lora_alpha"]
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise ConfigError(f"{file}: r and lora_alpha must be numbers, not {quote_value(rank)} and {quote_value(alpha)}")
    if facts["use_rslora"]:
        alpha *= math.sqrt(rank)  # its scale is alpha / sqrt(rank); the scale here is alpha / rank
    changes = []
    if rank != lora.rank:
        changes.append(f"lora.rank = {rank} (now {lora.rank})")
    if not math.isclose(alpha, lora.alpha, rel_tol=1e-6):
        changes.append(f"lora.alpha = {float(alpha)} (now {lora.alpha})")
    if changes:
        raise ConfigError(
            f"{file}: these weights of agent {agent.name!r} were trained with other LoRA settings: "
            f"set {' and '.join(changes)}"
        )


def check_whole_model(folder: Path, agent: AgentConfig) -> None:
    """Raise ConfigError if ``folder`` holds an adapter, or no model, although the agent has ``weights = "full"``."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f'{folder}: contains an adapter, but agent {agent.name!r} has weights = "full"; set its weights to "lora", '
            "or merge the adapter into its base"
        )
    if not (folder / "config.json").is_file():
        own = folder / agent.name
        remedy = f"use {own}" if (own / "config.json").is_file() else "give the folder of a whole model"
        raise ConfigError(f"{folder}: cannot read the weights of {agent.name!r}: no config.json; {remedy}")


def _read_facts(folder: Path, agent: AgentConfig) -> dict[str, Any]:
    """Read the peft configuration of the adapter in ``folder``. Raises ConfigError if there is none."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        remedy = f"start_from of agent {agent.name!r} must be a folder that contains an adapter"
        if (folder / agent.name / ADAPTER_CONFIG).is_file():
            remedy = f"use {folder / agent.name}"
        elif (folder / "config.json").is_file():
            remedy = (
                f'it contains a whole model: set the model of agent {agent.name!r} to it, or set its weights = "full"'
            )
        raise ConfigError(f"{folder}: cannot read the weights of {agent.name!r}: no {ADAPTER_CONFIG}; {remedy}")
    try:
        facts = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {quote_error(error)}") from None
    if not isinstance(facts, dict):
        raise ConfigError(f"{file}: is not an adapter configuration")
    return facts


def list_targets(names: Iterable[str]) -> list[str]:
    """The adapted layers, as ``lora.target_modules`` names them, given the names of an adapter's tensors."""
    return sorted({name.split(".")[-3] for name in names if name.endswith(".lora_A.weight")})


def fuse_adapters(model: PeftModel) -> None:
    """Let the adapted linear layers of a model compute as :class:`FusedLoraLinear`. They stay layers of peft."""
    # The class is changed in place because peft 0.21 has no stable way to choose it: ``_register_custom_module`` is
    # experimental, and its mapping would have to be repeated for every adapter that is loaded. It is safe as long as
    # the subclass adds no attributes.
    for layer in model.modules():
        if type(layer) is LoraLinear:
            layer.__class__ = FusedLoraLinear


class FusedLoraLinear(LoraLinear):
    """The layer of peft, computed as ``x W^T + s (x A^T) B^T`` if a single adapter is active and not merged."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output (..., out) for the input (..., in)."""
        names = self.active_adapters
        base = self.get_base_layer()
        if self.disable_adapters or self.merged or len(names) != 1 or kwargs or type(base) not in _PLAIN:
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
        output = multiply_rounded(rows, weight, bias)
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
        rows = x.reshape(-1, x.shape[-1])
        slopes = gradient.reshape(-1, gradient.shape[-1])
        scaled = slopes.to(up.dtype)
        grad_reduced = (scaled @ up).mul_(ctx.scaling)  # (N, rank)
        grad_up = (scaled.t() @ reduced).mul_(ctx.scaling)
        grad_down = grad_reduced.t() @ rows.to(down.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            product = (slopes.to(weight.dtype) @ weight).to(slopes.dtype)
            grad_x = _add_product(product, grad_reduced, down, 1.0).view(x.shape)
        return grad_x, None, None, grad_down, grad_up, None


def _add_product(total: Tensor, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """``total + scaling * left @ right`` in the dtype of ``total``, which may be overwritten."""
    if total.dtype == left.dtype:
        return total.addmm_(left, right, alpha=scaling)
    return torch.addmm(total.to(left.dtype), left, right, alpha=scaling).to(total.dtype)
