"""Micro-batches that fit into GPU memory: halved when it runs out, for this update and later ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from magrpo.config.sections import OptimConfig
from magrpo.model.collate import Row, plan_batches
from magrpo.model.policy import Policy
from magrpo.process.faults import is_out_of_memory
from magrpo.types import Sample
from magrpo.updates.agent_batch import AgentBatch
from magrpo.updates.lanes import Ranks

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class MicroBatchTooLarge(RuntimeError):
    """A rank that shares models with others ran out of memory; all begin again with ``tokens_to_try`` a micro-batch."""

    def __init__(self, tokens_to_try: int) -> None:
        super().__init__(f"out of memory; the next micro-batches to try have {tokens_to_try} tokens")
        self.tokens_to_try = tokens_to_try

    def __reduce__(self) -> tuple[type[MicroBatchTooLarge], tuple[int]]:
        return type(self), (self.tokens_to_try,)


class MemoryFitter:
    """Plans micro-batches, and plans smaller ones when a computation runs out of GPU memory."""

    def __init__(self, policy: Policy, optim: OptimConfig, ranks: Ranks, shares_prompts: Mapping[str, bool]) -> None:
        self.micro_batch_tokens = optim.count_micro_batch_tokens(policy.device.type)
        """Largest number of tokens in a micro-batch, padding included. Lowered when memory runs out."""
        self._policy, self._num_lanes, self._ranks = policy, optim.lanes, ranks
        self._shares_prompts = shares_prompts

    def plan_micro_batches(self, agent: str, samples: Sequence[Sample]) -> list[list[Row]]:
        """Split the samples of an agent into micro-batches of at most ``micro_batch_tokens`` tokens."""
        return self._plan(agent, samples, self.micro_batch_tokens)

    def fit_memory(
        self, batches: Sequence[AgentBatch], compute: Callable[[Sequence[AgentBatch]], ResultT]
    ) -> tuple[Sequence[AgentBatch], ResultT]:
        """Call ``compute``, and repeat it with smaller micro-batches as long as a rank runs out of GPU memory.

        Returns the batches and the result of the successful attempt. Gradients are the same up to rounding.

        Raises:
            MicroBatchTooLarge: models are spread over ranks, which must begin the update again: they cannot agree to
                repeat a pass, because the other ranks wait inside it.
            torch.cuda.OutOfMemoryError: one completion does not fit.
        """
        while True:
            results: list[ResultT] = []
            try:
                results.append(compute(batches))
            except RuntimeError as error:
                if not is_out_of_memory(error) or all(batch.is_smallest for batch in batches):
                    raise
                if self._policy.shards:
                    raise MicroBatchTooLarge(self._find_smaller(batches)) from error
            # Outside the except block, in which the exception would keep the tensors of its frames alive.
            if self._ranks.all_agree(bool(results)):
                return batches, results[0]
            results.clear()
            for batch in batches:
                self._policy.clear_gradients(batch.agent)
            torch.cuda.empty_cache()
            self.micro_batch_tokens = self._find_smaller(batches)
            batches = [
                replace(batch, micro_batches=self.plan_micro_batches(batch.agent, batch.samples)) for batch in batches
            ]
            agents = ", ".join(f"agent {batch.agent!r}" for batch in batches)
            log.warning(
                f"update {self._policy.version + 1}, {agents}: out of GPU memory; continuing with "
                f"micro-batches of {self.micro_batch_tokens} tokens. "
                f"Set optim.micro_batch_tokens = {self.micro_batch_tokens} to start with them"
            )

    def _plan(self, agent: str, samples: Sequence[Sample], tokens: int) -> list[list[Row]]:
        if self._num_lanes > 1:
            # A micro-batch larger than a lane's share would leave a lane idle.
            total = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
            tokens = min(tokens, max(total // self._num_lanes, 1))
        return plan_batches(samples, tokens, self._shares_prompts[agent])

    def _find_smaller(self, batches: Sequence[AgentBatch]) -> int:
        """Halve the present size until some micro-batch changes; returns that size in tokens."""
        tokens = self.micro_batch_tokens
        while True:
            tokens = max(tokens // 2, 1)
            if any(self._plan(batch.agent, batch.samples, tokens) != batch.micro_batches for batch in batches):
                return tokens
