"""One decoding step of Llama and Qwen2 models on a CPU, without calls of modules.

In a small model those calls take as long as the matrix products. Siblings read the keys and values of their prompt
together; everything else is computed as the model does.

Shapes: n live rows of P prompts; H heads of keys, each for g queries, of size E; W slots for a prompt; T new tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from magrpo.engines.local.steps import CacheLayer, DecodingStep, Prompts, attends_fully, drop_rows
from magrpo.model.rounding import RoundedLinear

KNOWN_MODELS = (LlamaForCausalLM, Qwen2ForCausalLM)


def is_plain_llama(model: PreTrainedModel) -> bool:
    """Whether the model is as transformers defines it, but for linear layers: float32 on a CPU, full attention."""
    if type(model) not in KNOWN_MODELS or torch.is_autocast_enabled("cpu"):
        return False
    config: Any = model.config
    leaves = [module for name, module in model.named_modules() if not (list(module.children()) or ".lora_" in name)]
    rotary: Any = model.base_model.rotary_emb
    kinds = (nn.Linear, RoundedLinear, nn.Embedding, SiLUActivation, LlamaRMSNorm, Qwen2RMSNorm, type(rotary))
    return (
        model.device.type == "cpu"
        and all(type(module) is RoundedLinear or _is_float32(module) for module in leaves)
        and all(type(module) in kinds for module in leaves)
        and attends_fully(model)
        and config.hidden_act == "silu"
    )


def _is_float32(module: nn.Module) -> bool:
    return all(parameter.dtype == torch.float32 for parameter in module.parameters())


class LlamaStep(DecodingStep):
    """The step of a model that :func:`is_plain_llama`."""

    def __init__(self, model: PreTrainedModel, prompts: Prompts, room: int) -> None:
        base: Any = model.base_model
        self._base = base
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._past = [_Past(*states, prompts.parents, room) for states in prompts.states]
        self._siblings = _SiblingTable(prompts.mask, prompts.parents)

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        base = self._base
        states = functional.embedding(tokens, base.embed_tokens.weight)  # (n, D)
        cos: Tensor
        sin: Tensor
        cos, sin = base.rotary_emb(states[:, None], positions[:, None])  # (n, 1, size)
        half = cos.shape[-1] // 2
        # x * cos + (-x2, x1) * sin, with the sign on the sine.
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)

        def rotate(heads: Tensor) -> Tensor:
            return heads.mul(cos).add_(heads.roll(half, -1).mul_(sin))

        for layer, past in zip(base.layers, self._past, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            normed = _normalize(states, layer.input_layernorm)
            shape = (len(tokens), -1, attention.head_dim)  # (n, heads, size)
            queries, keys, values = (
                _apply(linear, normed).view(shape) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            queries = rotate(queries).mul_(attention.scaling)
            mixed = past.attend(self._siblings, queries, rotate(keys), values)
            states = states + _apply(attention.o_proj, mixed.view(len(tokens), -1))
            normed = _normalize(states, layer.post_attention_layernorm)
            gated = functional.silu(_apply(mlp.gate_proj, normed)).mul_(_apply(mlp.up_proj, normed))
            states = states + _apply(mlp.down_proj, gated)
        return _apply(self._head, _normalize(states, base.norm))

    def drop_rows(self, over: Tensor) -> Tensor:
        rows = drop_rows([past.own for past in self._past], over)
        mask, parents = self._siblings.mask, self._siblings.parents[rows]
        alive = torch.unique(parents)
        if len(alive) <= len(mask) / 2:  # seldom, because this copies
            mask = mask[alive]
            parents = torch.searchsorted(alive, parents)
            for past in self._past:
                past.keys, past.values = past.keys[alive], past.values[alive]
        self._siblings = _SiblingTable(mask, parents)
        return rows


class _SiblingTable:
    """The place of each live row in a table with P prompts by G siblings or fewer."""

    def __init__(self, mask: Tensor, parents: Tensor) -> None:
        self.mask, self.parents = mask, parents  # (P, W), (n,)
        self._padding = ~mask[:, None, None]
        self._ranks = (parents[:, None] == parents).tril(-1).sum(-1)  # (n,) number of siblings before each row
        self._most = max(self._ranks.tolist(), default=0) + 1  # largest number of siblings of one prompt

    def score_keys(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Multiply each row's queries (n, H, g, E) by the keys (P, H, W, E) of its prompt; return (n, H, g, W)."""
        scores = (self._spread(queries) @ keys.mT).masked_fill_(self._padding, -torch.inf)
        return self._collect(scores, queries.shape[2])

    def mix_values(self, shares: Tensor, values: Tensor) -> Tensor:
        """Sum the values (P, H, W, E) of each row's prompt, weighted by its shares (n, H, g, W), to (n, H, g, E)."""
        return self._collect(self._spread(shares) @ values, shares.shape[2])

    def _spread(self, of_rows: Tensor) -> Tensor:
        """Arrange values of the rows (n, H, g, any) in a table (P, H, G * g, any) that is 0 elsewhere."""
        _, heads, groups, size = of_rows.shape
        table = of_rows.new_zeros(len(self.mask), heads, self._most, groups, size)
        table[self.parents, :, self._ranks] = of_rows
        return table.flatten(2, 3)

    def _collect(self, table: Tensor, groups: int) -> Tensor:
        """Invert :meth:`_spread`."""
        return table.view(*table.shape[:2], -1, groups, table.shape[3])[self.parents, :, self._ranks]


class _Past:
    """Keys and values of one layer: of the prompts (P, H, W, E), and of the tokens that the rows added (n, H, T, E)."""

    def __init__(self, keys: Tensor, values: Tensor, parents: Tensor, room: int) -> None:
        self.keys, self.values = keys, values
        self.own = CacheLayer(keys[parents, :, :0], values[parents, :, :0], room)

    def attend(self, siblings: _SiblingTable, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with scaled queries (n, H * g, E), adding the rows' keys and values (n, H, E); return (n, H, g, E)."""
        own_keys, own_values = self.own.update(keys[:, :, None], values[:, :, None])  # (n, H, T, E)
        queries = queries.view(*keys.shape[:2], -1, keys.shape[2])  # (n, H, g, E)
        shares = torch.cat([siblings.score_keys(queries, self.keys), queries @ own_keys.mT], dim=-1).softmax(-1)
        of_prompt, of_own = shares.tensor_split([self.keys.shape[2]], dim=-1)
        return siblings.mix_values(of_prompt, self.values).add_(of_own @ own_values)


def _apply(linear: nn.Module, inputs: Tensor) -> Tensor:
    if type(linear) is nn.Linear:
        return functional.linear(inputs, linear.weight, linear.bias)
    product: Tensor = linear(inputs)
    return product


def _normalize(states: Tensor, norm: LlamaRMSNorm | Qwen2RMSNorm) -> Tensor:
    variance = states.pow(2).mean(-1, keepdim=True)
    return (states * torch.rsqrt(variance + norm.variance_epsilon)).mul_(norm.weight)
