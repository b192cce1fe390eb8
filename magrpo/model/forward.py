"""Forward passes of a model over a batch: hidden states, head weights, logits; and tests of what a model allows."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from magrpo.errors import ConfigError
from magrpo.model.collate import Batch, collate, make_attention_mask, make_probe_sample
from magrpo.model.packed_attention import find_packing


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """Find the model without its head.

    The text model of Llama 4 names its decoder wrongly, and is then its own base.
    """
    return model.get_submodule("model") if model.base_model is model else model.base_model


def hidden_states(model: PreTrainedModel, batch: Batch) -> Float[Tensor, "N D"]:
    """The last hidden states at the positions that predict the sampled tokens: the inputs of the head."""
    output = find_decoder(model)(**_model_inputs(model, batch))
    states: Tensor = output.last_hidden_state  # (R, L, D)
    return states.flatten(0, 1).index_select(0, batch.predictors)


def _model_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """The arguments of a forward pass. One mask serves all layers, in the dtype of their queries.

    On a CPU, attention that is told how long rows are packed does without the mask. A model that does not tell its
    layers uses the mask.
    """
    device_type = batch.input_ids.device.type
    dtype = model.dtype
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "attention_mask": None,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }
    if batch.segments is not None:
        mask = inputs["attention_mask"] = make_attention_mask(batch.segments, dtype)
        if device_type == "cpu" and _takes_packing(model):
            packing = find_packing(batch.segments, mask)
            if packing.is_worthwhile(model.config.get_text_config().hidden_size):
                inputs["packing"] = packing
    return inputs


def _takes_packing(model: PreTrainedModel) -> bool:
    """Whether the forward passes of a model and its decoder accept arguments that they only hand on."""
    return all(
        any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        for signature in (inspect.signature(module.forward) for module in (model, find_decoder(model)))
    )


def head_weights(model: PreTrainedModel) -> tuple[Float[Tensor, "V D"], Float[Tensor, " V"] | None]:
    """The weight and bias that turn a hidden state into logits, active adapters included."""
    layer = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight, bias = layer.weight, layer.bias
    if isinstance(layer, LoraLinear) and not layer.disable_adapters:
        weight = sum((layer.get_delta_weight(name) for name in layer.active_adapters), weight)
    return weight, bias


def token_logits(model: PreTrainedModel, batch: Batch) -> Float[Tensor, "N V"]:
    """The model's own logits at the positions that predict the sampled tokens."""
    output = model(**_model_inputs(model, batch))
    logits: Tensor = output.logits  # (R, L, V)
    return logits.flatten(0, 1).index_select(0, batch.predictors)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let layers keep only their inputs for the backward pass, which computes each layer again. May be called twice.

    The switch of transformers is not used, because it works only in training mode, in which dropout would be on. Raises
    ConfigError if the model has no layers that support checkpointing.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"optim.gradient_checkpointing: {type(model).__name__} of {model.name_or_path!r} does not support "
            "gradient checkpointing; set it to false"
        )
    for layer in layers:
        if not isinstance(layer.forward, partial):
            layer.forward = partial(_run_checkpointed, layer.forward)


def _run_checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class LogitMap(NamedTuple):
    """The map from the head's products ``z`` to logits: ``scale * soft_cap * tanh(z / soft_cap)``."""

    scale: float = 1.0
    soft_cap: float | None = None
    """Bound of the logits before scaling; None: the logits are ``scale * z``."""

    def apply(self, products: Tensor) -> Tensor:
        """Map the head's products to logits."""
        capped = products if self.soft_cap is None else self.soft_cap * (products / self.soft_cap).tanh()
        return self.scale * capped


def find_logit_map(model: PreTrainedModel, dtype: torch.dtype) -> LogitMap | None:
    """Find out how logits follow from a linear layer on the last hidden states; None if the way is unknown.

    The settings of the configuration (those of Gemma, Cohere and Granite) are used if they give the model's own logits.
    ``dtype``: that of matrix products, which autocast may choose below that of the weights.
    """
    config = model.config.get_text_config().to_dict()
    scale = config.get("logit_scale") or 1 / (config.get("logits_scaling") or 1)
    stated = LogitMap(scale, config.get("final_logit_softcapping"))
    probe = collate([make_probe_sample((2, 1, 3), (0, 1, 2, 3))], [(0,)], model.device)
    with torch.no_grad():
        weight, bias = head_weights(model)
        weight = weight.to(dtype).float()
        hidden = hidden_states(model, probe).to(dtype).float()
        with torch.autocast(model.device.type, enabled=False):  # a soft cap would enlarge a rounding
            products = nn.functional.linear(hidden, weight, None if bias is None else bias.to(dtype).float())
        logits = token_logits(model, probe).float()
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    agrees = torch.allclose(stated.apply(products), logits, rtol=tolerance, atol=tolerance)
    return stated if agrees else None


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the positions of tokens can be chosen. ALiBi and recurrent states count them from the left end."""
    has_alibi = model.config.get_text_config().to_dict().get("alibi")
    return "position_ids" in inspect.signature(model.forward).parameters and not has_alibi


def can_share_prompts(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether completions of one prompt may share a row: every layer of the model respects the mask and the positions.

    ``dtype``: that of matrix products, which autocast may choose below that of the weights.

    Rounding differs between rows with and without a mask, and grows with every layer: by some percent in half precision
    on a GPU, and to 4e-3 in float32 with SmolLM2, whose states reach 30. Instead of a fixed tolerance, the states of a
    shared row must be several times as near to those of single rows as the states that are computed without the mask,
    or without the positions. Models with attention of their own ("eager") keep a row's scores, which grow with the
    square of its length, and may have windows under any name.
    """
    text = model.config.get_text_config()
    config = text.to_dict()
    layer_types = config.get("layer_types") or ()
    if (
        not takes_positions(model)
        # private: transformers 5.19 has a public function to set the attention, but none to read it
        or text._attn_implementation == "eager"
        or config.get("sliding_window") is not None
        or any(kind != "full_attention" for kind in layer_types)
    ):
        return False
    probes = [make_probe_sample((2, 1, 3), completion) for completion in ((0, 1, 2, 3), (0, 1, 2))]
    with torch.no_grad():
        apart = torch.cat([hidden_states(model, collate(probes, [(i,)], model.device)) for i in range(2)])
        batch = collate(probes, [(0, 1)], model.device)
        together = hidden_states(model, batch)
        # Written out, because OPT counts positions that it is not given in a mask of another form.
        from_the_left = torch.arange(batch.input_ids.shape[1], device=model.device)[None]  # (1, L)
        faulty = (replace(batch, segments=None), replace(batch, position_ids=from_the_left))
        smallest = min(float((hidden_states(model, fault) - apart).norm()) for fault in faulty)
    # In float32 a fault of one layer among many can be told from rounding, too.
    dtypes = {parameter.dtype for parameter in model.parameters()} | {dtype}
    nearer = 20 if dtypes == {torch.float32} else 2
    return nearer * float((together - apart).norm()) < smallest
