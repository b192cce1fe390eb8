"""``magrpo bench iteration``: times sampling and update of one iteration in this process against a plain version.

The plain implementation takes one agent after another on all cores, runs every decoding step through the modules of
transformers, and updates through peft's own layers in micro-batches of :data:`PLAIN_TOKENS` tokens. A decoding step
with truncated sampling is timed against one without. Afterwards the time of one core is divided among kinds of
operation; the share of matrix products says how near prefill, decoding and update are to what the core can do.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
from cyclopts import Parameter, validators
from peft.tuners.lora import Linear as LoraLinear
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedModel

from magrpo.algo.stats import seed_interval
from magrpo.config.run import RunConfig, load_config
from magrpo.engines.local.decoding import decoding_model, start_padded
from magrpo.engines.local.sampling import TokenSampler
from magrpo.engines.transformers import LocalEngine
from magrpo.envs.program import AgentProgram
from magrpo.errors import ConfigError
from magrpo.model.lora import FusedLoraLinear
from magrpo.model.policy import Policy
from magrpo.planning.precision import settle_dtype
from magrpo.progress.console import RunConsole
from magrpo.progress.state import RunState
from magrpo.run.files import locate_weights, read_scored
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.seeds import derive_seed
from magrpo.stages.credit import CreditRules, credit
from magrpo.stages.rollout import sampling_params
from magrpo.training.stages import StageRunner
from magrpo.types import Request, RolloutGroup, Sample, SamplingParams, ScoredTurn
from magrpo.updates.updater import Updater
from pipelines.arguments import ConfigFile, Overrides
from pipelines.benchmarks.engines import compare_engines, sample_through_modules
from pipelines.benchmarks.turns import run_by_turns, time_call

PLAIN_TOKENS = 16_384
TARGET = 1.6
"""Sampling and update should each be this many times as fast as the plain implementation."""
TOP_P = 0.95
MOST_TRUNCATED = 1.1
"""A decoding step with :data:`TOP_P` and its support recorded should take at most this many times one without."""
BENCH = "bench"
"""Id of the run whose folder holds what is sampled."""
KINDS = ("matrix products", "attention", "elementwise and copies", "Python")
LEAST_PRODUCTS = {"prefill": 0.75, "decoding": 0.6, "update": 0.75}
"""The share of its time that each should spend in matrix products, with published models."""
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::addmm_"})
_ATTENTION = frozenset({"aten::bmm", "aten::_softmax"})  # in decoding steps; other operations are recognized by name


def bench_iteration(
    config: ConfigFile,
    /,
    *overrides: Overrides,
    rounds: Annotated[int, Parameter(validator=validators.Number(gte=2))] = 10,
    engines: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Print the seconds of both implementations, their ratios with intervals, and the time by kind of operation.

    Between them, print the ratio of decoding steps with and without truncated sampling.

    Raises ConfigError if the engine is ``vllm``.

    Args:
        config: TOML file of a run that samples in its own process.
        rounds: Number of times that each implementation is timed, alternately.
        engines: Compare the tokens per second of sampling with those of transformers' generate and of vLLM instead.
    """
    with tempfile.TemporaryDirectory(prefix="magrpo-bench-") as folder:
        resolved = load_config(config, [*overrides, f"root={folder}"])
        if resolved.engine.kind == "vllm":
            raise ConfigError("bench iteration measures sampling in this process: set engine.kind = 'transformers'")
        if isinstance(resolved.env, AgentProgram):
            raise ConfigError("bench iteration needs prompts, which a program writes itself: take another environment")
        resolved = settle_dtype(resolved, print)
        groups = score_batches(resolved, 1)
        policy = Policy.open(resolved.agents, resolved.model, resolved.lora, resolved.train.seed)
        requests = _make_requests(resolved, groups)
        if engines:
            start = RunStore.open(Path(folder), BENCH).stage_folder(Step("start", 0).output)
            compare_engines(policy, requests, locate_weights(start, policy.agents), rounds)
            return 0
        policy.sources = {}  # the engine must sample from the weights it holds
        engine = LocalEngine(policy, len(requests))
        _compare_sampling(engine, requests, rounds)
        _compare_truncation(policy, requests, rounds)
        trained = [agent.name for agent in resolved.agents if agent.trained]
        samples, _ = credit(groups, trained, CreditRules.of(resolved))
        make_updater = partial(Updater.of, policy, resolved, Path(folder) / "failed-batch")
        _compare_updates(policy, samples, make_updater, rounds)
        torch.set_num_threads(1)
        _print_kinds(replace(engine, num_threads=1), requests, partial(make_updater().update, samples))
    return 0


