"""One decoding step on a GPU as one launch, where the modules of a model launch their kernels one by one from Python.

A CUDA graph repeats what it captured, on the same memory. So nothing here changes its shape: each step reads the keys
and values of all tokens that there is room for, and a mask hides those that are not written yet. Rows that are finished
are computed on, and their logits dropped.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache, LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from magrpo.engines.local.steps import CacheLayer, DecodingStep, Prompts, attends_fully, drop_rows

CAPTURED_MODELS = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Families whose forward pass never waits for the GPU, as a capture demands."""


def can_capture(model: PreTrainedModel) -> bool:
    """Whether the model's step can be a CUDA graph: one of :data:`CAPTURED_MODELS`, on CUDA, with full attention.

    Rotary embeddings that grow with the length of the text compare it on the GPU and wait for the result.
    """
    if model.device.type != "cuda" or type(model) not in CAPTURED_MODELS or not attends_fully(model):
        return False
    embedding: Any = model.base_model.rotary_emb
    return embedding.rope_type not in ("dynamic", "longrope")


class CapturedStep(DecodingStep):
    """The step of a model that :func:`can_capture`: the first call captures it. On a CPU it runs uncaptured."""

    def __init__(self, model: PreTrainedModel, prompts: Prompts, room: int) -> None:
        self._model, parents = model, prompts.parents
        self._next = prompts.mask.shape[1]
        self._slot = parents.new_zeros(1)
        self._tokens, self._positions = (parents.new_zeros(len(parents), 1) for _ in range(2))
        written = prompts.mask[parents]
        self._mask = torch.cat([written, written.new_zeros(len(written), room)], dim=1)[:, None, None]  # (B, 1, 1, W+T)
        self._layers = [_FixedLayer(*states, parents, room, self._slot) for states in prompts.states]
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        count = len(tokens)
        self._tokens[:count, 0], self._positions[:count, 0] = tokens, positions
        self._slot.fill_(self._next)
        self._mask[..., self._next] = True
        self._next += 1
        if not tokens.is_cuda:
            return self._run()[:count]
        self._captured = self._captured or self._capture()
        graph, logits = self._captured
        graph.replay()
        return logits[:count]

    def _run(self) -> Tensor:
        output = self._model(
            input_ids=self._tokens,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=Cache(layers=[*self._layers]),
            use_cache=True,
        )
        logits: Tensor = output.logits
        return logits[:, -1]

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture the step; return its graph, and the logits that every replay overwrites."""
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # All threads share the copies of weights that autocast keeps, and an update on another thread frees them as it
        # leaves autocast. So the graph makes copies of its own, in memory that belongs to it.
        rounds, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        with torch.autocast("cuda", dtype=dtype, enabled=rounds, cache_enabled=False):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._run()  # libraries allocate their workspaces, which a capture forbids
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                logits = self._run()
        return graph, logits

    def drop_rows(self, over: Tensor) -> Tensor:
        rows = drop_rows(self._layers, over)
        self._mask[: len(rows)] = self._mask[rows]
        return rows


class _FixedLayer(CacheLayer):  # type: ignore[no-untyped-call]
    """Writes new keys and values at ``slot`` (1,), and returns those of all slots."""

    def __init__(self, keys: Tensor, values: Tensor, parents: Tensor, room: int, slot: Int[Tensor, "1"]) -> None:
        super().__init__(keys[parents], values[parents], room)
        # A hidden slot has a weight of 0 in the attention, and 0 times what memory held before might be nan.
        self.keys[:, :, self.length :] = 0
        self.values[:, :, self.length :] = 0
        self.length += room
        self._slot = slot

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        # Under autocast the tensors of a prompt can have another precision than those of the next token.
        self.keys.index_copy_(2, self._slot, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self._slot, value_states.to(self.values.dtype))
        return self.keys, self.values
