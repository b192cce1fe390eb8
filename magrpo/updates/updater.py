"""Update: one AdamW step per agent and epoch, on the loss of one iteration's samples.

Every trained agent has its own optimizer and its own batch; only the joint returns connect the agents. Samples without
advantage (degenerate groups) are dropped before the forward pass unless a KL term needs them. Gradients are computed by
:mod:`magrpo.updates.gradients`, in micro-batches that :mod:`magrpo.updates.memory_fitting` fits into GPU memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean

import msgspec
import torch
from torch import Tensor

from magrpo.algo.loss import loss_divisor, tabulate_returns
from magrpo.algo.preferences import Preferences
from magrpo.config.run import RunConfig
from magrpo.config.sections import AlgoConfig, OptimConfig, RolloutConfig
from magrpo.interfaces import Progress
from magrpo.model.policy import Policy
from magrpo.model.sharding import gather_tensor
from magrpo.run.files import WEIGHTS, locate_weights
from magrpo.types import Comparison, Sample
from magrpo.updates.agent_batch import (
    MEANS_OF_AGENTS,
    AgentBatch,
    CompletionCounter,
    summarize_agent,
    uses_ratio,
)
from magrpo.updates.gradients import Constants, GradientComputer
from magrpo.updates.lanes import OneRank, Ranks
from magrpo.updates.memory_fitting import MemoryFitter
from magrpo.updates.optimizers import learning_rate, read_optimizers, write_optimizers


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient is not a finite number; the message names the saved batch and remedies."""


