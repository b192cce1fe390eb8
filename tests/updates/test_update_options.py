"""What changes an update: epochs, KL, importance weights, schedules, precision; and that it is the same every time."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, CohereConfig, Gemma2Config, GraniteConfig

from magrpo.algo.advantages import group_advantages
from magrpo.config.agents import LoraConfig
from magrpo.config.sections import AlgoConfig, OptimConfig
from magrpo.engines.transformers import LocalEngine
from magrpo.errors import ConfigError
from magrpo.model import model_runs
from magrpo.model.collate import collate, plan_batches
from magrpo.model.forward import LogitMap, token_logits
from magrpo.model.lineup import Lineup
from magrpo.process.faults import is_out_of_memory
from magrpo.types import Request, Sample, SamplingParams
from magrpo.updates.optimizers import learning_rate
from magrpo.updates.updater import NonFiniteLoss, Updater
from magrpo_kernels import LossOptions, TokenInputs, group_policy_loss
from tests.tiny import VOCAB_SIZE, perturb, tiny_base, tiny_config, unmarked_base
from tests.updates.updating import (
    TEMPERATURE,
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
    saved_sizes,
    summed_kl,
    weights_of,
)

DEEP_HEAD = BertConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=256,
    is_decoder=True,
)
"""A model whose logits do not follow from its last hidden states by a linear layer alone."""
DEEP_LORA = LoraConfig(rank=4, target_modules=("query", "value"))


def test_several_epochs_use_the_clipped_ratio(any_base: Path, dump: Path) -> None:
    samples = make_samples()
    algo = {"update_epochs": 2, "clip_low": 0.1, "clip_high": 0.2}
    updater = make(any_base, dump, algo=algo)
    old = [naive_logps(updater, "main", s).detach() for s in samples]
    first = naive_gradient(updater, "main", on_policy(updater, samples, len(samples)))
    passes: list[bool] = []
    with before_each_pass(updater, lambda: passes.append(torch.is_grad_enabled())):
        steps = gradients_used(updater, samples)
    assert len(steps) == len(passes) == 2, "the first pass also finds the log-probabilities before it"
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


@pytest.mark.parametrize(
    ("any_base", "norm", "beta"),
    [
        ("linear head", "sequence_mean", 0.0),
        ("linear head", "sequence_mean", 0.2),
        ("linear head", "sequence_sum", 0.0),
        ("linear head", "sequence_sum", 0.2),
        ("scaled logits", "sequence_mean", 0.2),
    ],
    indirect=["any_base"],
)
def test_the_ratio_of_sequences_is_that_of_gspo(any_base: Path, dump: Path, norm: str, beta: float) -> None:
    """The second step takes the gradient of the objective of arXiv 2507.18071, equation 5, written out."""
    samples = make_samples()
    algo = {"loss_norm": norm, "beta": beta}
    ratio = {"update_epochs": 2, "ratio": "sequence", "clip_low": 0.15, "clip_high": 0.25}
    updater = make(any_base, dump, algo=algo | ratio, micro_batch_tokens=60)
    old = [naive_logps(updater, "main", s).detach() for s in samples]
    passes: list[bool] = []
    with before_each_pass(updater, lambda: passes.append(torch.is_grad_enabled())):
        steps = gradients_used(updater, samples)
    trained = [sample for sample in samples if sample.advantage or beta]
    num_batches = len(updater.memory.plan_micro_batches("main", trained))
    assert passes == [False] * (num_batches if beta else 0) + [True] * 2 * num_batches, "no pass only for the ratios"

    # The second step started from the weights that one on-policy step leaves.
    stepped = make(any_base, dump, algo=algo, micro_batch_tokens=60)
    assert_equal(gradients_used(stepped, samples)[0], steps[0])
    terms, sides = [], []
    for sample, before in zip(samples, old, strict=True):
        length = len(sample.completion_ids) if norm == "sequence_sum" else 1
        s = (naive_logps(stepped, "main", sample) - before).mean().exp()
        clipped = s.clamp(0.85, 1.25)
        sides.append(bool(clipped * sample.advantage < s * sample.advantage))
        terms.append(-length * torch.minimum(s * sample.advantage, clipped * sample.advantage))
        if beta:
            terms.append(beta * summed_kl(stepped, [sample]) * length / len(sample.completion_ids))
    assert set(sides) == {True, False}
    assert_close(steps[1], naive_gradient(stepped, "main", torch.stack(terms).sum() / len(samples)))


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


def test_cached_memory_is_released_after_the_last_step(base: Path, dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updater = make(base, dump, agents=("helper", "main"), algo={"update_epochs": 2})
    before = weights_of(updater)
    released: list[int] = []

    def release(_: Lineup) -> None:
        policy = updater.policy
        released.append(policy.version)
        assert all(p.grad is None for agent in policy.agents for p in policy.parameters(agent).values())
        assert any(not torch.equal(value, before[name]) for name, value in weights_of(updater).items())

    monkeypatch.setattr(Lineup, "release_cached_memory", release)
    updater.update({"helper": make_samples(1), "main": make_samples()})
    assert released == [1], "once, when all agents have taken their steps"


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


def test_an_importance_weight_of_one_epoch_takes_no_forward_pass_of_its_own(base: Path, dump: Path) -> None:
    updater, passes = make(base, dump, algo={"importance_cap": 1.5}), list[bool]()
    with before_each_pass(updater, lambda: passes.append(torch.is_grad_enabled())):
        updater.update({"main": make_samples()})
    assert passes == [True]


@pytest.mark.parametrize("options", [{}, {"normalize": "std"}, {"estimator": "marloo", "update_epochs": 2}])
def test_the_update_forms_the_advantages_of_the_paper_and_takes_others_as_given(
    base: Path, dump: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From all returns of a group, also those of completions whose own advantage is 0; to the last bit."""
    returns = [[0.1, 0.7, 0.4, 0.4], [0.3, 0.3, 0.3, 0.3], [1.0, 0.0, 2.0, 1.0]]
    algo = AlgoConfig.model_validate(options)
    advantages = [group_advantages(group, algo.estimator, algo.normalize) for group in returns]
    flat = zip(make_samples(), chain(*returns), chain(*advantages), strict=True)
    samples = [replace(sample, returns=value, advantage=advantage) for sample, value, advantage in flat]
    updater = make(base, dump, algo=options)
    expected = compute_gradient(updater, "main", [replace(sample, returns=0.0) for sample in samples])
    formed: list[bool] = []

    def spy(hidden: Tensor, weight: Tensor, inputs: TokenInputs, options: LossOptions, **rest: Any) -> Any:
        formed.append(inputs.groups is not None)
        return group_policy_loss(hidden, weight, inputs, options, **rest)

    monkeypatch.setattr(model_runs, "group_policy_loss", spy)
    assert_equal(compute_gradient(updater, "main", samples), expected)
    assert set(formed) == {algo.estimator == "magrpo"}


