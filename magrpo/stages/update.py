"""Update: one AdamW step per agent and epoch, on the loss of one iteration's samples.

Every trained agent has its own optimizer and its own batch; only the joint returns connect the agents. Samples without
advantage (degenerate groups) are dropped before the forward pass unless a KL term needs them. Micro-batches that do not
fit in GPU memory are halved, for this update and later ones; gradients stay the same up to rounding.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from magrpo.algo.advantages import tabulate_returns
from magrpo.algo.loss import LossOf, loss_divisor, policy_loss
from magrpo.collate import Batch, Row, collate, plan_batches
from magrpo.config import AlgoConfig, OptimConfig, RolloutConfig, RunConfig
from magrpo.forward import can_share_prompts, has_linear_head, head_weights, hidden_states, token_logits
from magrpo.interfaces import Progress
from magrpo.layout import OPTIMIZER, WEIGHTS
from magrpo.policy import Policy
from magrpo.types import Sample
from magrpo_kernels import Groups, LossOptions, TokenInputs, group_policy_loss, policy_loss_from_logits

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
_ModelContext = AbstractContextManager[PreTrainedModel]
_Constants = dict[str, dict[int, Tensor]]
"""Tensors without gradient, by field of ``SampledTokens`` and completion, so that micro-batches may change."""


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient is not a finite number; the message names the saved batch and remedies."""


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

    def __post_init__(self) -> None:
        self.micro_batch_tokens = self.optim.micro_batch_tokens  # lowered when memory runs out
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
        self._shares_prompts: dict[str, bool] = {}
        self._has_linear_head: dict[str, bool] = {}
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
            with self.policy.active(agent) as model:
                self._has_linear_head[agent] = has_linear_head(model)
                self._shares_prompts[agent] = can_share_prompts(model)
            rows = "share a row" if self._shares_prompts[agent] else "have a row each"
            log.info("agent %s: completions of one prompt %s in the update", agent, rows)

    @classmethod
    def of(cls, policy: Policy, config: RunConfig, dump: Path) -> Updater:
        """The updater of a run."""
        return cls(policy, config.algo, config.optim, config.rollout, config.train.num_iterations, dump)

    def update(self, samples: Mapping[str, Sequence[Sample]], progress: Progress | None = None) -> dict[str, float]:
        """Take a step for every trained agent; returns the metrics of ``update/``.

        ``samples`` holds the samples of the trained agents only. Agents that share an adapter take one step on the
        samples of all of them, whose metrics have the name of the first. ``progress`` counts completions.

        Raises NonFiniteLoss, or torch.cuda.OutOfMemoryError if one completion does not fit: the step was not taken.
        """
        self.policy.sources = None  # until somebody says what the new weights are called
        metrics = {"update/lr": learning_rate(self.optim, self.policy.version + 1, self.num_iterations)}
        gaps = []
        samples_by_holder: dict[str, dict[str, Sequence[Sample]]] = defaultdict(dict)
        for name, agent_samples in samples.items():
            samples_by_holder[self.policy.lineup.holder(name)][name] = agent_samples
        for agent, holder_samples in samples_by_holder.items():
            lr = learning_rate(self._optims[agent], self.policy.version + 1, self.num_iterations)
            if self.policy.lineup.config(agent).lr is not None:
                metrics[f"update/{agent}/lr"] = lr
            for group in self._optimizers[agent].param_groups:
                group["lr"] = lr
            result = self._update_agent(agent, holder_samples, progress)
            gaps.append(result["sampling_gap"])
            metrics |= {f"update/{agent}/{name}": value for name, value in result.items()}
        self.policy.version += 1
        metrics["update/micro_batch_tokens"] = float(self.micro_batch_tokens)
        metrics["update/sampling_gap"] = fmean(gaps)
        self.policy.lineup.release_cached_memory()  # for an engine in a process of its own
        return metrics

    def gradient(self, agent: str, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The gradient of the loss by parameter, before clipping; changes nothing. Raises as :meth:`update` does."""
        samples_by_agent = {agent: samples}
        agent = self.policy.lineup.holder(agent)
        work = self._plan_work(agent, samples_by_agent)
        if work.samples:
            work, constants = self._fit_memory(work, self._compute_constants)
            self._fit_memory(work, partial(self._compute_gradient, constants, _RestartableProgress(None)))
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for name, parameter in self.policy.parameters(agent).items()
        }
        self._optimizers[agent].zero_grad(set_to_none=True)
        return gradients

    def save(self, folder: Path) -> None:
        """Write weights and optimizer states, from which :meth:`load` resumes bit for bit."""
        self.policy.save(folder / WEIGHTS)
        states = {agent: optimizer.state_dict() for agent, optimizer in self._optimizers.items()}
        torch.save({"version": self.policy.version, "optimizers": states}, folder / OPTIMIZER)

    def load(self, folder: Path) -> None:
        """Load weights, optimizer states and the number of updates that :meth:`save` wrote."""
        stored = torch.load(folder / OPTIMIZER, map_location=self.policy.device, weights_only=True)
        self.policy.load(stored["version"], {agent: folder / WEIGHTS / agent for agent in self.policy.agents})
        for agent, optimizer in self._optimizers.items():
            optimizer.load_state_dict(stored["optimizers"][agent])

    # -------------------------------------------------------------------------------------------------- one agent
    def _update_agent(
        self, agent: str, samples_by_agent: Mapping[str, Sequence[Sample]], progress: Progress | None
    ) -> dict[str, float]:
        work, samples = self._plan_work(agent, samples_by_agent), list(chain.from_iterable(samples_by_agent.values()))
        if progress:
            progress(len(samples) - len(work.samples))
        totals: dict[str, float] = {}
        if work.samples:
            work, constants = self._fit_memory(work, self._compute_constants)
            for epoch in range(1, self.algo.update_epochs + 1):
                counter = _RestartableProgress(progress if epoch == self.algo.update_epochs else None)
                work, sums = self._fit_memory(work, partial(self._compute_gradient, constants, counter))
                totals = self._step(work, sums)
        return _agent_metrics(totals, samples)

    def _plan_work(self, agent: str, samples_by_agent: Mapping[str, Sequence[Sample]]) -> _Work:
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
        batches = plan_batches(kept, self.micro_batch_tokens, self._shares_prompts[agent])
        groups = groups.select_tokens(torch.tensor(chosen, dtype=torch.long)).move_to(self.policy.device)
        return _Work(agent, kept, groups, batches, divisor)

    def _fit_memory(self, work: _Work, compute: Callable[[_Work], ResultT]) -> tuple[_Work, ResultT]:
        """The result of ``compute``, repeated with smaller micro-batches as long as GPU memory runs out."""
        while True:
            try:
                return work, compute(work)
            except RuntimeError as error:
                if not is_out_of_memory(error) or all(len(rows) == len(rows[0]) == 1 for rows in work.batches):
                    raise
            # Outside the except block, where the exception would keep the tensors of its frames alive.
            self._optimizers[work.agent].zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            batches = work.batches
            while batches == work.batches:
                self.micro_batch_tokens = max(self.micro_batch_tokens // 2, 1)
                batches = plan_batches(work.samples, self.micro_batch_tokens, self._shares_prompts[work.agent])
            log.warning(
                f"update {self.policy.version + 1}, agent {work.agent!r}: out of GPU memory; continuing with "
                f"micro-batches of {self.micro_batch_tokens} tokens. "
                f"Set optim.micro_batch_tokens = {self.micro_batch_tokens} to start with them"
            )
            work = replace(work, batches=batches)

    def _compute_gradient(
        self, constants: _Constants, progress: _RestartableProgress, work: _Work
    ) -> list[dict[str, Tensor]]:
        """Accumulate the gradient of all micro-batches in the parameters; returns the loss and metric sums of each."""
        self._optimizers[work.agent].zero_grad(set_to_none=True)
        sums: list[dict[str, Tensor]] = []
        num_done = 0
        for batch in self._collate_batches(work):
            loss, metrics = self._compute_loss(work, batch, constants)
            loss.backward()  # type: ignore[no-untyped-call]
            sums.append({**metrics, "loss": loss.detach()})
            num_done += len(batch.samples)
            progress.report_done(num_done)
        return sums

    def _compute_loss(self, work: _Work, batch: Batch, constants: _Constants) -> tuple[Tensor, dict[str, Tensor]]:
        loss_of = self._run_model(work.agent, self.policy.active(work.agent), batch)
        joined: dict[str, Any] = {
            name: torch.cat([by_sample[i] for i in batch.samples]) for name, by_sample in constants.items()
        }
        samples = [i for i in batch.samples for _ in work.samples[i].completion_ids]
        joined["groups"] = work.groups.select_tokens(torch.tensor(samples, device=self.policy.device))
        tokens = replace(batch.tokens, **joined)
        return policy_loss(loss_of, tokens, self._loss_options, work.divisor, self.algo.beta)

    def _step(self, work: _Work, sums: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """One optimizer step with the accumulated gradient; returns the total metric sums, loss and gradient norm."""
        optimizer = self._optimizers[work.agent]
        parameters = self.policy.parameters(work.agent).values()
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.optim.max_grad_norm)
        losses = torch.stack([part["loss"] for part in sums])
        if not bool(losses.isfinite().all() & norm.isfinite()):
            optimizer.zero_grad(set_to_none=True)
            raise self._non_finite(work, losses.tolist(), float(norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        totals = {name: float(torch.stack([part[name] for part in sums]).sum()) for name in sums[0]}
        return {**totals, "grad_norm": float(norm)}

    def _compute_constants(self, work: _Work) -> _Constants:
        """The tensors that are computed once, before the first step, as far as the algorithm needs them."""
        constants: _Constants = defaultdict(dict)
        for batch in self._collate_batches(work):
            computed: dict[str, Tensor] = {}
            if self.algo.update_epochs > 1:
                computed["old_logps"] = self._compute_logps(work.agent, self.policy.active(work.agent), batch)
            if self.algo.beta > 0:
                computed["ref_logps"] = self._compute_logps(work.agent, self.policy.reference(work.agent), batch)
            lengths = [len(work.samples[index].completion_ids) for index in batch.samples]
            for name, values in computed.items():
                constants[name].update(zip(batch.samples, torch.split(values, lengths), strict=True))
        return constants

    @torch.no_grad()
    def _compute_logps(self, agent: str, context: _ModelContext, batch: Batch) -> Tensor:
        loss_of, tokens = self._run_model(agent, context, batch), batch.tokens
        every_token = torch.ones_like(tokens.sampling_logps)
        return loss_of(TokenInputs(tokens.token_ids, every_token, support=tokens.support), self._logps_options).logps

    def _run_model(self, agent: str, context: _ModelContext, batch: Batch) -> LossOf:
        """Run the model; returns the loss as a function of the tokens' inputs.

        If the head is a linear layer, it starts from hidden states (N, D) in the dtype of matrix products.
        """
        with context as model:
            if not self._has_linear_head[agent]:
                return partial(policy_loss_from_logits, token_logits(model, batch))
            weight, bias = head_weights(model)
            dtype = self.policy.dtype
            hidden = hidden_states(model, batch).to(dtype)
            bias = None if bias is None else bias.to(dtype)
            return partial(group_policy_loss, hidden, weight.to(dtype), bias=bias)

    def _collate_batches(self, work: _Work) -> Iterator[Batch]:
        return (collate(work.samples, rows, self.policy.device) for rows in work.batches)

    def _non_finite(self, work: _Work, losses: Sequence[float], norm: float) -> NonFiniteLoss:
        """Save the offending micro-batch (all of them, when only the gradient is not finite)."""
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        indices = chain.from_iterable(row for i in bad or range(len(losses)) for row in work.batches[i])
        self.dump.mkdir(parents=True, exist_ok=True)
        update = self.policy.version + 1
        path = self.dump / f"update-{update}-{work.agent}.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(work.samples[i]) + b"\n" for i in indices))
        cause = f"the loss is {losses[bad[0]]}" if bad else f"the gradient norm is {norm}"
        return NonFiniteLoss(
            f"update {update}, agent {work.agent!r}: {cause}; the step was not taken. The samples are in {path}. "
            "Lower optim.lr, or look for a broken base model or reward"
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """One agent's samples of one update, split into micro-batches of rows."""

    agent: str
    samples: Sequence[Sample]
    groups: Groups
    """Of the samples, with the returns of their siblings."""
    batches: Sequence[Sequence[Row]]
    divisor: float


@dataclass
class _RestartableProgress:
    """Reports each completion once, even if the work starts over."""

    progress: Progress | None
    num_reported: int = 0

    def report_done(self, num_done: int) -> None:
        if self.progress and num_done > self.num_reported:
            self.progress(num_done - self.num_reported)
            self.num_reported = num_done


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether GPU memory ran out: in torch's allocator, or in cuBLAS, cuDNN or a launch, which raise other errors."""
    signs = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA_ERROR_OUT_OF_MEMORY")
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(sign in str(error) for sign in signs)


def learning_rate(optim: OptimConfig, update: int, num_iterations: int) -> float:
    """The learning rate of an update, counted from 1: linear warm-up, then the schedule's shape down to 0."""
    if update <= optim.warmup_iterations:
        return optim.lr * update / optim.warmup_iterations
    if optim.schedule == "constant":
        return optim.lr
    length = max(num_iterations - optim.warmup_iterations, 1)
    progress = min((update - 1 - optim.warmup_iterations) / length, 1.0)
    return optim.lr * (1 - progress if optim.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)


def _agent_metrics(totals: Mapping[str, float], samples: Sequence[Sample]) -> dict[str, float]:
    """Means over trained tokens. ``entropy`` is estimated from the sampled tokens: minus their mean log-probability."""
    tokens = totals.get("tokens", 0.0)
    num_sampled = sum(len(sample.completion_ids) for sample in samples)
    metrics = {
        "loss": totals.get("loss", 0.0),
        "grad_norm": totals.get("grad_norm", 0.0),
        "tokens": tokens,
        "sampling_gap": totals["sampling_gap"] / tokens if tokens else 0.0,
        "entropy": -math.fsum(logp for sample in samples for logp in sample.sampling_logps) / max(num_sampled, 1),
    }
    for total, mean in (("clipped", "clip_frac"), ("kl", "kl")):
        if total in totals:
            metrics[mean] = totals[total] / max(tokens, 1.0)
    return metrics
