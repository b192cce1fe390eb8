"""Runs of agents' models on micro-batches, whose hidden states or logits a loss starts from."""

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
"""A policy's ``active`` or ``reference`` of an agent."""
ResultT = TypeVar("ResultT")
log = logging.getLogger(__name__)


class ModelRuns:
    """Runs the models of a policy as they allow: from their hidden states, with completions that share a row."""

    def __init__(self, policy: Policy, *, gradient_checkpointing: bool = False) -> None:
        self._policy, self._gradient_checkpointing = policy, gradient_checkpointing
        self._logit_maps: dict[str, LogitMap | None] = {}
        self.shares_prompts: dict[str, bool] = {}
        """Whether completions of one prompt may share a row, by agent that :meth:`probe_model` was called for."""

    def probe_model(self, agent: str) -> None:
        """Find out what the model of an agent allows; before the first run."""
        with self._policy.active(agent) as model:
            if self._gradient_checkpointing:
                checkpoint_layers(model)
            self._logit_maps[agent] = self._policy.run(model, find_logit_map)
            self.shares_prompts[agent] = self._policy.run(model, can_share_prompts)
        rows = "share a row" if self.shares_prompts[agent] else "have a row each"
        log.info("agent %s: completions of one prompt %s in the update", agent, rows)

    def run_model(
        self, agent: str, context: ModelContext, batch: Batch, finish: Callable[[LossOf], ResultT]
    ) -> ResultT:
        """Run a model, then ``finish``, which is given the loss as a function of the tokens' inputs.

        Where it is known how logits follow from hidden states (N, D), it starts from these, in the dtype of matrix
        products.
        """

        def compute(model: PreTrainedModel) -> ResultT:
            if logit_map := self._logit_maps[agent]:
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
        """The log-probabilities of the sampled tokens."""
        tokens = batch.tokens
        inputs = TokenInputs(tokens.token_ids, torch.ones_like(tokens.sampling_logps), support=tokens.support)
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
        """The loss of a model with this map; a scale of logits is one over a scale of the temperature."""
        options = replace(
            options,
            temperature=options.temperature / logit_map.scale,
            soft_cap=logit_map.soft_cap,
            float32_logits=self._policy.lineup.float32_logits,
        )
        return group_policy_loss(hidden, weight, inputs, options, bias=bias)