@pytest.mark.parametrize("head", ["capped", "scaled", "divided", "unknown"])
def test_models_that_cap_or_scale_logits_start_from_hidden_states(dump: Path, tmp_path: Path, head: str) -> None:
    common = {
        name: value for name, value in tiny_config().to_dict().items() if name not in ("model_type", "rope_theta")
    }
    described = {
        "capped": Gemma2Config(**common, final_logit_softcapping=0.5, attn_logit_softcapping=None),
        "scaled": CohereConfig(**common, logit_scale=0.25),
        "divided": GraniteConfig(**common, logits_scaling=2.0, attention_multiplier=tiny_config().head_dim ** -0.5),
        "unknown": DEEP_HEAD,
    }
    lora = DEEP_LORA if head == "unknown" else None
    updater, samples = make(tiny_base(tmp_path / head, described[head]), dump, lora=lora), make_samples()
    found = updater.gradients.models.logit_maps["main"]
    expected = {"capped": LogitMap(1, 0.5), "scaled": LogitMap(0.25), "divided": LogitMap(0.5), "unknown": None}
    assert found == expected[head]
    half = make(
        tiny_base(tmp_path / "half", described[head]), dump, "full", "bfloat16", head_dtype="float32", lora=lora
    )
    assert half.gradients.models.logit_maps["main"] == expected[head], "whatever the precision"
    wanted = naive_gradient(updater, "main", on_policy(updater, samples, len(samples)))
    assert_close(gradients_used(updater, samples)[0], wanted)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("weights", ["lora", "full"])
def test_float32_logits_are_those_of_the_engine_in_half_precision(
    base: Path, dump: Path, tmp_path: Path, weights: str, known: bool
) -> None:
    """An engine in this process samples from the model's own logits, the update computes its own if it knows how."""
    base = base if known else tiny_base(tmp_path / "deep", DEEP_HEAD)
    lora = None if known else DEEP_LORA
    samples, logps = make_samples(), {}
    for head_dtype in ("auto", "float32"):
        updater = make(base, dump, weights, "bfloat16", head_dtype=head_dtype, lora=lora)
        perturb(updater.policy, seed=1)
        batch = collate(samples, plan_batches(samples, 10_000, True)[0])
        active = updater.policy.active
        with active("main") as model, torch.no_grad():
            logits = token_logits(model, batch)
        assert logits.dtype == (torch.float32 if head_dtype == "float32" else torch.bfloat16)
        own = (logits.float() / TEMPERATURE).log_softmax(-1).gather(1, batch.tokens.token_ids[:, None])[:, 0]
        with torch.no_grad():
            hidden = updater.gradients.models.compute_logps("main", active("main"), batch, LossOptions(TEMPERATURE))
        logps[head_dtype] = hidden, own
        updater.update({"main": samples})
    torch.testing.assert_close(*logps["float32"], atol=1e-5, rtol=0)
    assert (logps["auto"][1] - logps["float32"][1]).abs().max() > 1e-3, "rounded"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("weights", "dtype"), [("lora", "float32"), ("lora", "bfloat16"), ("full", "bfloat16")])
