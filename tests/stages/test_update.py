"""The update against a naive one: full logits, one completion at a time, differentiated by autograd."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import GraniteConfig

from magrpo.collate import plan
from magrpo.config import AgentConfig, AlgoConfig, LoraConfig, ModelConfig, OptimConfig
from magrpo.engines.decoding import decoding_model
from magrpo.policy import Policy
from magrpo.stages.update import NonFiniteLoss, Updater, learning_rate
from magrpo.types import Sample
from tests.tiny import EOS, perturb, tiny_base, tiny_config

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module", params=["linear head", "scaled logits"])
def any_base(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is a linear layer, and one that does more to its logits."""
    if request.param == "linear head":
        return base
    plain = tiny_config()
    config = GraniteConfig(**{**plain.to_dict(), "model_type": "granite", "logits_scaling": 2.0})
    return tiny_base(tmp_path_factory.mktemp("scaled"), config)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return tmp_path / "failed-batch"


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
    **optim: Any,
) -> Updater:
    common = {"model": str(base), "weights": weights}
    configs = [
        AgentConfig.model_validate({"name": name, "role": name, **common, **(own or {}).get(name, {})})
        for name in agents
    ]
    model = ModelConfig.model_validate({"device": "cpu", "dtype": dtype})
    return Updater(
        Policy.open(configs, model, lora or LoraConfig(rank=4), seed=0),
        AlgoConfig.model_validate(algo or {}),
        OptimConfig.model_validate({"lr": 1e-3, "max_grad_norm": 1e9, **optim}),
        temperature=TEMPERATURE,
        max_new_tokens=16,
        num_iterations=num_iterations,
        dump=dump,
    )


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


def naive_logps(updater: Updater, agent: str, sample: Sample, reference: bool = False) -> Tensor:
    policy = updater.policy
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    with policy.reference(agent) if reference else policy.active(agent) as model:
        logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    chosen = torch.tensor(sample.completion_ids)[:, None]
    return (logits.float() / TEMPERATURE).log_softmax(-1).gather(1, chosen)[:, 0]


def naive_gradient(updater: Updater, agent: str, loss: Tensor) -> dict[str, Tensor]:
    parameters = updater.policy.parameters(agent)
    slopes = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), slopes, strict=True)}


def on_policy(updater: Updater, samples: Sequence[Sample], divisor: float) -> Tensor:
    return -sum((s.advantage * naive_logps(updater, "main", s).sum() for s in samples), torch.zeros(())) / divisor


def summed_kl(updater: Updater, samples: Sequence[Sample]) -> Tensor:
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

    hook = updater._optimizers[agent].register_step_pre_hook(record)
    updater.update({agent: list(samples)})
    hook.remove()
    return steps


def weights_of(updater: Updater, agent: str = "main") -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in updater.policy.parameters(agent).items()}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(float(value.abs().max()) for value in theirs.values())
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


# ------------------------------------------------------------------------------------------------------ the gradient
@pytest.mark.parametrize("weights", ["lora", "full"])
def test_the_gradient_is_that_of_reinforce_at_its_temperature(any_base: Path, dump: Path, weights: str) -> None:
    updater, samples = make(any_base, dump, weights), make_samples()
    expected = naive_gradient(updater, "main", on_policy(updater, samples, len(samples)))
    (used,) = gradients_used(updater, samples)
    assert_close(used, expected)


def test_the_gradient_alone_is_the_one_that_an_update_takes_and_changes_nothing(base: Path, dump: Path) -> None:
    updater, samples = make(base, dump, micro_batch_tokens=30, algo={"beta": 0.1}), make_samples()
    perturb(updater.policy, seed=1)
    before = weights_of(updater)
    alone = updater.gradient("main", samples)
    assert_equal(weights_of(updater), before)
    (used,) = gradients_used(updater, samples)
    assert_equal(alone, used)
    idle = make(base, dump).gradient("main", [replace(sample, advantage=0.0) for sample in samples])
    assert not any(bool(value.any()) for value in idle.values())


