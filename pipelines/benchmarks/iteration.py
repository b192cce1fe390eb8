"""``magrpo bench iteration``: times sampling and update of one iteration in this process against a plain version.

The plain implementation takes one agent after another on all cores, runs every decoding step through the modules of
transformers, and updates through peft's own layers in micro-batches of :data:`PLAIN_TOKENS` tokens.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
from cyclopts import Parameter, validators
from peft.tuners.lora import Linear as LoraLinear
from rich.console import Console

from magrpo.algo.stats import seed_interval
from magrpo.config.run import RunConfig, load_config
from magrpo.engines.local.decoding import decode_batch, decoding_model, start_padded
from magrpo.engines.local.steps import ModuleStep
from magrpo.engines.transformers import LocalEngine
from magrpo.model.lora import FusedLoraLinear
from magrpo.model.policy import Policy
from magrpo.plugins import ConfigError
from magrpo.progress.console import RunConsole
from magrpo.progress.state import RunState
from magrpo.run.files import read_scored
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.seeds import derive_seed
from magrpo.stages.credit import credit
from magrpo.stages.rollout import sampling_params
from magrpo.stages.update import Updater
from magrpo.training.stages import StageRunner
from magrpo.types import Request, RolloutGroup, ScoredTurn
from pipelines.arguments import ConfigFile, Overrides

PLAIN_TOKENS = 16_384
TARGET = 1.6
"""Sampling and update should each be this many times as fast as the plain implementation."""


def bench_iteration(
    config: ConfigFile,
    /,
    *overrides: Overrides,
    rounds: Annotated[int, Parameter(validator=validators.Number(gte=2))] = 10,
) -> int:
    """Print the seconds of both implementations, and their ratios with intervals.

    Raises ConfigError if the engine is ``vllm``.

    Args:
        config: TOML file of a run that samples in its own process.
        rounds: Number of times that each implementation is timed, alternately.
    """
    with tempfile.TemporaryDirectory(prefix="magrpo-bench-") as folder:
        resolved = load_config(config, [*overrides, f"root={folder}"])
        if resolved.engine.kind == "vllm":
            raise ConfigError("bench iteration measures sampling in this process: set engine.kind = 'transformers'")
        groups = score_batches(resolved, 1)
        policy = Policy.open(resolved.agents, resolved.model, resolved.lora, resolved.train.seed)
        requests = _make_requests(resolved, groups)
        _compare_sampling(policy, requests, rounds)
        _compare_updates(resolved, policy, groups, rounds, Path(folder))
    return 0


def score_batches(config: RunConfig, number: int) -> list[RolloutGroup[ScoredTurn]]:
    """Sample and score the first batches of a run with the weights before training."""
    store = RunStore.create(config, "bench")
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


def _compare_sampling(policy: Policy, requests: Sequence[Request], rounds: int) -> None:
    policy.sources = {}  # the engine must sample from the weights it holds

    def sample() -> object:
        engine = LocalEngine(policy, len(requests), torch.get_num_threads())
        return engine.serve(policy.version, {}).generate(requests)

    start_plain = partial(start_padded, make_step=ModuleStep)

    def sample_in_plain_code() -> None:
        for agent in policy.agents:
            of_agent = [request for request in requests if request.agent == agent]
            with decoding_model(policy, agent) as model:
                decode_batch(model, of_agent, policy.lineup.stop_token_ids(agent), None, start=start_plain)

    _print_ratio("sampling", time_by_turns(sample, sample_in_plain_code, rounds))


def _compare_updates(
    config: RunConfig, policy: Policy, groups: Sequence[RolloutGroup[ScoredTurn]], rounds: int, folder: Path
) -> None:
    samples, _ = credit(groups, config.algo, [a.name for a in config.agents if a.trained], config.own_estimators)
    ours, plain = (Updater.of(policy, config, folder / "failed-batch") for _ in range(2))
    plain.memory.micro_batch_tokens, plain.gradients.at_once = PLAIN_TOKENS, 1

    def update_in_plain_code() -> None:
        with _use_layers_of_peft(policy):
            plain.update(samples)

    _print_ratio("update", time_by_turns(lambda: ours.update(samples), update_in_plain_code, rounds))


def time_by_turns(
    optimized: Callable[[], object], plain: Callable[[], object], rounds: int
) -> list[tuple[float, float]]:
    """Seconds of both, in pairs; every other pair begins with the second, and a pair before them warms up."""
    pairs, seconds = [], [0.0, 0.0]
    for number in range(rounds + 1):
        for way in (0, 1) if number % 2 else (1, 0):
            started = perf_counter()
            (optimized, plain)[way]()
            seconds[way] = perf_counter() - started
        pairs.append((seconds[0], seconds[1]))
    return pairs[1:]


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
