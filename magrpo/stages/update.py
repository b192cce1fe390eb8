"""Update: one AdamW step per agent and epoch, on the loss of one iteration's samples.

Every trained agent has its own optimizer and its own batch; only the joint returns connect the agents. Samples without
advantage (degenerate groups) are dropped before the forward pass unless a KL term needs them. Micro-batches that do not
fit in GPU memory are halved, for this update and later ones; gradients stay the same up to rounding. On a CPU adapters
are trained side by side: threads with a share of the cores each take the micro-batches of all agents. Several ranks may
compute one update together, each some lanes of some agents (:mod:`magrpo.stages.lanes`).
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from magrpo.algo.advantages import tabulate_returns
from magrpo.algo.loss import LossOf, loss_divisor, policy_loss
from magrpo.config.run import AlgoConfig, OptimConfig, RolloutConfig, RunConfig
from magrpo.interfaces import Progress
from magrpo.model.collate import Batch, Row, collate, count_padded, plan_batches
from magrpo.model.policy import Policy
from magrpo.model.sharding import gather_tensor
from magrpo.model.side_by_side import Stop, run_side_by_side
from magrpo.process.faults import is_out_of_memory
from magrpo.run.layout import WEIGHTS, locate_weights
from magrpo.stages.lanes import LanePlan, OneRank, Ranks, add_in_pairs, deal_batches, put_gradient, take_gradient
from magrpo.stages.model_runs import ModelRuns
from magrpo.stages.optimizers import learning_rate, read_optimizers, write_optimizers
from magrpo.stages.update_metrics import MEANS_OF_AGENTS, list_sums, summarize_agent
from magrpo.stages.work import (
    CompletionCounter,
    MicroBatchTooLarge,
    NonFiniteLoss,
    OrderedGradient,
    Part,
    SamplingGapTooLarge,
    Work,
)
from magrpo.types import Sample
from magrpo_kernels import LossOptions

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
_Constants = dict[str, Sequence[Tensor]]
"""Tensors without gradient, by field of ``SampledTokens`` and completion, so that micro-batches may change."""


@dataclass(eq=False)
class Updater:
    """The policies' optimizers: one for each trained agent; agents that share an adapter have one together."""

    policy: Policy
    algo: AlgoConfig
    optim: OptimConfig
    rollout: RolloutConfig
    num_iterations: int
    dump: Path
    """The folder for batches with a non-finite loss."""
    ranks: Ranks = field(default_factory=OneRank)
    """The processes that compute updates together; each holds all weights and optimizers and takes the same steps."""
    lag: int = 0
    """``train.lag``: above 0 the metrics tell of importance weights."""

    def __post_init__(self) -> None:
        # Lowered when memory runs out.
        self.micro_batch_tokens = self.optim.count_micro_batch_tokens(self.policy.device.type)
        # Samples without advantage are dropped here, and the ids are the policy's own.
        self._logps_options = LossOptions(self.rollout.temperature, checked=True, impl=self.algo.kernel)
        self._loss_options = replace(
            self._logps_options,
            normalize=self.algo.normalize,
            importance_cap=self.algo.importance_cap,
            backward_once=True,
        )
        if self.algo.update_epochs > 1:
            clip_low, clip_high = self.algo.clip_low, self.algo.clip_high
            self._loss_options = replace(self._loss_options, clip_low=clip_low, clip_high=clip_high)
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        self._optims: dict[str, OptimConfig] = {}
        self._models = ModelRuns(self.policy, gradient_checkpointing=self.optim.gradient_checkpointing)
        for agent in self.policy.agents:
            config = self.policy.lineup.config(agent)
            if not config.trained or self.policy.lineup.holder(agent) != agent:
                continue
            optim = self.optim if config.lr is None else self.optim.model_copy(update={"lr": config.lr})
            parameters = self.policy.parameters(agent).values()
            self._optims[agent] = optim
            self._optimizers[agent] = torch.optim.AdamW(
                parameters, lr=optim.lr, weight_decay=optim.weight_decay, fused=True
            )
            self._models.probe_model(agent)
        self._plan = LanePlan.make(self.optim.lanes, len(self._optimizers), self.ranks.count)
        self._position = {agent: i for i, agent in enumerate(self._optimizers)}
        self._num_threads, self.at_once = torch.get_num_threads(), 1
        """Number of agents that share the cores, one thread or more for each; ranks take theirs in turn."""
        # Gradients of full copies would need as much memory as these, if they were computed at the same time.
        adapters_only = all(self.policy.lineup.weights(agent) == "lora" for agent in self._optimizers)
        if self.policy.device.type == "cpu" and adapters_only and self.policy.shares_no_modules:
            self.at_once = min(len(self._optimizers), self._num_threads)
        self._sum_names = list_sums(self.algo, self.lag)

    @classmethod
    def of(cls, policy: Policy, config: RunConfig, dump: Path, ranks: Ranks | None = None) -> Updater:
        """The updater of a run. Raises ConfigError if the work cannot be shared evenly among ``ranks``."""
        length, ranks = config.train.num_iterations, ranks or OneRank()
        return cls(policy, config.algo, config.optim, config.rollout, length, dump, ranks, config.train.lag)

    def update(self, samples: Mapping[str, Sequence[Sample]], progress: Progress | None = None) -> dict[str, float]:
        """Take a step for every trained agent; returns the metrics of ``update/``.

        ``samples`` holds the samples of the trained agents only. Agents that share an adapter take one step on the
        samples of all of them, whose metrics have the name of the first. ``progress`` counts completions; on several
        ranks each counts its own.

        Raises NonFiniteLoss, or torch.cuda.OutOfMemoryError if one completion does not fit: the step was not taken.
        """
        self.policy.sources = None  # until somebody says what the new weights are called
        metrics = {"update/lr": learning_rate(self.optim, self.policy.version + 1, self.num_iterations)}
        by_quantity: dict[str, list[float]] = defaultdict(list)
        samples_by_holder: dict[str, dict[str, Sequence[Sample]]] = defaultdict(dict)
        for name, agent_samples in samples.items():
            samples_by_holder[self.policy.lineup.holder(name)][name] = agent_samples
        for agent in samples_by_holder:
            lr = learning_rate(self._optims[agent], self.policy.version + 1, self.num_iterations)
            if self.policy.lineup.config(agent).lr is not None:
                metrics[f"update/{agent}/lr"] = lr
            for group in self._optimizers[agent].param_groups:
                group["lr"] = lr
        waiting = iter(samples_by_holder.items())
        shares_cores = self.at_once > 1 and self.ranks.count == 1
        agents_at_once = len(self._optimizers) if shares_cores else self._plan.agents_at_once
        while at_once := dict(islice(waiting, agents_at_once)):
            for agent, result in self._update_agents(at_once, progress).items():
                for name in MEANS_OF_AGENTS & result.keys():
                    by_quantity[name].append(result[name])
                metrics |= {f"update/{agent}/{name}": value for name, value in result.items()}
        self.policy.version += 1
        metrics["update/micro_batch_tokens"] = float(self.micro_batch_tokens)
        metrics |= {f"update/{name}": fmean(values) for name, values in sorted(by_quantity.items())}
        self.policy.lineup.release_cached_memory()  # for an engine in a process of its own
        return metrics

    def gradient(self, agent: str, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The gradient of the loss by parameter, before clipping; changes nothing. Raises as :meth:`update` does."""
        samples_by_agent = {agent: samples}
        agent = self.policy.lineup.holder(agent)
        work = self._plan_work(agent, samples_by_agent)
        if work.samples:
            works, constants = self._find_constants([work])
            (work,), (part,) = self._fit_memory(
                works, partial(self._compute_gradients, constants, CompletionCounter(None))
            )
            self._add_ranks(work, part)
        gradients = {
            name: gather_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
            for name, parameter in self.policy.parameters(agent).items()
        }
        self._optimizers[agent].zero_grad(set_to_none=True)
        return gradients

    def save(self, folder: Path) -> None:
        """Write weights and optimizer states, from which :meth:`load` resumes bit for bit.

        The first rank calls it; where models are spread over ranks, all do, and each writes its part.
        """
        self.policy.save(folder / WEIGHTS)
        write_optimizers(folder, self.policy, self._optimizers)

    def load(self, folder: Path) -> None:
        """Load weights, optimizer states and the number of updates that :meth:`save` wrote."""
        version = read_optimizers(folder, self.policy, self._optimizers)
        self.policy.load(version, locate_weights(folder, self.policy.agents))

    # -------------------------------------------------------------------------------- agents computed at the same time
    def _update_agents(
        self, samples_by_holder: Mapping[str, Mapping[str, Sequence[Sample]]], progress: Progress | None
    ) -> dict[str, dict[str, float]]:
        """Take the steps of agents whose gradients are computed at the same time; returns the metrics of each."""
        samples = {agent: list(chain.from_iterable(parts.values())) for agent, parts in samples_by_holder.items()}
        works: Sequence[Work] = [self._plan_work(agent, parts) for agent, parts in samples_by_holder.items()]
        if progress and self.ranks.number == 0:
            progress(sum(map(len, samples.values())) - sum(len(work.samples) for work in works))
        totals: dict[str, dict[str, float]] = {agent: {} for agent in samples}
        works, constants = self._find_constants([work for work in works if work.samples])
        for epoch in range(1, self.algo.update_epochs + 1):
            counter = CompletionCounter(progress if epoch == self.algo.update_epochs else None)
            works, parts = self._fit_memory(works, partial(self._compute_gradients, constants, counter))
            for work, part in zip(works, parts, strict=True):
                sums = self._add_ranks(work, part)
                if epoch == 1:
                    self._check_sampling_gap(work, sums)
                    if self.algo.update_epochs > 1:
                        constants[work.agent]["old_logps"] = self._share_logps(work, part.logps)
                totals[work.agent] = self._step(work, sums)
        return {agent: summarize_agent(totals[agent], samples[agent]) for agent in samples}

    def _plan_work(self, agent: str, samples_by_agent: Mapping[str, Sequence[Sample]]) -> Work:
        """The samples that the loss depends on, in micro-batches; the divisor counts all samples, by their weights.

        The groups hold the returns of all samples, kept or not.
        """
        samples = list(chain.from_iterable(samples_by_agent.values()))
        estimators = {
            name: self.policy.lineup.config(name).estimator or self.algo.estimator for name in samples_by_agent
        }
        groups = tabulate_returns(samples_by_agent, estimators, self.algo.normalize)
        chosen = [i for i, sample in enumerate(samples) if sample.weight and (sample.advantage or self.algo.beta)]
        kept = [samples[i] for i in chosen]
        num_sequences = math.fsum(sample.weight for sample in samples)
        num_tokens = math.fsum(sample.weight * len(sample.completion_ids) for sample in samples)
        divisor = loss_divisor(self.algo.loss_norm, num_sequences, num_tokens, self.rollout.max_new_tokens)
        groups = groups.select_tokens(torch.tensor(chosen, dtype=torch.long)).move_to(self.policy.device)
        return Work(agent, kept, groups, self._plan_batches(agent, kept, self.micro_batch_tokens), divisor)

    def _plan_batches(self, agent: str, samples: Sequence[Sample], limit: int) -> list[list[Row]]:
        """Micro-batches; with several lanes none is larger than a lane's share, so that no lane is idle."""
        if self.optim.lanes > 1:
            num_tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
            limit = min(limit, max(num_tokens // self.optim.lanes, 1))
        return plan_batches(samples, limit, self._models.shares_prompts[agent])

    def _fit_memory(
        self, works: Sequence[Work], compute: Callable[[Sequence[Work]], ResultT]
    ) -> tuple[Sequence[Work], ResultT]:
        """The result of ``compute``, repeated with smaller micro-batches as long as GPU memory of a rank runs out.

        Ranks that models are spread over cannot agree on it, as others wait within a forward pass: these have to begin
        anew, after MicroBatchTooLarge.
        """
        while True:
            results: list[ResultT] = []
            try:
                results.append(compute(works))
            except RuntimeError as error:
                if not is_out_of_memory(error) or all(work.is_smallest for work in works):
                    raise
                if self.policy.shards:
                    raise MicroBatchTooLarge(str(self._find_smaller(works))) from error
            # Outside the except block, where the exception would keep the tensors of its frames alive.
            if self.ranks.agree_on(bool(results)):
                return works, results[0]
            results.clear()
            for work in works:
                self._optimizers[work.agent].zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            self.micro_batch_tokens = self._find_smaller(works)
            works = [
                replace(work, batches=self._plan_batches(work.agent, work.samples, self.micro_batch_tokens))
                for work in works
            ]
            agents = ", ".join(f"agent {work.agent!r}" for work in works)
            log.warning(
                f"update {self.policy.version + 1}, {agents}: out of GPU memory; continuing with "
                f"micro-batches of {self.micro_batch_tokens} tokens. "
                f"Set optim.micro_batch_tokens = {self.micro_batch_tokens} to start with them"
            )

    def _find_smaller(self, works: Sequence[Work]) -> int:
        """The largest half, quarter, ... of the tokens of a micro-batch that makes other micro-batches."""
        tokens = self.micro_batch_tokens
        while True:
            tokens = max(tokens // 2, 1)
            if any(self._plan_batches(work.agent, work.samples, tokens) != work.batches for work in works):
                return tokens

    def _lanes_of(self, work: Work, rank: int) -> list[list[int]]:
        """The numbers of the micro-batches in each of the agent's lanes that a rank computes."""
        lanes = deal_batches([count_padded(work.samples, rows) for rows in work.batches], self._plan.num_lanes)
        return [lanes[lane] for lane in self._plan.lanes_of(self._position[work.agent], rank)]

    def _idle_batches(self, works: Sequence[Work]) -> Iterator[Batch]:
        """Micro-batches of one sample that this rank runs for nothing: to run a spread model as often as others do."""
        if not self.policy.shards or not works:
            return
        counts = [
            sum(len(lane) for work in works for lane in self._lanes_of(work, rank)) for rank in range(self.ranks.count)
        ]
        samples = works[0].samples
        shortest = min(range(len(samples)), key=lambda i: len(samples[i].prompt_ids) + len(samples[i].completion_ids))
        for _ in range(max(counts) - counts[self.ranks.number]):
            yield collate(samples, [(shortest,)], self.policy.device)

    def _run_tasks(self, tasks: Sequence[Callable[[Stop], ResultT]]) -> list[ResultT]:
        """Tasks that share the threads of one process."""
        return run_side_by_side(tasks, self._num_threads, self.at_once, in_turn=self.ranks.count > 1)

    def _compute_gradients(
        self, constants: Mapping[str, _Constants], counter: CompletionCounter, works: Sequence[Work]
    ) -> list[Part]:
        counter.restart()
        parts = [
            Part(
                torch.zeros(len(self._sum_names), len(work.batches), device=self.policy.device),
                torch.zeros(sum(work.lengths), device=self.policy.device),
            )
            for work in works
        ]
        tasks: list[Callable[[Stop], None]] = []
        for work, part in zip(works, parts, strict=True):
            self._optimizers[work.agent].zero_grad(set_to_none=True)
            run = partial(self._run_batches, constants[work.agent], counter, work, part)
            if self.at_once > 1 and self._plan.is_trivial:  # threads take the numbers of one iterator
                add = OrderedGradient(list(self.policy.parameters(work.agent).values())).add
                tasks += [partial(run, add, iter(range(len(work.batches))))] * min(self.at_once, len(work.batches))
            else:
                tasks.append(partial(self._sum_lanes, run, work, part))
        self._run_tasks(tasks)
        for batch in self._idle_batches(works):
            loss, _, _ = self._compute_loss(works[0], batch, constants[works[0].agent])
            (loss * 0).backward()  # type: ignore[no-untyped-call]
        for work in works:
            if not self.policy.is_spread(work.agent) and not self._plan.is_trivial:
                self._optimizers[work.agent].zero_grad(set_to_none=True)
        return parts

    def _run_batches(
        self,
        constants: _Constants,
        counter: CompletionCounter,
        work: Work,
        part: Part,
        add: Callable[[int, Tensor], None],
        numbers: Iterator[int],
        stop: Stop,
    ) -> None:
        """Compute micro-batches by their numbers, which several threads may take from; ``add`` the gradient of each."""
        for number in takewhile(lambda _: not stop(), numbers):
            batch = collate(work.samples, work.batches[number], self.policy.device)
            loss, metrics, sampled = self._compute_loss(work, batch, constants)
            add(number, loss)
            values = {"clipped": torch.zeros_like(loss), **metrics, "loss": loss.detach()}
            part.sums[:, number] = torch.stack([values[name] for name in self._sum_names])
            work.put_values(part.logps, batch.samples, sampled)
            counter.add(len(batch.samples))

    def _sum_lanes(self, run: Callable[..., None], work: Work, part: Part, stop: Stop) -> None:
        """Sum the gradient over the lanes of this rank.

        The only lane of an only rank leaves it in the parameters; so does FSDP, which adds gradients over ranks.
        """
        parameters = list(self.policy.parameters(work.agent).values())

        def backward(_: int, loss: Tensor) -> None:
            loss.backward()  # type: ignore[no-untyped-call]

        def take_lane(lane: Sequence[int]) -> Tensor:
            run(backward, iter(lane), stop)
            return take_gradient(parameters)

        lanes = self._lanes_of(work, self.ranks.number)
        if self._is_summed_in_place(work.agent):
            run(backward, chain.from_iterable(lanes), stop)
        elif lanes:
            part.branch = add_in_pairs(map(take_lane, lanes))

    def _add_ranks(self, work: Work, part: Part) -> Tensor:
        """Put the gradient of all lanes into the parameters; returns the sums of all micro-batches."""
        if not self._is_summed_in_place(work.agent):
            parameters = list(self.policy.parameters(work.agent).values())
            owners = self._plan.find_owners(self._position[work.agent])
            size = sum(parameter.numel() + 1 for parameter in parameters)
            put_gradient(self.ranks.add_branches(part.branch, owners, size), parameters)
        return self.ranks.fill_in(part.sums)

    def _is_summed_in_place(self, agent: str) -> bool:
        return self._plan.is_trivial or self.policy.is_spread(agent)

    def _compute_loss(
        self, work: Work, batch: Batch, constants: _Constants
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The loss, sums for the metrics, and the log-probabilities of the sampled tokens."""
        joined: dict[str, Any] = {
            name: torch.cat([by_sample[i] for i in batch.samples]) for name, by_sample in constants.items()
        }
        samples = [i for i in batch.samples for _ in work.samples[i].completion_ids]
        joined["groups"] = work.groups.select_tokens(torch.tensor(samples, device=self.policy.device))
        tokens = replace(batch.tokens, **joined)

        def finish(loss_of: LossOf) -> tuple[Tensor, dict[str, Tensor], Tensor]:
            return policy_loss(loss_of, tokens, self._loss_options, work.divisor, self.algo.beta)

        return self._models.run_model(work.agent, self.policy.active(work.agent), batch, finish)

    def _check_sampling_gap(self, work: Work, sums: Tensor) -> None:
        """Refuse samples of the current weights whose log-probabilities are too far from the trainer's."""
        limit, version = self.algo.max_sampling_gap, self.policy.version
        if limit is None or any(sample.policy_version != version for sample in work.samples):
            return
        by_name = dict(zip(self._sum_names, sums.sum(1).tolist(), strict=True))
        gap = by_name["sampling_gap"] / by_name["tokens"]
        if gap > limit:
            self._optimizers[work.agent].zero_grad(set_to_none=True)
            raise SamplingGapTooLarge(
                f"update {version + 1}, agent {work.agent!r}: the engine's log-probabilities are {gap:.3g} from the "
                f"trainer's, above algo.max_sampling_gap = {limit:g}; the step was not taken. The engine holds other "
                "weights, or computes in another precision: sample again with --resume and --from-stage rollout, set "
                'model.dtype = "float32", or raise the limit'
            )

    def _step(self, work: Work, sums: Tensor) -> dict[str, float]:
        """One optimizer step with the accumulated gradient; returns the total metric sums, loss and gradient norm."""
        optimizer = self._optimizers[work.agent]
        parameters = self.policy.parameters(work.agent).values()
        norm = gather_tensor(torch.nn.utils.clip_grad_norm_(parameters, self.optim.max_grad_norm))
        by_name = dict(zip(self._sum_names, sums, strict=True))
        if not bool(by_name["loss"].isfinite().all() & norm.isfinite()):
            optimizer.zero_grad(set_to_none=True)
            raise self._non_finite(work, by_name["loss"].tolist(), float(norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {**{name: float(values.sum()) for name, values in by_name.items()}, "grad_norm": float(norm)}

    def _find_constants(self, works: Sequence[Work]) -> tuple[Sequence[Work], dict[str, _Constants]]:
        """What is computed once, before the first step, as far as the algorithm needs it, by agent.

        The log-probabilities before the first step are none of them: the first pass over the samples computes them.
        """
        if not self.algo.beta:
            return works, {work.agent: {} for work in works}
        works, tables = self._fit_memory(works, self._compute_reference)
        shared = (self._share_logps(work, table) for work, table in zip(works, tables, strict=True))
        return works, {work.agent: {"ref_logps": logps} for work, logps in zip(works, shared, strict=True)}

    def _compute_reference(self, works: Sequence[Work]) -> list[Tensor]:
        """Log-probabilities of each agent's sampled tokens under its reference, 0 where another rank computes them."""
        tasks = [partial(self._compute_reference_logps, work) for work in works]
        tables = self._run_tasks(tasks)
        for batch in self._idle_batches(works):
            agent = works[0].agent
            self._models.compute_logps(agent, self.policy.reference(agent), batch, self._logps_options)
        return tables

    def _compute_reference_logps(self, work: Work, stop: Stop) -> Tensor:
        table = torch.zeros(sum(work.lengths), device=self.policy.device)
        lanes = self._lanes_of(work, self.ranks.number)
        for number in takewhile(lambda _: not stop(), chain.from_iterable(lanes)):
            batch = collate(work.samples, work.batches[number], self.policy.device)
            context = self.policy.reference(work.agent)
            logps = self._models.compute_logps(work.agent, context, batch, self._logps_options)
            work.put_values(table, batch.samples, logps)
        return table

    def _share_logps(self, work: Work, table: Tensor) -> Sequence[Tensor]:
        """The log-probabilities that all ranks have computed, by completion."""
        return torch.split(self.ranks.fill_in(table), work.lengths)

    def _non_finite(self, work: Work, losses: Sequence[float], norm: float) -> NonFiniteLoss:
        """Save the offending micro-batch (all of them, when only the gradient is not finite)."""
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        indices = chain.from_iterable(row for i in bad or range(len(losses)) for row in work.batches[i])
        update = self.policy.version + 1
        path = self.dump / f"update-{update}-{work.agent}.jsonl"
        if self.ranks.number == 0:
            self.dump.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(msgspec.json.encode(work.samples[i]) + b"\n" for i in indices))
        self.ranks.agree_on(True)  # the first rank to say so ends the others, so that one would not have written yet
        cause = f"the loss is {losses[bad[0]]}" if bad else f"the gradient norm is {norm}"
        return NonFiniteLoss(
            f"update {update}, agent {work.agent!r}: {cause}; the step was not taken. The samples are in {path}. "
            "Lower optim.lr, or look for a broken base model or reward"
        )
