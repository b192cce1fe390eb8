"""Gradients of the policy loss over one agent's micro-batches.

On a CPU, adapters are trained side by side: threads, each with a share of the cores, take micro-batches of all agents.
An update can be split over ranks, each of which computes some of the (agent, lane) pairs (:mod:`magrpo.updates.lanes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor

from magrpo.algo.loss import LossOf, policy_loss
from magrpo.config.sections import AlgoConfig, OptimConfig, RolloutConfig
from magrpo.model.collate import Batch, collate, count_padded
from magrpo.model.model_runs import ModelContext, ModelRuns
from magrpo.model.policy import Policy
from magrpo.model.side_by_side import Stop, count_updated_at_once, run_side_by_side
from magrpo.updates.agent_batch import (
    AgentBatch,
    CompletionCounter,
    OrderedGradient,
    PartialSums,
    list_sums,
    uses_ratio,
)
from magrpo.updates.lanes import LanePlan, Ranks, add_in_pairs, deal_batches, put_gradient, take_gradient
from magrpo_kernels import LossOptions

ResultT = TypeVar("ResultT")
Constants = dict[str, Sequence[Tensor]]
"""Tensors without gradient, keyed by field of ``SampledTokens``, one for each completion: micro-batches may change."""


@dataclass(frozen=True, slots=True)
class _AgentPass:
    """One forward and backward pass over the micro-batches of an agent: what all of them take, and what they fill."""

    batch: AgentBatch
    constants: Constants
    sums: PartialSums
    counter: CompletionCounter


@dataclass(eq=False)
class GradientComputer:
    """Runs the models of trained agents forward and backward, and leaves gradients in their parameters."""

    policy: Policy
    algo: AlgoConfig
    optim: OptimConfig
    rollout: RolloutConfig
    agents: Sequence[str]
    """The holders of trained weights."""
    ranks: Ranks
    lag: int

    def __post_init__(self) -> None:
        self._logps_options = LossOptions(self.rollout.temperature, impl=self.algo.kernel)
        self._loss_options = replace(
            self._logps_options,
            importance_cap=self.algo.importance_cap,
            backward_once=True,
        )
        if uses_ratio(self.algo):
            clip_low, clip_high = self.algo.clip_low, self.algo.clip_high
            self._loss_options = replace(self._loss_options, clip_low=clip_low, clip_high=clip_high)
        self.sum_names = list_sums(self.algo, self.lag)
        """Names of the rows of :attr:`PartialSums.sums`."""
        self.models = ModelRuns(self.policy, gradient_checkpointing=self.optim.gradient_checkpointing)
        for agent in self.agents:
            self.models.probe_model(agent)
        self._plan = LanePlan.make(self.optim.lanes, len(self.agents), self.ranks.count)
        self._position = {agent: i for i, agent in enumerate(self.agents)}
        self._num_threads = torch.get_num_threads()
        trained = [self.policy.lineup.config(agent) for agent in self.agents]
        self.at_once = 1
        if self.policy.shares_no_modules:
            self.at_once = count_updated_at_once(trained, self.policy.device.type, self._num_threads)
        """Number of agents that share the cores at a time, each with one thread or more."""

    @property
    def num_agents_together(self) -> int:
        """Number of agents whose gradients are computed at the same time."""
        shares_cores = self.at_once > 1 and self.ranks.count == 1
        return len(self.agents) if shares_cores else self._plan.agents_at_once

    # --------------------------------------------------------------------------------------------------- gradients
    def compute_gradients(
        self, constants: Mapping[str, Constants], counter: CompletionCounter, batches: Sequence[AgentBatch]
    ) -> list[PartialSums]:
        """Run one forward and backward pass over the micro-batches of this rank; :meth:`add_ranks` adds other ranks.

        ``constants`` holds the tensors of each agent that no pass changes, such as reference log-probabilities.
        """
        counter.restart()
        passes = [_AgentPass(batch, constants[batch.agent], self._allocate_sums(batch), counter) for batch in batches]
        tasks: list[Callable[[Stop], None]] = []
        for one in passes:
            agent, num_batches = one.batch.agent, len(one.batch.micro_batches)
            self.policy.clear_gradients(agent)
            if self.at_once > 1 and self._plan.is_trivial:
                add = OrderedGradient(list(self.policy.parameters(agent).values())).add
                numbers = iter(range(num_batches))  # shared: each number goes to the task that asks first
                run = partial(self._run_micro_batches, one, numbers, add)
                tasks += [run] * min(self.at_once, num_batches)
            else:
                tasks.append(partial(self._sum_lanes, one))
        self._run_tasks(tasks)
        for idle in self._idle_micro_batches(batches):
            loss, _, _ = self.compute_loss(batches[0], idle, constants[batches[0].agent])
            (loss * 0).backward()  # type: ignore[no-untyped-call]  # other ranks wait for this backward pass, too
        for batch in batches:
            if not self._is_summed_in_place(batch.agent):
                self.policy.clear_gradients(batch.agent)
        return [one.sums for one in passes]

    def add_ranks(self, batch: AgentBatch, part: PartialSums) -> Tensor:
        """Put the gradient of all lanes into the parameters; return the sums of all micro-batches."""
        if not self._is_summed_in_place(batch.agent):
            parameters = list(self.policy.parameters(batch.agent).values())
            owners = self._plan.find_owners(self._position[batch.agent])
            size = sum(parameter.numel() + 1 for parameter in parameters)
            put_gradient(self.ranks.add_branches(part.branch, owners, size), parameters)
        return self.ranks.fill_in(part.sums)

    def compute_loss(
        self, batch: AgentBatch, micro_batch: Batch, constants: Constants
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The loss, sums for the metrics, and the log-probabilities of the sampled tokens."""
        joined: dict[str, Any] = {
            name: torch.cat([by_sample[i] for i in micro_batch.samples]) for name, by_sample in constants.items()
        }
        if batch.groups is not None:
            samples = [i for i in micro_batch.samples for _ in batch.samples[i].completion_ids]
            joined["groups"] = batch.groups.select_tokens(torch.tensor(samples, device=self.policy.device))
        if self.algo.ratio == "sequence":
            lengths = [batch.lengths[i] for i in micro_batch.samples]
            joined["lengths"] = torch.tensor(lengths, device=self.policy.device)
        tokens = replace(micro_batch.tokens, **joined)

        def finish(loss_of: LossOf) -> tuple[Tensor, dict[str, Tensor], Tensor]:
            return policy_loss(loss_of, tokens, self._loss_options, batch.divisor, self.algo.beta)

        return self.models.run_model(batch.agent, self.policy.active(batch.agent), micro_batch, finish)

    def _allocate_sums(self, batch: AgentBatch) -> PartialSums:
        device = self.policy.device
        sums = torch.zeros(len(self.sum_names), len(batch.micro_batches), device=device)
        return PartialSums(sums, torch.zeros(sum(batch.lengths), device=device))

    def _run_micro_batches(
        self, one: _AgentPass, numbers: Iterator[int], add: Callable[[int, Tensor], None], stop: Stop
    ) -> None:
        """Compute the micro-batches in ``numbers``, which threads may share, and ``add`` the gradient of each."""
        batch, part = one.batch, one.sums
        for number in takewhile(lambda _: not stop(), numbers):
            micro_batch = collate(batch.samples, batch.micro_batches[number], self.policy.device)
            loss, metrics, sampled = self.compute_loss(batch, micro_batch, one.constants)
            add(number, loss)
            values = {"clipped": torch.zeros_like(loss), **metrics, "loss": loss.detach()}
            part.sums[:, number] = torch.stack([values[name] for name in self.sum_names])
            batch.put_values(part.logps, micro_batch.samples, sampled)
            one.counter.add(len(micro_batch.samples))

    def _sum_lanes(self, one: _AgentPass, stop: Stop) -> None:
        """Sum the gradient over the lanes of this rank."""
        lanes = self._lanes_of(one.batch, self.ranks.number)
        if self._is_summed_in_place(one.batch.agent):
            self._run_micro_batches(one, chain.from_iterable(lanes), _run_backward, stop)
            return
        parameters = list(self.policy.parameters(one.batch.agent).values())

        def take_lane(lane: Sequence[int]) -> Tensor:
            self._run_micro_batches(one, iter(lane), _run_backward, stop)
            return take_gradient(parameters)

        if lanes:
            one.sums.branch = add_in_pairs(map(take_lane, lanes))

    def _is_summed_in_place(self, agent: str) -> bool:
        """Whether the backward pass alone sums the gradient: one lane on one rank, or FSDP, which adds over ranks."""
        return self._plan.is_trivial or self.policy.is_spread(agent)

    # ------------------------------------------------------------------------------------------ log-probabilities
    def compute_reference(self, batches: Sequence[AgentBatch]) -> list[Tensor]:
        """Log-probabilities of each agent's sampled tokens under its reference; 0 where another rank computes them."""
        return self._compute_logps(self.policy.reference, batches)

    def compute_current(self, batches: Sequence[AgentBatch]) -> list[Tensor]:
        """As :meth:`compute_reference`, under the present weights."""
        return self._compute_logps(self.policy.active, batches)

    def _compute_logps(self, context_of: Callable[[str], ModelContext], batches: Sequence[AgentBatch]) -> list[Tensor]:
        tables = self._run_tasks([partial(self._compute_batch_logps, context_of, batch) for batch in batches])
        for idle in self._idle_micro_batches(batches):
            agent = batches[0].agent
            self.models.compute_logps(agent, context_of(agent), idle, self._logps_options)
        return tables

    def share_logps(self, batch: AgentBatch, table: Tensor) -> Sequence[Tensor]:
        """The log-probabilities that all ranks have computed, one tensor for each completion."""
        return torch.split(self.ranks.fill_in(table), batch.lengths)

    def _compute_batch_logps(self, context_of: Callable[[str], ModelContext], batch: AgentBatch, stop: Stop) -> Tensor:
        table = torch.zeros(sum(batch.lengths), device=self.policy.device)
        lanes = self._lanes_of(batch, self.ranks.number)
        for number in takewhile(lambda _: not stop(), chain.from_iterable(lanes)):
            micro_batch = collate(batch.samples, batch.micro_batches[number], self.policy.device)
            logps = self.models.compute_logps(batch.agent, context_of(batch.agent), micro_batch, self._logps_options)
            batch.put_values(table, micro_batch.samples, logps)
        return table

    # -------------------------------------------------------------------------------------------------- lanes, threads
    def _lanes_of(self, batch: AgentBatch, rank: int) -> list[list[int]]:
        """The numbers of the micro-batches in each lane of the agent that ``rank`` computes."""
        sizes = [count_padded(batch.samples, rows) for rows in batch.micro_batches]
        lanes = deal_batches(sizes, self._plan.num_lanes)
        return [lanes[lane] for lane in self._plan.lanes_of(self._position[batch.agent], rank)]

    def _idle_micro_batches(self, batches: Sequence[AgentBatch]) -> Iterator[Batch]:
        """Micro-batches of one sample that this rank computes without effect, once it has none of its own left.

        All ranks must run a spread model equally often: each forward pass waits for the others' weights.
        """
        if not self.policy.shards or not batches:
            return
        counts = [
            sum(len(lane) for batch in batches for lane in self._lanes_of(batch, rank))
            for rank in range(self.ranks.count)
        ]
        samples = batches[0].samples
        shortest = min(range(len(samples)), key=lambda i: len(samples[i].prompt_ids) + len(samples[i].completion_ids))
        for _ in range(max(counts) - counts[self.ranks.number]):
            yield collate(samples, [(shortest,)], self.policy.device)

    def _run_tasks(self, tasks: Sequence[Callable[[Stop], ResultT]]) -> list[ResultT]:
        """Run tasks on the threads of this process, ``at_once`` at a time, or one by one if there are other ranks."""
        return run_side_by_side(tasks, self._num_threads, self.at_once, in_turn=self.ranks.count > 1)


def _run_backward(_number: int, loss: Tensor) -> None:
    """Add the gradient of the loss of a micro-batch to those in the parameters, in the order of the calls."""
    loss.backward()  # type: ignore[no-untyped-call]
