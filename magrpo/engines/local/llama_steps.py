"""One decoding step of Llama and Qwen2 models on a CPU, without calls of modules: small models spend as long on those
as on products. The same operations in the same order, so the same bits as the model's own forward pass.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

Step = Callable[[Int[Tensor, " n"], Int[Tensor, " n"], Bool[Tensor, "n S"] | None, Cache], Float[Tensor, "n V"]]
"""Logits of the next tokens from the last tokens, their positions, which slots of the cache hold tokens (None: all,
else the new ones included) and the cache, which takes the new keys and values."""


class _Linear(Protocol):
    weight: Tensor
    bias: Tensor | None


def make_step(model: PreTrainedModel) -> Step:
    """The step of a causal language model in eval mode: without its modules where these do nothing else."""
    return _LlamaStep(model) if _is_plain(model) else ModuleStep(model)


class ModuleStep:
    """The step of any model, through its own forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        output = self._model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits: Tensor = output.logits
        return logits[:, -1]


def _is_plain(model: PreTrainedModel) -> bool:
    """Whether the model is as transformers defines it: float32 on a CPU, full attention, plain linear layers."""
    if type(model) not in (LlamaForCausalLM, Qwen2ForCausalLM) or torch.is_autocast_enabled("cpu"):
        return False
    config: Any = model.config
    leaves = [module for module in model.modules() if not list(module.children())]
    rotary: Any = model.base_model.rotary_emb
    kinds = (nn.Linear, nn.Embedding, SiLUActivation, LlamaRMSNorm, Qwen2RMSNorm, type(rotary))
    layer_types = config.to_dict().get("layer_types") or ()
    return (
        {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}
        and all(type(module) in kinds for module in leaves)
        and config._attn_implementation == "sdpa"
        and config.hidden_act == "silu"
        and all(kind == "full_attention" for kind in layer_types)
    )


class _LlamaStep:
    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.base_model
        self._base = base
        self._head: _Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._sizes = [(layer.self_attn.head_dim, layer.self_attn.num_key_value_groups) for layer in base.layers]

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        base = self._base
        rows = len(tokens)
        states = functional.embedding(tokens, base.embed_tokens.weight)  # (n, D)
        cos: Tensor
        sin: Tensor
        cos, sin = base.rotary_emb(states[:, None], positions[:, None])  # (n, 1, size)
        half = cos.shape[-1] // 2
        # x * cos + (-x2, x1) * sin, with the sign on the sine.
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[:, None]
        cos = cos[:, None]  # (n, 1, 1, size), for all heads
        seen = None if mask is None else mask[:, None, None]

        def rotate(heads: Tensor) -> Tensor:
            return heads.mul(cos).add_(heads.roll(half, -1).mul_(sin))

        for number, (layer, (size, groups)) in enumerate(zip(base.layers, self._sizes, strict=True)):
            attention, mlp = layer.self_attn, layer.mlp
            normed = _normalize(states, layer.input_layernorm)
            shape = (rows, -1, 1, size)  # (n, heads, 1, size)
            queries, keys, values = (
                _apply(linear, normed).view(shape) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            keys, values = cache.update(rotate(keys), values, number)
            mixed = functional.scaled_dot_product_attention(
                rotate(queries), keys, values, attn_mask=seen, scale=attention.scaling, enable_gqa=groups > 1
            )
            states = states + _apply(attention.o_proj, mixed.view(rows, -1))
            normed = _normalize(states, layer.post_attention_layernorm)
            gated = functional.silu(_apply(mlp.gate_proj, normed)).mul_(_apply(mlp.up_proj, normed))
            states = states + _apply(mlp.down_proj, gated)
        return _apply(self._head, _normalize(states, base.norm))


def _apply(linear: _Linear, inputs: Tensor) -> Tensor:
    return functional.linear(inputs, linear.weight, linear.bias)


def _normalize(states: Tensor, norm: LlamaRMSNorm | Qwen2RMSNorm) -> Tensor:
    variance = states.pow(2).mean(-1, keepdim=True)
    return (states * torch.rsqrt(variance + norm.variance_epsilon)).mul_(norm.weight)