def score_batches(config: RunConfig, number: int) -> list[RolloutGroup[ScoredTurn]]:
    """Sample and score the first batches of a run with the weights before training."""
    store = RunStore.create(config, BENCH)
    groups: list[RolloutGroup[ScoredTurn]] = []
    with (
        RunConsole(RunState(number, config.reward)) as console,
        StageRunner(config, store, console, lambda _: None) as stages,
    ):
        untrained = [stages.run_step(Step("prepare", 0), []), stages.run_step(Step("start", 0), [])]
        for iteration in range(1, number + 1):
            rollout = stages.run_step(Step("rollout", iteration, "0"), untrained)
            scored = stages.run_step(Step("score", iteration, "0"), [rollout])
            groups += read_scored(store.folder(scored))
            console.say(f"batch {iteration} of {number}")
    return groups


def _make_requests(config: RunConfig, groups: Sequence[RolloutGroup[ScoredTurn]]) -> list[Request]:
    """The requests of a batch, those for the same prompt together, from the shortest to the longest prompt."""
    sampling = sampling_params(config.rollout)
    requests = [
        Request(agent, prompt.token_ids, sampling, derive_seed(config.train.seed, group.problem.task_id, agent, index))
        for group in groups
        for agent, prompt in group.prompts.items()
        for index in range(config.rollout.group_size)
    ]
    return sorted(requests, key=lambda request: (len(request.prompt_ids), request.prompt_ids))


def _compare_sampling(engine: LocalEngine, requests: Sequence[Request], rounds: int) -> None:
    ours = partial(_sample, engine, requests)
    plain = partial(sample_through_modules, engine.policy, requests)
    _print_ratio("sampling", time_by_turns(ours, plain, rounds))


def _sample(engine: LocalEngine, requests: Sequence[Request]) -> None:
    engine.serve(engine.policy.version, {}).generate(requests)


def _compare_truncation(policy: Policy, requests: Sequence[Request], rounds: int) -> None:
    """Print how many times as long a decoding step of one agent takes if sampling is truncated."""
    agent = requests[0].agent
    of_agent = [request for request in requests if request.agent == agent]
    plain = replace(of_agent[0].sampling, top_p=1.0, top_k=0, keep_support=False, max_new_tokens=rounds + 1)
    truncated = replace(plain, top_p=TOP_P, keep_support=True)
    with decoding_model(policy, agent) as model:
        with_truncation, without = (_run_steps(model, of_agent, sampling) for sampling in (truncated, plain))
        pairs = time_by_turns(partial(next, with_truncation), partial(next, without), rounds)
        vocab_size = model.config.get_text_config().vocab_size
    interval = seed_interval([truncated_s / plain_s for truncated_s, plain_s in pairs])
    truncated_s, plain_s = (median(pair[way] for pair in pairs) for way in (0, 1))
    Console(highlight=False, soft_wrap=True).print(
        f"truncated sampling: median of a step of {len(of_agent)} rows and {vocab_size:,} tokens {truncated_s:.4f} s "
        f"with top-p {TOP_P:g}, {plain_s:.4f} s without; {interval.mean:.2f} times as long "
        f"(95 %: {interval.low:.2f} to {interval.high:.2f}, {len(pairs)} pairs; the target is {MOST_TRUNCATED:g})"
    )