@dataclass(slots=True)
class _AgentsPlan:
    """The batches of agents whose gradients are computed at the same time, and what their epochs leave."""

    samples: Mapping[str, Sequence[Sample]]
    batches: Sequence[AgentBatch]
    constants: dict[str, Constants]
    totals: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metric sums of the newest epoch."""

    def number_logps(self, logps: Mapping[str, Sequence[Tensor]]) -> dict[str, dict[int, Tensor]]:
        """The log-probabilities by agent and number of the sample."""
        return {
            batch.agent: dict(zip(batch.numbers, logps[batch.agent], strict=True))
            for batch in self.batches
            if batch.agent in logps
        }

    def set_advantages(self, advantages: Mapping[str, Tensor]) -> None:
        """Let these advantages of all samples, by agent, replace those that the samples hold."""
        for batch in self.batches:
            chosen = advantages[batch.agent].float()
            self.constants[batch.agent]["advantages"] = [
                chosen[number].repeat(length) for number, length in zip(batch.numbers, batch.lengths, strict=True)
            ]

    def summarize(self) -> dict[str, dict[str, float]]:
        """The metrics of each agent."""
        return {agent: summarize_agent(self.totals.get(agent, {}), self.samples[agent]) for agent in self.samples}


@dataclass(eq=False)
class Updater:
    """The optimizers of the policies: one for each trained agent, or one for all agents that share an adapter."""

    policy: Policy
    algo: AlgoConfig
    optim: OptimConfig
    rollout: RolloutConfig
    num_iterations: int
    dump: Path
    """Folder to save batches with a non-finite loss in."""
    ranks: Ranks = field(default_factory=OneRank)
    """The processes that compute an update together; each holds all weights and optimizers and takes the same steps."""
    lag: int = 0
    """Value of ``train.lag``; above 0, the metrics include importance weights."""

    def __post_init__(self) -> None:
        self.optimizers: dict[str, torch.optim.AdamW] = {}
        """The optimizer of each holder of trained weights, by the name of the holder."""
        self._optims: dict[str, OptimConfig] = {}
        for agent in self.policy.agents:
            config = self.policy.lineup.config(agent)
            if not config.trained or self.policy.lineup.holder(agent) != agent:
                continue
            optim = self.optim if config.lr is None else self.optim.model_copy(update={"lr": config.lr})
            parameters = self.policy.parameters(agent).values()
            self._optims[agent] = optim
            self.optimizers[agent] = torch.optim.AdamW(
                parameters, lr=optim.lr, weight_decay=optim.weight_decay, fused=True
            )
        agents = list(self.optimizers)
        self.gradients = GradientComputer(
            self.policy, self.algo, self.optim, self.rollout, agents, self.ranks, self.lag
        )
        self.memory = MemoryFitter(self.policy, self.optim, self.ranks, self.gradients.models.shares_prompts)

    @classmethod
    def of(cls, policy: Policy, config: RunConfig, dump: Path, ranks: Ranks | None = None) -> Updater:
        """The updater of a run, whose work ``ranks`` can share evenly: see :mod:`magrpo.planning.place_check`.

        Raises ConfigError if ``optim.gradient_checkpointing`` is set and a model does not support it.
        """
        num_iterations, lag = config.train.num_iterations, config.train.lag
        return cls(policy, config.algo, config.optim, config.rollout, num_iterations, dump, ranks or OneRank(), lag)

    def update(
        self,
        samples: Mapping[str, Sequence[Sample]],
        progress: Progress | None = None,
        comparisons: Sequence[Comparison] = (),
    ) -> dict[str, float]:
        """Take a step for every trained agent; returns the metrics of ``update/``.

        ``samples`` holds the samples of the trained agents only, and ``comparisons`` their joint actions, for
        ``algo.loss = "madpo"``. Agents that share an adapter take one step on the samples of all of them, and the
        metrics of that step are named after the first. ``progress`` counts completions; on several ranks, each rank
        counts its own.

        Raises NonFiniteLoss, or torch.cuda.OutOfMemoryError if one completion does not fit into memory; the step was
        then not taken.
        """
        self.policy.sources = None  # the weights change below, so they no longer match any folder
        by_holder: dict[str, dict[str, Sequence[Sample]]] = defaultdict(dict)
        for name, agent_samples in samples.items():
            by_holder[self.policy.lineup.holder(name)][name] = agent_samples
        metrics = self._set_learning_rates(by_holder)
        by_quantity: dict[str, list[float]] = defaultdict(list)
        holders, size = list(by_holder), self.gradients.num_agents_together
        groups = [
            {holder: by_holder[holder] for holder in holders[first : first + size]}
            for first in range(0, len(holders), size)
        ]
        if self.algo.loss == "madpo":
            preferences = Preferences(comparisons, by_holder, self.algo.preference_beta)
            results, preferred = self._learn_preferences(groups, preferences, progress)
            metrics |= preferred
        else:
            results = {}
            for together in groups:
                results |= self._update_agents(together, progress)
        for agent, result in results.items():
            for name in MEANS_OF_AGENTS & result.keys():
                by_quantity[name].append(result[name])
            metrics |= {f"update/{agent}/{name}": value for name, value in result.items()}
        self.policy.version += 1
        metrics["update/micro_batch_tokens"] = float(self.memory.micro_batch_tokens)
        metrics |= {f"update/{name}": fmean(values) for name, values in sorted(by_quantity.items())}
        self.policy.lineup.release_cached_memory()  # for an engine in a process of its own
        return metrics

    def save(self, folder: Path) -> None:
        """Write weights and optimizer states, from which :meth:`load` resumes bit for bit.

        The first rank calls it; if models are spread over ranks, all ranks call it, and each writes its part.
        """
        self.policy.save(folder / WEIGHTS)
        write_optimizers(folder, self.policy, self.optimizers)

    def load(self, folder: Path) -> None:
        """Load the weights, optimizer states and number of updates that :meth:`save` wrote."""
        version = read_optimizers(folder, self.policy, self.optimizers)
        self.policy.load(version, locate_weights(folder, self.policy.agents))

    def _set_learning_rates(self, agents: Iterable[str]) -> dict[str, float]:
        """Set the learning rates of this update; returns the shared one, and those of agents with their own ``lr``."""
        update = self.policy.version + 1
        metrics = {"update/lr": learning_rate(self.optim, update, self.num_iterations)}
        for agent in agents:
            lr = learning_rate(self._optims[agent], update, self.num_iterations)
            if self.policy.lineup.config(agent).lr is not None:
                metrics[f"update/{agent}/lr"] = lr
            for group in self.optimizers[agent].param_groups:
                group["lr"] = lr
        return metrics

    # -------------------------------------------------------------------------------- agents computed at the same time
    def _update_agents(
        self, samples_by_holder: Mapping[str, Mapping[str, Sequence[Sample]]], progress: Progress | None
    ) -> dict[str, dict[str, float]]:
        """Take the steps of agents whose gradients are computed at the same time; returns the metrics of each agent."""
        plan = self._plan_agents(samples_by_holder, None, progress)
        for epoch in range(1, self.algo.update_epochs + 1):
            logps = self._take_steps(plan, epoch, progress)
            if uses_ratio(self.algo) and epoch == 1:
                for agent, agent_logps in logps.items():
                    plan.constants[agent]["old_logps"] = agent_logps
        return plan.summarize()

    def _learn_preferences(
        self,
        groups: Sequence[Mapping[str, Mapping[str, Sequence[Sample]]]],
        preferences: Preferences,
        progress: Progress | None,
    ) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """Take the steps of all agents, epoch by epoch: each one's gradient depends on the weights of the others.

        The reference are the weights before the update, so all margins are 0 in the first epoch, for which the samples
        hold the advantages. Returns the metrics of each agent and those of all.
        """
        plans = [self._plan_agents(together, preferences, progress) for together in groups]
        before: dict[str, dict[int, Tensor]] = {}
        metrics: dict[str, float] = {}
        for epoch in range(1, self.algo.update_epochs + 1):
            if epoch > 1:
                now = {agent: logps for plan in plans for agent, logps in self._compute_current(plan).items()}
                pushes = preferences.weigh(before, now)
                metrics = {"update/preference_loss": pushes.loss, "update/preference_accuracy": pushes.accuracy}
                for plan in plans:
                    plan.set_advantages(
                        {name: table.to(self.policy.device) for name, table in pushes.advantages.items()}
                    )
            for plan in plans:
                logps = self._take_steps(plan, epoch, progress)
                if epoch == 1:
                    before |= plan.number_logps(logps)
        return {agent: result for plan in plans for agent, result in plan.summarize().items()}, metrics

    def _compute_current(self, plan: _AgentsPlan) -> dict[str, dict[int, Tensor]]:
        """The log-probabilities of the samples under the present weights, by agent and number of the sample."""
        plan.batches, tables = self.memory.fit_memory(plan.batches, self.gradients.compute_current)
        pairs = zip(plan.batches, tables, strict=True)
        return plan.number_logps({batch.agent: self.gradients.share_logps(batch, table) for batch, table in pairs})

    def _plan_agents(
        self,
        samples_by_holder: Mapping[str, Mapping[str, Sequence[Sample]]],
        preferences: Preferences | None,
        progress: Progress | None,
    ) -> _AgentsPlan:
        samples = {agent: list(chain.from_iterable(parts.values())) for agent, parts in samples_by_holder.items()}
        batches: Sequence[AgentBatch] = [
            self._plan_batch(agent, parts, preferences) for agent, parts in samples_by_holder.items()
        ]
        if progress and self.ranks.number == 0:
            num_skipped = sum(map(len, samples.values())) - sum(len(batch.samples) for batch in batches)
            progress(num_skipped)
        batches, constants = self._find_constants([batch for batch in batches if batch.samples])
        return _AgentsPlan(samples, batches, constants)

    def _take_steps(self, plan: _AgentsPlan, epoch: int, progress: Progress | None) -> dict[str, Sequence[Tensor]]:
        """Take one step for each agent of ``plan``; returns the log-probabilities before it, if later epochs exist."""
        counter = CompletionCounter(progress if epoch == self.algo.update_epochs else None)
        compute = partial(self.gradients.compute_gradients, plan.constants, counter)
        plan.batches, parts = self.memory.fit_memory(plan.batches, compute)
        logps: dict[str, Sequence[Tensor]] = {}
        for batch, part in zip(plan.batches, parts, strict=True):
            sums = self.gradients.add_ranks(batch, part)
            if epoch == 1 and self.algo.update_epochs > 1:
                logps[batch.agent] = self.gradients.share_logps(batch, part.logps)
            totals = self._step(batch, sums)
            if epoch > 1:  # in which the policy's own change would hide whether the engine held its weights
                before = plan.totals[batch.agent]
                totals["sampling_gap"] = before["sampling_gap"] * totals["tokens"] / max(before["tokens"], 1.0)
            plan.totals[batch.agent] = totals
        return logps

    def _plan_batch(
        self,
        agent: str,
        samples_by_agent: Mapping[str, Sequence[Sample]],
        preferences: Preferences | None = None,
    ) -> AgentBatch:
        """Plan the micro-batches of the samples that the loss depends on.

        The divisor and the groups cover all samples, kept or not. Sequences are counted by ``Sample.counts``, or by
        ``Sample.weight`` where that is None, and tokens by the weight. The groups hold the returns.
        """
        samples = list(chain.from_iterable(samples_by_agent.values()))
        if preferences is None:
            groups = tabulate_returns(samples_by_agent, self.algo.normalize)
            chosen = [i for i, sample in enumerate(samples) if sample.weight and (sample.advantage or self.algo.beta)]
        else:
            groups = None
            chosen = [i for i in preferences.list_paired(agent) if samples[i].weight]
        kept = [samples[i] for i in chosen]
        num_sequences = math.fsum(sample.weight if sample.counts is None else sample.counts for sample in samples)
        num_tokens = math.fsum(sample.weight * len(sample.completion_ids) for sample in samples)
        divisor = loss_divisor(self.algo.loss_norm, num_sequences, num_tokens, self.rollout.max_new_tokens)
        if groups is not None:
            groups = groups.select_tokens(torch.tensor(chosen, dtype=torch.long)).move_to(self.policy.device)
        return AgentBatch(agent, kept, groups, self.memory.plan_micro_batches(agent, kept), divisor, chosen)

    def _find_constants(self, batches: Sequence[AgentBatch]) -> tuple[Sequence[AgentBatch], dict[str, Constants]]:
        """Compute each agent's constant tensors before the first step.

        They are the weights of tokens, if these depend on the length of completions, and the reference
        log-probabilities, for a KL term. Old log-probabilities are not among them, because the first pass over the
        samples computes them.
        """
        constants: dict[str, Constants] = {batch.agent: {} for batch in batches}
        if self.algo.loss_norm == "sequence_mean":
            for batch in batches:
                constants[batch.agent]["sample_weights"] = [
                    torch.full((length,), sample.weight / length, device=self.policy.device)
                    for sample, length in zip(batch.samples, batch.lengths, strict=True)
                ]
        if self.algo.beta:
            batches, tables = self.memory.fit_memory(batches, self.gradients.compute_reference)
            for batch, table in zip(batches, tables, strict=True):
                constants[batch.agent]["ref_logps"] = self.gradients.share_logps(batch, table)
        return batches, constants

    def _step(self, batch: AgentBatch, sums: Tensor) -> dict[str, float]:
        """Take one optimizer step with the accumulated gradient; returns metric sums, loss and gradient norm."""
        optimizer = self.optimizers[batch.agent]
        parameters = self.policy.parameters(batch.agent).values()
        norm = gather_tensor(torch.nn.utils.clip_grad_norm_(parameters, self.optim.max_grad_norm))
        by_name = dict(zip(self.gradients.sum_names, sums, strict=True))
        if not bool(by_name["loss"].isfinite().all() & norm.isfinite()):
            self.policy.clear_gradients(batch.agent)
            raise self._save_failed_batch(batch, by_name["loss"].tolist(), float(norm))
        optimizer.step()
        self.policy.clear_gradients(batch.agent)
        return {**{name: float(values.sum()) for name, values in by_name.items()}, "grad_norm": float(norm)}

    def _save_failed_batch(self, batch: AgentBatch, losses: Sequence[float], norm: float) -> NonFiniteLoss:
        """Save the micro-batches with a non-finite loss, or all of them if only the gradient is not finite.

        Returns the error that names the file.
        """
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        saved = bad or range(len(losses))
        indices = chain.from_iterable(row for i in saved for row in batch.micro_batches[i])
        update = self.policy.version + 1
        path = self.dump / f"update-{update}-{batch.agent}.jsonl"
        if self.ranks.number == 0:
            self.dump.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(msgspec.json.encode(batch.samples[i]) + b"\n" for i in indices))
        self.ranks.wait_for_all()  # the first rank to raise ends the others, maybe before the file is written
        cause = f"the loss is {losses[bad[0]]}" if bad else f"the gradient norm is {norm}"
        return NonFiniteLoss(
            f"update {update}, agent {batch.agent!r}: {cause}; the step was not taken. The samples are in {path}. "
            "Lower optim.lr, or look for a broken base model or reward"
        )
