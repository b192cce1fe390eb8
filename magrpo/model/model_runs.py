"""Running the models of agents on micro-batches, to compute a loss from their hidden states or logits."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from magrpo.algo.loss import LossOf
from magrpo.model.collate import Batch
from magrpo.model.forward import (
    LogitMap,
    can_share_prompts,
    checkpoint_layers,
    find_logit_map,
    head_weights,
    hidden_states,
    token_logits,
)
from magrpo.model.policy import Policy
from magrpo_kernels import LossOptions, PolicyLoss, TokenInputs, group_policy_loss, policy_loss_from_logits

ModelContext = AbstractContextManager[PreTrainedModel]
"""The context manager ``Policy.active`` or ``Policy.reference`` for an agent."""
ResultT = TypeVar("ResultT")
log = logging.getLogger(__name__)


class ModelRuns:
    """Runs the models of a policy by the fastest way that each allows: from hidden states, with shared rows."""

    def __init__(self, policy: Policy, *, gradient_checkpointing: bool) -> None:
        self._policy, self._gradient_checkpointing = policy, gradient_checkpointing
        self.logit_maps: dict[str, LogitMap | None] = {}
        """How logits follow from hidden states, for each agent that was probed; None: it is not known."""
        self.shares_prompts: dict[str, bool] = {}
        """Whether completions of one prompt may share a row, for each agent that was probed."""

    def probe_model(self, agent: str) -> None:
        """Find out which of the ways the model of an agent allows. Call it before the first run."""
        with self._policy.active(agent) as model:
            if self._gradient_checkpointing:
                checkpoint_layers(model)
            dtype = self._policy.dtype
            self.logit_maps[agent] = self._policy.run(model, partial(find_logit_map, dtype=dtype))
            self.shares_prompts[agent] = self._policy.run(model, partial(can_share_prompts, dtype=dtype))
        rows = "share a row" if self.shares_prompts[agent] else "have a row each"
        log.info("agent %s: completions of one prompt %s in the update", agent, rows)

    def run_model(
        self, agent: str, context: ModelContext, batch: Batch, finish: Callable[[LossOf], ResultT]
    ) -> ResultT:
        """Run a model, then call ``finish`` with the loss as a function of the inputs of the tokens.

        The loss starts from the hidden states (N, D), in the dtype of matrix products, if it is known how logits follow
        from them, else from the logits.
        """

        def compute(model: PreTrainedModel) -> ResultT:
            if logit_map := self.logit_maps[agent]:
                weight, bias = head_weights(model)
                dtype = self._policy.dtype
                hidden = hidden_states(model, batch).to(dtype)
                bias = None if bias is None else bias.to(dtype)
                loss_of: LossOf = partial(self._loss_from_hidden, logit_map, hidden, weight.to(dtype), bias)
            else:
                loss_of = partial(policy_loss_from_logits, token_logits(model, batch))
            with torch.autocast(self._policy.device.type, enabled=False):
                return finish(loss_of)

        with context as model:
            return self._policy.run(model, compute)

    @torch.no_grad()
    def compute_logps(
        self, agent: str, context: ModelContext, batch: Batch, options: LossOptions
    ) -> Float[Tensor, " N"]:
        """The log-probabilities of the sampled tokens, without gradient."""
        tokens = batch.tokens
        inputs = TokenInputs(tokens.token_ids, tokens.sample_weights, tokens.advantages, support=tokens.support)
        return self.run_model(agent, context, batch, lambda loss_of: loss_of(inputs, options).logps)

    def _loss_from_hidden(
        self,
        logit_map: LogitMap,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: TokenInputs,
        options: LossOptions,
    ) -> PolicyLoss:
        """The loss of a model with this logit map. Scaling logits by a factor divides the temperature by it."""
        options = replace(
            options,
            temperature=options.temperature / logit_map.scale,
            soft_cap=logit_map.soft_cap,
            float32_logits=self._policy.lineup.float32_logits,
        )
        return group_policy_loss(hidden, weight, inputs, options, bias=bias)
