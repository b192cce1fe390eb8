"""Update: one step of AdamW for every agent (one per epoch) on the loss of one iteration's samples.

Every agent that trains has its own optimizer and its own batch; nothing but the joint returns connects them. Samples
without advantage (degenerate groups) are left out before the forward pass when no KL term needs them. Micro-batches
that do not fit the GPU's memory are halved, for this update and those after it; gradients stay what they were, up to
rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

import magrpo_kernels
from magrpo.algo.loss import DIVISORS, LossOf, importance_weights, policy_loss
from magrpo.collate import Batch, Row, collate, plan
from magrpo.config import AlgoConfig, OptimConfig, RolloutConfig, RunConfig
from magrpo.interfaces import Progress
from magrpo.policy import Policy, has_linear_head, head, hidden_states, logits, shares_prompts
from magrpo.types import Sample

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

OPTIMIZER = "optimizer.pt"
WEIGHTS = "weights"


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient is not a finite number; the message names the batch on disk and remedies."""


class Updater:
    """Holds the policies' optimizers. ``dump`` is the folder that a batch with a non-finite loss is saved in."""

    def __init__(
        self,
        policy: Policy,
        algo: AlgoConfig,
        optim: OptimConfig,
        rollout: RolloutConfig,
        num_iterations: int,
        dump: Path,
    ) -> None:
        """Open an optimizer for each agent that trains; for those that share an adapter, one."""
        self.policy = policy
        self.algo = algo
        self.optim = optim
        self.rollout = rollout
        self.num_iterations = num_iterations
        self.dump = dump
        self.micro_batch_tokens = optim.micro_batch_tokens  # less once memory did not suffice
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        self._optims: dict[str, OptimConfig] = {}
        self._shares: dict[str, bool] = {}
        self._linear: dict[str, bool] = {}
        for agent in policy.agents:
            if not policy.config(agent).trained or policy.holder(agent) != agent:
                continue
            own = policy.config(agent).lr
            self._optims[agent] = optim if own is None else optim.model_copy(update={"lr": own})
            parameters = policy.parameters(agent).values()
            self._optimizers[agent] = torch.optim.AdamW(
                parameters, lr=self._optims[agent].lr, weight_decay=optim.weight_decay, fused=True
            )
            with policy.active(agent) as model:
                self._linear[agent] = has_linear_head(model)
                self._shares[agent] = shares_prompts(model)

    @classmethod
    def of(cls, policy: Policy, config: RunConfig, dump: Path) -> Updater:
        """The updater of a run."""
        return cls(policy, config.algo, config.optim, config.rollout, config.train.num_iterations, dump)

    def update(self, samples: Mapping[str, Sequence[Sample]], progress: Progress | None = None) -> dict[str, float]:
        """Train every agent that trains on its samples; returns the metrics of ``update/``.

        ``samples`` are theirs alone. Agents that share an adapter take one step on the samples of all of them; its
        metrics are those of the first. ``progress`` counts completions.

        Raises:
            NonFiniteLoss: nothing was changed by the step that would have used it.
            torch.cuda.OutOfMemoryError: one completion alone does not fit; the same holds.
        """
        metrics = {"update/lr": learning_rate(self.optim, self.policy.version + 1, self.num_iterations)}
        gaps = []
        merged: dict[str, list[Sample]] = {}
        for name, own in samples.items():
            merged.setdefault(self.policy.holder(name), []).extend(own)
        for agent, members in merged.items():
            lr = learning_rate(self._optims[agent], self.policy.version + 1, self.num_iterations)
            if self.policy.config(agent).lr is not None:
                metrics[f"update/{agent}/lr"] = lr
            for group in self._optimizers[agent].param_groups:
                group["lr"] = lr
            result = self._update_agent(agent, members, progress)
            gaps.append(result["sampling_gap"])
            metrics |= {f"update/{agent}/{name}": value for name, value in result.items()}
        self.policy.version += 1
        metrics["update/micro_batch_tokens"] = float(self.micro_batch_tokens)
        metrics["update/sampling_gap"] = fmean(gaps)
        self.policy.release_cached_memory()  # to the engine, where it is a process of its own
        return metrics

    def gradient(self, agent: str, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The gradient of the loss at the weights as they are, by parameter, before clipping; changes nothing.

        Parameters that no sample reaches have zeros. Raises as :meth:`update` does.
        """
        agent = self.policy.holder(agent)
        work = self._work(agent, samples)
        parameters = self.policy.parameters(agent)
        if work.samples:
            work, frozen = self._fitting(work, self._frozen)
            self._fitting(work, partial(self._gradient, frozen=frozen, told=_Furthest(None)))
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in parameters.items()}
        self._optimizers[agent].zero_grad(set_to_none=True)
        return found

    def save(self, folder: Path) -> None:
        """Write weights and optimizer states: all that :meth:`load` needs to go on bit for bit."""
        self.policy.save(folder / WEIGHTS)
        states = {agent: optimizer.state_dict() for agent, optimizer in self._optimizers.items()}
        torch.save({"version": self.policy.version, "optimizers": states}, folder / OPTIMIZER)

    def load(self, folder: Path) -> None:
        """Take over what :meth:`save` wrote: weights, optimizer states and the number of updates."""
        stored = torch.load(folder / OPTIMIZER, map_location=self.policy.device, weights_only=True)
        self.policy.load(stored["version"], {agent: folder / WEIGHTS / agent for agent in self.policy.agents})
        for agent, optimizer in self._optimizers.items():
            optimizer.load_state_dict(stored["optimizers"][agent])

    # -------------------------------------------------------------------------------------------------- one agent
    def _update_agent(self, agent: str, samples: Sequence[Sample], progress: Progress | None) -> dict[str, float]:
        work = self._work(agent, samples)
        kept = work.samples
        if progress:
            progress(len(samples) - len(kept))
        totals: dict[str, float] = {}
        if kept:
            work, frozen = self._fitting(work, self._frozen)
            for epoch in range(self.algo.update_epochs):
                told = _Furthest(progress if epoch == self.algo.update_epochs - 1 else None)
                work, sums = self._fitting(work, partial(self._gradient, frozen=frozen, told=told))
                totals = self._step(work, sums)
        return _agent_metrics(totals, samples)

    def _work(self, agent: str, samples: Sequence[Sample]) -> _Work:
        """Those of ``samples`` that the loss depends on; the divisor counts all of them, by their weights."""
        kept = [sample for sample in samples if sample.weight and (sample.advantage or self.algo.beta)]
        sequences = math.fsum(sample.weight for sample in samples)
        tokens = math.fsum(sample.weight * len(sample.completion_ids) for sample in samples)
        return _Work(
            agent=agent,
            samples=kept,
            rows=plan(kept, self.micro_batch_tokens, self._shares[agent]),
            divisor=DIVISORS[self.algo.loss_norm](sequences, tokens, self.rollout.max_new_tokens),
        )

    def _fitting(self, work: _Work, compute: Callable[[_Work], ResultT]) -> tuple[_Work, ResultT]:
        """What ``compute`` makes of ``work``, in smaller micro-batches if the GPU's memory does not suffice.

        Raises:
            torch.cuda.OutOfMemoryError: one completion at a time does not fit either.
        """
        while True:
            try:
                return work, compute(work)
            except torch.cuda.OutOfMemoryError:
                if all(len(rows) == len(rows[0]) == 1 for rows in work.rows):
                    raise
            # Here, and not above, where the exception would keep the tensors of its frames alive.
            self._optimizers[work.agent].zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            rows = work.rows
            while rows == work.rows:
                self.micro_batch_tokens = max(self.micro_batch_tokens // 2, 1)
                rows = plan(work.samples, self.micro_batch_tokens, self._shares[work.agent])
            log.warning(
                "update %d, agent %r: out of GPU memory; going on with micro-batches of %d tokens. "
                "optim.micro_batch_tokens = %d avoids the detour",
                self.policy.version + 1,
                work.agent,
                self.micro_batch_tokens,
                self.micro_batch_tokens,
            )
            work = replace(work, rows=rows)

    def _gradient(self, work: _Work, frozen: _Frozen, told: _Furthest) -> list[dict[str, Tensor]]:
        """Leave the gradient of all micro-batches in the parameters; the loss and the metrics of each."""
        self._optimizers[work.agent].zero_grad(set_to_none=True)
        sums: list[dict[str, Tensor]] = []
        done = 0
        for batch in self._batches(work):
            loss, metrics = self._loss(work, batch, frozen.of(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            sums.append({**metrics, "loss": loss.detach()})
            done += len(batch.samples)
            told.reach(done)
        return sums

    def _step(self, work: _Work, sums: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """One optimizer step with the gradient in place; the sums of metrics and loss, and the gradient norm."""
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

    def _loss(self, work: _Work, batch: Batch, frozen: _Logps) -> tuple[Tensor, dict[str, Tensor]]:
        with self.policy.active(work.agent) as model:
            loss_of = self._forward(work.agent, model, batch)
        several = self.algo.update_epochs > 1
        return policy_loss(
            loss_of,
            batch.token_ids,
            batch.advantages,
            batch.sampling_logps,
            divisor=work.divisor,
            temperature=self.rollout.temperature,
            sample_weights=batch.sample_weights,
            weights=frozen.weights,
            old_logps=frozen.old if several else None,
            clip_low=self.algo.clip_low if several else None,
            clip_high=self.algo.clip_high if several else None,
            ref_logps=frozen.ref,
            beta=self.algo.beta,
            impl=self.algo.kernel,
        )

    def _frozen(self, work: _Work) -> _Frozen:
        """What is computed once, before the first step, and only if the algorithm asks for it."""
        frozen = _Frozen()
        for batch in self._batches(work):
            old = ref = weights = None
            if self.algo.update_epochs > 1 or self.algo.importance_cap is not None:
                old = self._logps(work.agent, self.policy.active(work.agent), batch)
            if self.algo.importance_cap is not None:
                assert old is not None
                weights = importance_weights(old, batch.sampling_logps, self.algo.importance_cap)
            if self.algo.beta > 0:
                ref = self._logps(work.agent, self.policy.reference(work.agent), batch)
            frozen.add(batch, [len(work.samples[i].completion_ids) for i in batch.samples], _Logps(old, ref, weights))
        return frozen

    @torch.no_grad()
    def _logps(self, agent: str, model: AbstractContextManager[PreTrainedModel], batch: Batch) -> Tensor:
        with model as active:
            loss_of = self._forward(agent, active, batch)
        every = torch.ones_like(batch.sampling_logps)
        return loss_of(batch.token_ids, every, temperature=self.rollout.temperature, impl=self.algo.kernel).logps

    def _forward(self, agent: str, model: PreTrainedModel, batch: Batch) -> LossOf:
        """Run the model; the loss of its tokens as a function of their coefficients, over their support if it was kept.

        From hidden states (N, D), in the dtype that matrix products run in, where the head is a linear layer; else from
        the model's own logits.
        """
        if not self._linear[agent]:
            return partial(magrpo_kernels.policy_loss_from_logits, logits(model, batch), support=batch.support)
        weight, bias = head(model)
        dtype = self.policy.dtype
        hidden = hidden_states(model, batch).to(dtype)
        bias = None if bias is None else bias.to(dtype)
        weight = weight.to(dtype)
        return partial(magrpo_kernels.policy_loss_from_hidden, hidden, weight, bias=bias, support=batch.support)

    def _batches(self, work: _Work) -> Iterator[Batch]:
        return (collate(work.samples, rows).to(self.policy.device) for rows in work.rows)

    def _non_finite(self, work: _Work, losses: Sequence[float], norm: float) -> NonFiniteLoss:
        """Save the offending micro-batch (all of them, when only the gradient is not finite)."""
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        members = chain.from_iterable(row for i in bad or range(len(losses)) for row in work.rows[i])
        self.dump.mkdir(parents=True, exist_ok=True)
        update = self.policy.version + 1
        path = self.dump / f"update-{update}-{work.agent}.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(work.samples[i]) + b"\n" for i in members))
        what = f"the loss is {losses[bad[0]]}" if bad else f"the gradient norm is {norm}"
        return NonFiniteLoss(
            f"update {update}, agent {work.agent!r}: {what}; no weight was changed by it. The samples are in {path}. "
            "Lower optim.lr, or look for a broken base model or reward"
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """One agent's samples of one update, split into micro-batches."""

    agent: str
    samples: Sequence[Sample]
    rows: Sequence[Sequence[Row]]
    divisor: float


@dataclass(frozen=True, slots=True)
class _Logps:
    """Log-probabilities and weights that no gradient flows through, for the tokens of one micro-batch."""

    old: Tensor | None
    ref: Tensor | None
    weights: Tensor | None


class _Frozen:
    """:class:`_Logps` by completion, so that later micro-batches may be others."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[int, Tensor]] = {"old": {}, "ref": {}, "weights": {}}

    def add(self, batch: Batch, lengths: Sequence[int], logps: _Logps) -> None:
        for name, kept in self._kept.items():
            values: Tensor | None = getattr(logps, name)
            if values is not None:
                kept.update(zip(batch.samples, torch.split(values, list(lengths)), strict=True))

    def of(self, batch: Batch) -> _Logps:
        parts = {name: [kept[i] for i in batch.samples] if kept else None for name, kept in self._kept.items()}
        return _Logps(**{name: None if part is None else torch.cat(part) for name, part in parts.items()})


class _Furthest:
    """Tells progress in completions, each once, however often the work begins anew."""

    def __init__(self, tell: Progress | None) -> None:
        self._tell, self._told = tell, 0

    def reach(self, done: int) -> None:
        if self._tell and done > self._told:
            self._tell(done - self._told)
            self._told = done


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
    metrics = {
        "loss": totals.get("loss", 0.0),
        "grad_norm": totals.get("grad_norm", 0.0),
        "tokens": tokens,
        "sampling_gap": totals["sampling_gap"] / tokens if tokens else 0.0,
        "entropy": -math.fsum(logp for s in samples for logp in s.sampling_logps) / max(_num_tokens(samples), 1),
    }
    for total, mean in (("clipped", "clip_frac"), ("kl", "kl")):
        if total in totals:
            metrics[mean] = totals[total] / max(tokens, 1.0)
    return metrics


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.completion_ids) for sample in samples)