def test_layers_computed_again_give_the_same_gradient_for_less_memory(
    base: Path, dump: Path, weights: str, dtype: str
) -> None:
    torch.set_num_threads(1)  # with more, gradients are computed in threads of their own, whose tensors no hook sees
    algo, samples = {"beta": 0.1, "update_epochs": 2}, make_samples()
    whole, again = (
        make(base, dump, weights, dtype, algo, ("helper", "main"), gradient_checkpointing=on) for on in (False, True)
    )
    gradients, sizes = [], []
    for updater in (whole, again):
        with saved_sizes(updater, "main") as kept:
            gradients.append(compute_gradient(updater, "main", samples))
        sizes.append(sum(kept.values()))
    assert_equal(*gradients)
    assert sizes[1] < sizes[0] / 2, sizes
    by_agent = {"helper": samples, "main": make_samples(1)}
    assert whole.update(by_agent) == again.update(by_agent)
    assert_equal(weights_of(whole), weights_of(again))
    for updater in (whole, again):  # it samples from a copy of the same layers
        served = LocalEngine(updater.policy, 8).serve(1, {})
        updater.policy.sources = {}
        request = Request("main", (3, 4, 5), SamplingParams(max_new_tokens=8, temperature=1.0), seed=0)
        gradients.append({"logps": torch.tensor(served.generate([request])[0].sampling_logps)})
    assert_equal(*gradients[2:])


def test_a_model_whose_layers_cannot_be_computed_again_is_refused(tmp_path: Path, dump: Path) -> None:
    base = unmarked_base(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"optim.gradient_checkpointing: OpenAIGPTLMHeadModel of .*set it to false"):
        make(base, dump, "full", gradient_checkpointing=True)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_memory_that_runs_out_outside_of_torchs_allocator_is_recognised(message: str, expected: bool) -> None:
    assert is_out_of_memory(RuntimeError(message)) is expected
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory"))


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


@pytest.mark.parametrize(("iterations", "says"), [(0, False), (1, True), (3, True), (4, False), (9, False)])
def test_a_warm_up_that_never_ends_is_described_with_the_rate_that_it_reaches(iterations: int, says: bool) -> None:
    optim = OptimConfig(lr=0.02, warmup_iterations=4)
    said = optim.describe_long_warmup(iterations)
    assert bool(said) == says
    if says:
        assert f"ends at {learning_rate(optim, iterations, iterations):g}, below its peak of optim.lr = 0.02" in said


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


def test_the_metrics_of_importance_weights_by_hand(base: Path, dump: Path) -> None:
    """With a lag only, and the loss does not change."""
    samples, cap = make_samples(), 1.2
    updater, without = (make(base, dump, algo={"importance_cap": cap}) for _ in range(2))
    updater = replace(updater, lag=1)
    logps = [naive_logps(updater, "main", s).detach() for s in samples]
    ratios = torch.cat(logps).sub(torch.tensor([logp for s in samples for logp in s.sampling_logps])).exp()
    ratios = ratios[torch.cat([torch.full((len(s.completion_ids),), s.advantage != 0) for s in samples])]
    weights = ratios.clamp(max=cap)
    metrics = updater.update({"main": samples})
    assert metrics["update/importance_mean"] == pytest.approx(float(weights.mean()), rel=1e-4)
    assert metrics["update/importance_capped_frac"] == pytest.approx(float((ratios > cap).float().mean()), rel=1e-4)
    effective = weights.sum().square() / weights.square().sum() / len(weights)
    assert metrics["update/importance_ess_frac"] == pytest.approx(float(effective), rel=1e-4)
    assert metrics["update/main/importance_mean"] == metrics["update/importance_mean"]
    before = without.update({"main": samples})
    assert before == {name: value for name, value in metrics.items() if "importance" not in name}


def test_the_sampling_gap_is_that_of_the_first_epoch_alone(base: Path, dump: Path) -> None:
    updater = make(base, dump, algo={"update_epochs": 2})
    exact = [replace(s, sampling_logps=tuple(naive_logps(updater, "main", s).tolist())) for s in make_samples()]
    assert updater.update({"main": exact})["update/sampling_gap"] < 1e-5
