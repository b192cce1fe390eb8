"""Updaters of tiny models, and what they are held against: full logits, one completion at a time, autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.config.sections import AlgoConfig, OptimConfig, RolloutConfig
from magrpo.model.forward import find_decoder
from magrpo.model.lineup import Lineup
from magrpo.model.policy import Policy
from magrpo.model.sharding import gather_tensor
from magrpo.types import Sample
from magrpo.updates.agent_batch import CompletionCounter
from magrpo.updates.lanes import OneRank, Ranks
from magrpo.updates.updater import Updater
from tests.tiny import EOS

TEMPERATURE = 0.7


def make(
    base: Path,
    dump: Path,
    weights: str = "lora",
    dtype: str = "auto",
    algo: dict[str, Any] | None = None,
    agents: Sequence[str] = ("main",),
    num_iterations: int = 10,
    lora: LoraConfig | None = None,
    own: Mapping[str, dict[str, Any]] | None = None,
    head_dtype: str = "auto",
    ranks: Ranks | None = None,
    **optim: Any,
) -> Updater:
    """An updater on a CPU for agents of one base, without clipping by default so that gradients can be compared."""
    common = {"model": str(base), "weights": weights}
    configs = [
        AgentConfig.model_validate({"name": name, "role": name, **common, **(own or {}).get(name, {})})
        for name in agents
    ]
    model = ModelConfig.model_validate({"device": "cpu", "dtype": dtype, "head_dtype": head_dtype})
    return Updater(
        Policy.of(_open_lineup(tuple(configs), model, lora or LoraConfig(rank=4)), seed=0),
        AlgoConfig.model_validate(algo or {}),
        OptimConfig.model_validate({"lr": 1e-3, "max_grad_norm": 1e9, **optim}),
        RolloutConfig(temperature=TEMPERATURE, max_new_tokens=16),
        num_iterations,
        dump,
        ranks or OneRank(),
    )


def compute_gradient(updater: Updater, agent: str, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The gradient of an update by parameter, before clipping; takes no step."""
    samples_by_agent = {agent: samples}
    agent = updater.policy.lineup.holder(agent)
    batch = updater._plan_batch(agent, samples_by_agent)
    if batch.samples:
        batches, constants = updater._find_constants([batch])
        compute = partial(updater.gradients.compute_gradients, constants, CompletionCounter(None))
        (batch,), (part,) = updater.memory.fit_memory(batches, compute)
        updater.gradients.add_ranks(batch, part)
    gradients = {
        name: gather_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
        for name, parameter in updater.policy.parameters(agent).items()
    }
    updater.policy.clear_gradients(agent)
    return gradients


@cache
def _open_lineup(configs: Sequence[AgentConfig], model: ModelConfig, lora: LoraConfig) -> Lineup:
    return Lineup.open(configs, model, lora)


def make_samples(seed: int = 0, groups: int = 3, size: int = 4) -> list[Sample]:
    """Completions of one to ten tokens, the longer ones ended by the end-of-sequence token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for group in range(groups):
        prompt = tuple(draw(3, 250) for _ in range(draw(2, 9)))
        for _ in range(size):
            completion = [draw(3, 250) for _ in range(draw(1, 10))]
            completion += [EOS] if len(completion) > 1 else []
            logps = tuple(-draw(1, 100) / 50 for _ in completion)
            samples.append(Sample(prompt, tuple(completion), logps, 0.0, draw(-20, 20) / 10, group, 0))
    return samples


def assert_same_steps(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], num_steps: int, lr: float, gap: float = 1e-6
) -> None:
    """Weights differ by rounding, ``gap``, but for few: Adam divides a gradient by its size, one of rounding, too."""
    assert weights.keys() == expected.keys()
    gaps = torch.cat([(tensor - expected[name]).abs().flatten() for name, tensor in weights.items()])
    assert float(gaps.max()) <= 2 * lr * num_steps, gaps.max()
    assert float((gaps > gap).float().mean()) < 1e-4, gaps[gaps > gap]


def with_support(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples, as if each token had been drawn from every seventh id or so and itself."""
    return [
        replace(
            sample,
            support=tuple(
                tuple(sorted({token, *range(step % 7, 250, 7 + token % 50)}))
                for step, token in enumerate(sample.completion_ids)
            ),
        )
        for sample in samples
    ]


def naive_logps(updater: Updater, agent: str, sample: Sample, reference: bool = False) -> Tensor:
    """Log-probabilities (T,) of a completion from full logits without padding, over its support if it has one."""
    policy = updater.policy
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    with policy.reference(agent) if reference else policy.active(agent) as model:
        logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    chosen = torch.tensor(sample.completion_ids)[:, None]
    if sample.support:
        inside = [torch.tensor(ids) for ids in sample.support]
        rows = zip(torch.full_like(logits, -torch.inf), logits, inside, strict=True)
        logits = torch.stack([outside.index_copy(0, ids, row[ids]) for outside, row, ids in rows])
    return (logits.float() / TEMPERATURE).log_softmax(-1).gather(1, chosen)[:, 0]


def naive_gradient(updater: Updater, agent: str, loss: Tensor) -> dict[str, Tensor]:
    parameters = updater.policy.parameters(agent)
    slopes = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), slopes, strict=True)}


def on_policy(updater: Updater, samples: Sequence[Sample], divisor: float) -> Tensor:
    return -sum((s.advantage * naive_logps(updater, "main", s).sum() for s in samples), torch.zeros(())) / divisor


def summed_kl(updater: Updater, samples: Sequence[Sample]) -> Tensor:
    """The k3 estimate of the KL divergence of ``main`` from its reference, summed over tokens and differentiable."""
    terms = []
    for sample in samples:
        ref = naive_logps(updater, "main", sample, reference=True).detach()
        difference = ref - naive_logps(updater, "main", sample)
        terms.append((difference.exp() - difference - 1).sum())
    return torch.stack(terms).sum()


def gradients_used(updater: Updater, samples: Sequence[Sample], agent: str = "main") -> list[dict[str, Tensor]]:
    """The gradients of each optimizer step that one update takes."""
    parameters = updater.policy.parameters(agent)
    steps: list[dict[str, Tensor]] = []

    def record(*_: object) -> None:
        slopes = {name: p.grad for name, p in parameters.items()}
        steps.append({n: torch.zeros_like(parameters[n]) if g is None else g.clone() for n, g in slopes.items()})

    hook = updater.optimizers[agent].register_step_pre_hook(record)
    updater.update({agent: list(samples)})
    hook.remove()
    return steps


@contextmanager
def before_each_pass(updater: Updater, call: Callable[[], None]) -> Iterator[None]:
    """Make this call before each forward pass of the agent ``main``."""
    with updater.policy.active("main") as model:
        hook = find_decoder(model).register_forward_pre_hook(lambda *_: call())
    try:
        yield
    finally:
        hook.remove()


def run_out_of_memory() -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


def weights_of(updater: Updater, agent: str = "main") -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in updater.policy.parameters(agent).items()}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(float(value.abs().max()) for value in theirs.values())
    for name, value in ours.items():
        name_it = partial("{}: {}".format, name)
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5 * scale, msg=name_it)


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@contextmanager
def saved_sizes(updater: Updater, agent: str) -> Iterator[dict[int, int]]:
    """Bytes of the tensors that backward passes of the block keep, by address of their memory; not those of weights."""
    sizes: dict[int, int] = {}
    with updater.policy.active(agent) as model:
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield sizes
