"""The update's gradient, against a naive one: full logits, one completion at a time, differentiated by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier, current_thread
from typing import Any

import pytest
import torch
from torch import Tensor

from magrpo.config.agents import LoraConfig
from magrpo.config.sections import OptimConfig
from magrpo.engines.local.decoding import decoding_model
from magrpo.model.collate import plan_batches
from magrpo.types import Sample
from magrpo.updates.agent_batch import OrderedGradient
from tests.tiny import EOS, perturb, tiny_base, tiny_config
from tests.updates.updating import (
    assert_close,
    assert_equal,
    before_each_pass,
    compute_gradient,
    gradients_used,
    make,
    make_samples,
    naive_gradient,
    naive_logps,
    on_policy,
    run_out_of_memory,
    summed_kl,
    weights_of,
)


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
    alone = compute_gradient(updater, "main", samples)
    assert_equal(weights_of(updater), before)
    (used,) = gradients_used(updater, samples)
    assert_equal(alone, used)
    idle = compute_gradient(make(base, dump), "main", [replace(sample, advantage=0.0) for sample in samples])
    assert not any(bool(value.any()) for value in idle.values())


@pytest.mark.parametrize(
    ("norm", "beta"),
    [("sequence_sum", 0), ("sequence_sum", 0.1), ("sequence_mean", 0.1), ("token_mean", 0), ("dr_grpo", 0)],
)
def test_copies_that_share_a_weight_count_as_one(base: Path, dump: Path, norm: str, beta: float) -> None:
    """So the many completions of a later turn of a tree weigh as much as the few of the first one."""
    updater = make(base, dump, algo={"loss_norm": norm, "beta": beta})
    perturb(updater.policy, seed=1)
    samples = make_samples()
    halves = [replace(sample, weight=0.5) for sample in samples[4:]]
    expected = compute_gradient(updater, "main", samples)
    assert_close(compute_gradient(updater, "main", [*samples[:4], *halves, *halves]), expected)
    unused = [replace(sample, weight=0.0, advantage=1e9) for sample in samples]
    assert_close(compute_gradient(updater, "main", [*samples, *unused]), expected)
    assert not any(bool(value.any()) for value in compute_gradient(updater, "main", unused).values())


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


@pytest.mark.parametrize(("norm", "divisor"), [("token_mean", None), ("dr_grpo", 12 * 16)])
def test_loss_norms(base: Path, dump: Path, norm: str, divisor: int | None) -> None:
    samples = make_samples()
    divisor = divisor or sum(len(s.completion_ids) for s in samples)
    updater = make(base, dump, algo={"loss_norm": norm})
    expected = naive_gradient(updater, "main", on_policy(updater, samples, divisor))
    assert_close(gradients_used(updater, samples)[0], expected)


def test_the_calls_of_an_episode_count_as_one_episode(base: Path, dump: Path) -> None:
    samples = make_samples()
    counts = [0.75 if i % 2 else 0.25 for i in range(len(samples))]
    updater = make(base, dump)
    expected = naive_gradient(updater, "main", on_policy(updater, samples, len(samples) / 2))
    counted = [replace(sample, counts=count) for sample, count in zip(samples, counts, strict=True)]
    assert_close(gradients_used(updater, counted)[0], expected)


@pytest.mark.parametrize("budget", [1, 30, 60])
def test_micro_batches_and_order_change_nothing_but_rounding(base: Path, dump: Path, budget: int) -> None:
    samples = make_samples()
    shuffled = [samples[(5 * i) % len(samples)] for i in range(len(samples))]
    (whole,) = gradients_used(make(base, dump), samples)
    (split,) = gradients_used(make(base, dump, micro_batch_tokens=budget), shuffled)
    assert_close(split, whole)


def test_the_size_of_micro_batches_follows_the_device_unless_it_is_given(base: Path, dump: Path) -> None:
    assert make(base, dump).memory.micro_batch_tokens == 1024
    assert make(base, dump, micro_batch_tokens=30).memory.micro_batch_tokens == 30
    assert OptimConfig().count_micro_batch_tokens("cuda") == 16384
    assert OptimConfig(micro_batch_tokens=30).count_micro_batch_tokens("cuda") == 30


@pytest.mark.parametrize("algo", [{}, {"update_epochs": 2, "beta": 0.1, "importance_cap": 2.0}])
def test_memory_that_does_not_suffice_halves_the_micro_batches(
    base: Path, dump: Path, caplog: pytest.LogCaptureFixture, algo: dict[str, Any]
) -> None:
    """It runs out in the second micro-batch of the last epoch, with gradients of the first in place, and twice more."""
    samples, told = make_samples(groups=8), list[int]()
    whole = make(base, dump, algo=algo, micro_batch_tokens=64)
    expected = gradients_used(whole, samples)
    updater = make(base, dump, algo=algo, micro_batch_tokens=64)
    passes, left = 0, 3
    first_epochs = (len(expected) - 1) * len(plan_batches(samples, 64, True))

    def be_short_of_memory() -> None:
        nonlocal passes, left
        if torch.is_grad_enabled():  # not a pass over the reference policy
            passes += 1
        if left and passes >= first_epochs + 2:
            left -= 1
            run_out_of_memory()

    steps: list[dict[str, Tensor]] = []
    hook = updater.optimizers["main"].register_step_pre_hook(
        lambda *_: steps.append({n: p.grad.clone() for n, p in updater.policy.parameters("main").items()})
    )
    with before_each_pass(updater, be_short_of_memory):
        metrics = updater.update({"main": samples}, told.append)
    hook.remove()
    assert left == 0
    assert len(steps) == len(expected)
    for ours, theirs in zip(steps, expected, strict=True):
        assert_close(ours, theirs)
    assert metrics["update/micro_batch_tokens"] == updater.memory.micro_batch_tokens <= 64 / 2**3
    assert sum(told) == len(samples)
    assert sum("out of GPU memory" in record.message for record in caplog.records) == 3


def test_a_completion_that_does_not_fit_alone_ends_the_update(base: Path, dump: Path) -> None:
    updater = make(base, dump)
    before = weights_of(updater)
    with before_each_pass(updater, run_out_of_memory), pytest.raises(torch.cuda.OutOfMemoryError):
        updater.update({"main": make_samples()})
    assert_equal(weights_of(updater), before)


def test_siblings_apart_are_siblings_in_one_row(base: Path, dump: Path) -> None:
    together, apart = make(base, dump), make(base, dump)
    assert together.gradients.models.shares_prompts == {"main": True}
    apart.gradients.models.shares_prompts["main"] = False
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


@pytest.mark.parametrize("options", [{}, {"beta": 0.1, "update_epochs": 2}])
@pytest.mark.usefixtures("threads")
def test_agents_side_by_side_take_the_steps_that_each_takes_alone(
    base: Path, dump: Path, options: dict[str, Any]
) -> None:
    samples = {"helper": make_samples(0), "main": make_samples(1), "third": make_samples(2)}
    alone, finished = dict[str, dict[str, Tensor]](), list[int]()
    torch.set_num_threads(1)
    for agent in samples:
        updater = make(base, dump, agents=tuple(samples), micro_batch_tokens=30, algo=options)
        updater.update({name: samples[agent] if name == agent else [] for name in samples})
        alone[agent] = weights_of(updater, agent)
    torch.set_num_threads(3)
    together = make(base, dump, agents=tuple(samples), micro_batch_tokens=30, algo=options)
    threads = set[str]()
    together.policy.run = note_thread(together.policy.run, threads, Barrier(3))  # type: ignore[method-assign]
    together.update(samples, finished.append)
    assert len(threads) == 3
    assert sum(finished) == sum(map(len, samples.values()))
    assert torch.get_num_threads() == 3
    for agent, weights in alone.items():
        assert_equal(weights_of(together, agent), weights)


def note_thread(run: Callable[..., Any], threads: set[str], meeting: Barrier) -> Callable[..., Any]:
    """The same function, which adds the name of the thread that calls it; in its first call each waits for all."""

    def noting(*arguments: Any) -> Any:
        if current_thread().name not in threads:
            threads.add(current_thread().name)
            meeting.wait(300)
        return run(*arguments)

    return noting


def test_micro_batches_are_added_in_their_order_whichever_is_done_first() -> None:
    weights, idle = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(1))
    gradient = OrderedGradient([weights, idle])
    slopes = [1e8, 1.0, -1e8]
    for number in (2, 0, 1):
        gradient.add(number, slopes[number] * weights.sum())
    assert weights.grad is not None
    assert weights.grad.tolist() == [0.0] * 3, "1e8 + 1 - 1e8 in float32"
    assert idle.grad is None


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