def _run_steps(model: PreTrainedModel, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[None]:
    """Draw one token for each request, and run it through the model, each time that the next item is taken."""
    requests = [replace(request, sampling=sampling) for request in requests]
    sampler = TokenSampler(requests, model.device)
    live = torch.arange(len(requests), device=model.device)
    positions = torch.tensor([len(request.prompt_ids) for request in requests], device=model.device)
    with torch.no_grad():
        logits, run_step = start_padded(model, requests, sampling.max_new_tokens)
    for step in range(sampling.max_new_tokens):
        with torch.no_grad():
            token, _, _ = sampler(logits, live, step)
            logits = run_step(token, positions + step)
        yield


def _compare_updates(
    policy: Policy, samples: Mapping[str, Sequence[Sample]], make_updater: Callable[[], Updater], rounds: int
) -> None:
    ours, plain = make_updater(), make_updater()
    plain.memory.micro_batch_tokens, plain.gradients.at_once = PLAIN_TOKENS, 1

    def update_in_plain_code() -> None:
        with _use_layers_of_peft(policy):
            plain.update(samples)

    _print_ratio("update", time_by_turns(lambda: ours.update(samples), update_in_plain_code, rounds))


def time_by_turns(
    optimized: Callable[[], object], plain: Callable[[], object], rounds: int
) -> list[tuple[float, float]]:
    """Seconds of both, in pairs; every other pair begins with the second, and a pair before them warms up."""
    return [(one, other) for (one, _), (other, _) in run_by_turns((optimized, plain), rounds)]


@contextmanager
def _use_layers_of_peft(policy: Policy) -> Iterator[None]:
    fused = list[FusedLoraLinear]()
    for agent in policy.agents:
        with policy.active(agent) as model:
            fused += [layer for layer in model.modules() if type(layer) is FusedLoraLinear]
    for layer in fused:
        layer.__class__ = LoraLinear  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in fused:
            layer.__class__ = FusedLoraLinear


def _print_ratio(name: str, pairs: Sequence[tuple[float, float]]) -> None:
    interval = seed_interval([plain / ours for ours, plain in pairs])
    ours, plain = (median(pair[way] for pair in pairs) for way in (0, 1))
    Console(highlight=False, soft_wrap=True).print(
        f"{name}: median {ours:.3f} s, plain implementation {plain:.3f} s; {interval.mean:.2f} times as fast "
        f"(95 %: {interval.low:.2f} to {interval.high:.2f}, {len(pairs)} pairs; the target is {TARGET:g})"
    )


def _time_kinds(run: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of a run by kind of operation; what is in none of torch's operations is Python's.

    Of two runs the faster one counts, because other work on the machine only adds time.
    """
    run()
    seconds = min(time_call(run), time_call(run))
    spent = min(_time_operations(run), _time_operations(run), key=lambda kinds: sum(kinds.values()))
    return spent | {"Python": seconds - sum(spent.values())}


def _print_kinds(engine: LocalEngine, requests: Sequence[Request], update: Callable[[], object]) -> None:
    """Print how the time on one core is divided among kinds of operation, beside the target for matrix products."""
    first_tokens = [replace(r, sampling=replace(r.sampling, max_new_tokens=1)) for r in requests]
    runs: list[Callable[[], object]] = [partial(_sample, engine, asked) for asked in (first_tokens, requests)]
    progress = track([*runs, update], "timing operations on one core", console=Console(stderr=True), transient=True)
    prefill, sampling, updating = map(_time_kinds, progress)
    decoding = {kind: sampling[kind] - prefill[kind] for kind in KINDS}
    table = Table("on one core", "target", *KINDS, box=None)
    for name, spent in {"prefill": prefill, "decoding": decoding, "update": updating}.items():
        seconds = sum(spent.values())
        shares = (f"{spent[kind] / seconds:.0%}" for kind in KINDS)
        table.add_row(f"{name}, {seconds:.2f} s", f"{LEAST_PRODUCTS[name]:.0%}", *shares)
    Console(highlight=False, width=100).print(table)


def _time_operations(run: Callable[[], object]) -> dict[str, float]:
    """Return the seconds in torch's operations, by kind."""
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        run()
    spent = dict.fromkeys(KINDS, 0.0)
    for event in profile.key_averages():
        if event.key.startswith("aten::"):
            if "_attention" in event.key or event.key in _ATTENTION:
                kind = "attention"
            elif event.key in _PRODUCTS:
                kind = KINDS[0]
            else:
                kind = KINDS[2]
            spent[kind] += event.self_cpu_time_total / 1e6
    return spent