def test_an_adapter_on_the_head_trains_and_decodes(tmp_path: Path, dump: Path) -> None:
    base = tiny_base(tmp_path / "base", tiny_config(tie=False))
    updater = make(base, dump, lora=LoraConfig(rank=4, target_modules=("q_proj", "lm_head")), algo={"beta": 0.1})
    perturb(updater.policy, seed=1)
    samples = make_samples()
    expected = naive_gradient(
        updater, "main", on_policy(updater, samples, len(samples)) + 0.1 * summed_kl(updater, samples) / len(samples)
    )
    with decoding_model(updater.policy, "main") as merged, updater.policy.active("main") as model, torch.no_grad():
        ids = torch.tensor([[5, 6, 7]])
        torch.testing.assert_close(merged(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    (used,) = gradients_used(updater, samples)
    assert any("lm_head" in name and bool(value.any()) for name, value in used.items())
    assert_close(used, expected)


def test_the_end_of_sequence_token_counts(base: Path, dump: Path) -> None:
    ended = Sample((5, 6), (7, 8, EOS), (-1.0,) * 3, 0.0, 1.0, 0, 0)
    cut = Sample((5, 6), (7, 8), (-1.0,) * 2, 0.0, 1.0, 0, 0)
    updater = make(base, dump, "full")
    alone = naive_gradient(updater, "main", -naive_logps(updater, "main", ended)[-1])
    (whole,), (shorter,) = (gradients_used(make(base, dump, "full"), [s]) for s in (ended, cut))
    assert_close({name: whole[name] - shorter[name] for name in whole}, alone)


@pytest.mark.parametrize(("norm", "divisor"), [("sequence_sum", 12), ("token_mean", None), ("dr_grpo", 12 * 16)])
def test_loss_norms(base: Path, dump: Path, norm: str, divisor: int | None) -> None:
    samples = make_samples()
    divisor = divisor or sum(len(s.completion_ids) for s in samples)
    updater = make(base, dump, algo={"loss_norm": norm})
    expected = naive_gradient(updater, "main", on_policy(updater, samples, divisor))
    assert_close(gradients_used(updater, samples)[0], expected)


@pytest.mark.parametrize("budget", [1, 30, 60])
def test_micro_batches_and_order_change_nothing_but_rounding(base: Path, dump: Path, budget: int) -> None:
    samples = make_samples()
    shuffled = [samples[(5 * i) % len(samples)] for i in range(len(samples))]
    (whole,) = gradients_used(make(base, dump), samples)
    (split,) = gradients_used(make(base, dump, micro_batch_tokens=budget), shuffled)
    assert_close(split, whole)


@pytest.mark.parametrize("algo", [{}, {"update_epochs": 2, "beta": 0.1, "importance_cap": 2.0}])
@pytest.mark.parametrize("times", [1, 3])
def test_memory_that_does_not_suffice_halves_the_micro_batches(
    base: Path,
    dump: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    algo: dict[str, Any],
    times: int,
) -> None:
    """The fake runs out in the second micro-batch of the last epoch, with gradients of the first in place."""
    samples, told = make_samples(groups=8), list[int]()
    whole = make(base, dump, algo=algo, micro_batch_tokens=64)
    expected = gradients_used(whole, samples)
    updater = make(base, dump, algo=algo, micro_batch_tokens=64)
    loss, calls, left = updater._loss, 0, times
    first_epochs = (len(expected) - 1) * len(plan(samples, 64, True))

    def short_of_memory(*arguments: Any) -> Any:
        nonlocal calls, left
        calls += 1
        if left and calls >= first_epochs + 2:
            left -= 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return loss(*arguments)

    monkeypatch.setattr(updater, "_loss", short_of_memory)
    steps: list[dict[str, Tensor]] = []
    hook = updater._optimizers["main"].register_step_pre_hook(
        lambda *_: steps.append({n: p.grad.clone() for n, p in updater.policy.parameters("main").items()})
    )
    metrics = updater.update({"main": samples}, told.append)
    hook.remove()
    assert left == 0
    assert len(steps) == len(expected)
    for ours, theirs in zip(steps, expected, strict=True):
        assert_close(ours, theirs)
    assert metrics["update/micro_batch_tokens"] == updater.micro_batch_tokens <= 64 / 2**times
    assert sum(told) == len(samples)
    assert sum("out of GPU memory" in record.message for record in caplog.records) == times


def test_a_completion_that_does_not_fit_alone_ends_the_update(
    base: Path, dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = make(base, dump)
    before = weights_of(updater)

    def never(*_: object) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(updater, "_loss", never)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        updater.update({"main": make_samples()})
    assert_equal(weights_of(updater), before)


def test_siblings_apart_are_siblings_in_one_row(base: Path, dump: Path) -> None:
    together, apart = make(base, dump), make(base, dump)
    assert together._shares == {"main": True}
    apart._shares = {"main": False}
    samples = make_samples()
    assert_close(gradients_used(apart, samples)[0], gradients_used(together, samples)[0])


def test_samples_without_advantage_are_skipped_and_change_nothing(base: Path, dump: Path) -> None:
    samples = make_samples()
    flat = [s if s.group else Sample(s.prompt_ids, s.completion_ids, s.sampling_logps, 0.0, 0.0, 0, 0) for s in samples]
    updater = make(base, dump)
    expected = naive_gradient(updater, "main", on_policy(updater, [s for s in flat if s.group], len(flat)))
    rows: list[int] = []
    with updater.policy.active("main") as model:
        model.base_model.register_forward_pre_hook(
            lambda _m, _a, kw: rows.append(len(kw["input_ids"])), with_kwargs=True
        )
    (used,) = gradients_used(updater, flat)
    assert_close(used, expected)
    assert sum(rows) == 2  # a row for each group but the one without advantage


def test_an_update_without_any_advantage_changes_nothing(base: Path, dump: Path) -> None:
    updater = make(base, dump, weight_decay=0.1)
    before = weights_of(updater)
    flat = [Sample(s.prompt_ids, s.completion_ids, s.sampling_logps, 0.0, 0.0, 0, 0) for s in make_samples()]
    metrics = updater.update({"main": flat})
    assert_equal(weights_of(updater), before)
    assert metrics["update/main/tokens"] == 0.0
    assert metrics["update/main/grad_norm"] == 0.0
    assert updater.policy.version == 1
    assert updater.update({"main": []})["update/main/tokens"] == 0.0


def test_gradients_are_clipped_for_each_agent(base: Path, dump: Path) -> None:
    updater = make(base, dump, max_grad_norm=0.01)
    (used,) = gradients_used(updater, make_samples())
    assert math.sqrt(sum(float(g.square().sum()) for g in used.values())) == pytest.approx(0.01, rel=1e-3)


def test_agents_train_apart(base: Path, dump: Path) -> None:
    updater = make(base, dump, agents=("helper", "main"))
    before = {agent: weights_of(updater, agent) for agent in ("helper", "main")}
    updater.update({"helper": [], "main": make_samples()})
    assert_equal(weights_of(updater, "helper"), before["helper"])
    alone = make(base, dump)
    alone.update({"main": make_samples()})
    assert_equal(weights_of(updater, "main"), weights_of(alone))


def test_agents_that_share_an_adapter_take_one_step_on_all_samples(base: Path, dump: Path, tmp_path: Path) -> None:
    updater = make(base, dump, "shared", agents=("helper", "main"))
    metrics = updater.update({"helper": make_samples(0), "main": make_samples(1)})
    alone = make(base, dump, agents=("helper",))
    expected = alone.update({"helper": make_samples(0) + make_samples(1)})
    assert_equal(weights_of(updater, "main"), weights_of(alone, "helper"))
    assert metrics == expected
    updater.save(tmp_path)
    again = make(base, dump, "shared", agents=("helper", "main"))
    again.load(tmp_path)
    for one in (updater, again):
        one.update({"helper": [], "main": make_samples(2)})
    assert_equal(weights_of(again, "helper"), weights_of(updater, "main"))


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_frozen_agent_has_no_optimizer_and_keeps_its_weights(
    base: Path, dump: Path, tmp_path: Path, weights: str
) -> None:
    frozen: dict[str, dict[str, Any]] = {"helper": {"trained": False}}
    updater = make(base, dump, weights, agents=("helper", "main"), own=frozen)
    before = weights_of(updater, "helper")
    metrics = updater.update({"main": make_samples()})
    assert_equal(weights_of(updater, "helper"), before)
    assert not [key for key in metrics if "helper" in key]
    updater.save(tmp_path)
    stored = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert stored["optimizers"].keys() == {"main"}
    again = make(base, dump, weights, agents=("helper", "main"), own=frozen)
    again.load(tmp_path)
    assert_equal(weights_of(again, "helper"), before)
    for one in (updater, again):
        one.update({"main": make_samples(1)})
    assert_equal(weights_of(again, "main"), weights_of(updater, "main"))
    alone = make(base, dump, weights)
    alone.update({"main": make_samples()})
    alone.update({"main": make_samples(1)})
    assert_equal(weights_of(updater, "main"), weights_of(alone))


def test_an_agent_may_have_a_learning_rate_of_its_own(base: Path, dump: Path) -> None:
    updater = make(base, dump, agents=("helper", "main"), own={"helper": {"lr": 5e-4}}, warmup_iterations=4)
    metrics = updater.update({"helper": make_samples(), "main": make_samples()})
    assert (metrics["update/helper/lr"], metrics["update/lr"]) == (5e-4 / 4, 1e-3 / 4)
    assert "update/main/lr" not in metrics
    slower = make(base, dump, agents=("helper",), lr=5e-4, warmup_iterations=4)
    slower.update({"helper": make_samples()})
    assert_equal(weights_of(updater, "helper"), weights_of(slower, "helper"))


# ----------------------------------------------------------------------------------------------------------- options
def test_several_epochs_use_the_clipped_ratio(any_base: Path, dump: Path) -> None:
    samples = make_samples()
    algo = {"update_epochs": 2, "clip_low": 0.1, "clip_high": 0.2}
    updater = make(any_base, dump, algo=algo)
    old = [naive_logps(updater, "main", s).detach() for s in samples]
    first = naive_gradient(updater, "main", on_policy(updater, samples, len(samples)))
    steps = gradients_used(updater, samples)
    assert len(steps) == 2
    assert_close(steps[0], first)  # ratio 1

    # The second step started from the weights that one on-policy step leaves.
    stepped = make(any_base, dump)
    stepped.update({"main": samples})
    terms = []
    for sample, before in zip(samples, old, strict=True):
        ratio = (naive_logps(stepped, "main", sample) - before).exp()
        terms.append(torch.minimum(ratio * sample.advantage, ratio.clamp(0.9, 1.2) * sample.advantage).sum())
    assert_close(steps[1], naive_gradient(stepped, "main", -torch.stack(terms).sum() / len(samples)))
    metrics = updater.update({"main": samples})
    assert 0.0 <= metrics["update/main/clip_frac"] <= 1.0


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_the_kl_term_pulls_towards_the_untrained_policy(any_base: Path, dump: Path, weights: str) -> None:
    samples = make_samples()
    flat = [Sample(s.prompt_ids, s.completion_ids, s.sampling_logps, 0.0, 0.0, 0, 0) for s in samples]
    updater = make(any_base, dump, weights, algo={"beta": 0.5})
    first = updater.update({"main": samples})
    assert first["update/main/kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["update/main/tokens"] == sum(len(s.completion_ids) for s in samples), "none is skipped"
    kl = summed_kl(updater, flat)
    expected = naive_gradient(updater, "main", 0.5 * kl / len(flat))
    (used,) = gradients_used(updater, flat)
    assert_close(used, expected)
    num_tokens = sum(len(s.completion_ids) for s in flat)
    fresh = make(any_base, dump, weights, algo={"beta": 0.5})
    fresh.update({"main": samples})
    second = fresh.update({"main": flat})
    assert second["update/main/kl"] == pytest.approx(float(kl.detach()) / num_tokens, rel=1e-3)


def test_truncated_importance_weights_correct_for_the_engine(any_base: Path, dump: Path) -> None:
    samples = make_samples()
    updater = make(any_base, dump, algo={"importance_cap": 1.5})
    terms = []
    for sample in samples:
        logps = naive_logps(updater, "main", sample)
        weights = (logps.detach() - torch.tensor(sample.sampling_logps)).exp().clamp(max=1.5)
        terms.append(-(sample.advantage * weights * logps).sum() / len(samples))
    expected = naive_gradient(updater, "main", torch.stack(terms).sum())
    assert_close(gradients_used(updater, samples)[0], expected)


def test_metrics_by_hand(base: Path, dump: Path) -> None:
    samples = make_samples()
    updater = make(base, dump, agents=("helper", "main"))
    logps = [naive_logps(updater, "main", s).detach() for s in samples]
    gap = torch.cat(logps) - torch.tensor([logp for s in samples for logp in s.sampling_logps])
    exact = [
        Sample(s.prompt_ids, s.completion_ids, tuple(own.tolist()), 0.0, s.advantage, s.group, 0)
        for s, own in zip(samples, logps, strict=True)
    ]
    done: list[int] = []
    metrics = updater.update({"helper": exact, "main": samples}, done.append)
    kept = torch.cat([torch.full((len(s.completion_ids),), s.advantage != 0) for s in samples])
    assert metrics["update/helper/sampling_gap"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["update/main/sampling_gap"] == pytest.approx(float(gap.abs()[kept].mean()), rel=1e-4)
    assert metrics["update/sampling_gap"] == pytest.approx(metrics["update/main/sampling_gap"] / 2, rel=1e-3)
    assert metrics["update/main/tokens"] == float(kept.sum())
    assert metrics["update/helper/entropy"] == pytest.approx(-float(torch.cat(logps).mean()), rel=1e-4)
    assert metrics["update/lr"] == 1e-3
    assert sum(done) == 2 * len(samples)
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert len(metrics) < 30


# ------------------------------------------------------------------------------------------------- schedule, numerics
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + 2**0.5 / 4, 0.5, 0.5 - 2**0.5 / 4, 0.0]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    # Two updates of warm-up, six in all: the seventh would have the rate 0.
    optim = OptimConfig.model_validate({"lr": 1.0, "schedule": schedule, "warmup_iterations": 2})
    assert [learning_rate(optim, update, 6) for update in range(1, 8)] == pytest.approx(expected)


def test_the_schedule_counts_updates_and_survives_loading(base: Path, dump: Path, tmp_path: Path) -> None:
    def fresh() -> Updater:
        return make(base, dump, schedule="linear", num_iterations=4)

    updater = fresh()
    rates = [updater.update({"main": make_samples(i)})["update/lr"] for i in range(2)]
    updater.save(tmp_path)
    resumed = fresh()
    resumed.load(tmp_path)
    rates += [resumed.update({"main": make_samples(i)})["update/lr"] for i in range(2)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_bfloat16_base_moves_at_a_small_learning_rate(base: Path, dump: Path, weights: str) -> None:
    updater = make(base, dump, weights, "bfloat16", lr=5e-6)
    before = weights_of(updater)
    updater.update({"main": make_samples()})
    name = next(n for n in before if ("lora_B" if weights == "lora" else "q_proj") in n)
    after = weights_of(updater)[name]
    assert float((after - before[name]).abs().max()) == pytest.approx(5e-6, rel=0.05)
    if weights == "full":  # what a bfloat16 weight would have made of the same step: nothing, almost everywhere
        stuck = after.bfloat16() == before[name].bfloat16()
        assert float(stuck.float().mean()) > 0.9


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_and_saves_the_batch(base: Path, dump: Path, bad: float) -> None:
    updater = make(base, dump, micro_batch_tokens=1)
    before = weights_of(updater)
    samples = make_samples()
    broken = samples[5]
    samples[5] = Sample(broken.prompt_ids, broken.completion_ids, broken.sampling_logps, 0.0, bad, 1, 0)
    with pytest.raises(NonFiniteLoss, match=r"update 1, agent 'main'.*failed-batch/update-1-main.jsonl") as caught:
        updater.update({"main": samples})
    assert "nan" in str(caught.value) or "inf" in str(caught.value)
    assert_equal(weights_of(updater), before)
    assert updater.policy.version == 0
    lines = (dump / "update-1-main.jsonl").read_bytes().splitlines()
    saved = [msgspec.json.decode(line) for line in lines]
    assert [tuple(record["completion_ids"]) for record in saved] == [broken.completion_ids]


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_the_same_run_is_the_same_bit_for_bit_resumed_or_not(
    base: Path, dump: Path, tmp_path: Path, weights: str
) -> None:
    def run(updates: range, updater: Updater) -> list[dict[str, float]]:
        agents = updater.policy.agents
        return [updater.update({agent: make_samples(10 * i + k) for k, agent in enumerate(agents)}) for i in updates]

    def fresh() -> Updater:
        return make(base, dump, weights, agents=("helper", "main"), weight_decay=0.01)

    whole, first, resumed = fresh(), fresh(), fresh()
    metrics = run(range(4), whole)
    early = run(range(2), first)
    first.save(tmp_path / "half")
    resumed.load(tmp_path / "half")
    assert early + run(range(2, 4), resumed) == metrics
    for agent in whole.policy.agents:
        assert_equal(weights_of(whole, agent), weights_of(resumed, agent))
    for updater, name in ((whole, "whole"), (resumed, "resumed")):
        updater.save(tmp_path / name)
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    assert Path("optimizer.pt") in files
    assert all((tmp_path / "whole" / f).read_bytes() == (tmp_path / "resumed" / f).read_bytes() for f in files)
