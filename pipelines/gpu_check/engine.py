"""Step 5: the engine beside the trainer: log-probabilities, seeds, versions of adapters, sleep and wake, a kill."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from magrpo.collate import collate, plan_batches
from magrpo.engines.host import EngineHost
from magrpo.interfaces import Engine, Served
from magrpo.policy import Policy
from magrpo.seeds import derive_seed
from magrpo.stages.model_runs import ModelRuns
from magrpo.types import Action, Message, Observation, Request, Sample, SamplingParams
from magrpo_kernels import LossOptions
from pipelines.gpu_check.processes import list_family, wait_for_end
from pipelines.gpu_check.results import Result, Verdict, judge
from pipelines.gpu_check.setting import GIB, Setting

QUESTIONS = ("Return the sum of a list.", "Count the vowels of a text.", "Reverse a text.", "Find the largest number.")
SHIFTS = {"lora": 0.05, "full": 0.003}
"""Standard deviation of what is added to trained weights, so that versions differ."""
GAPS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference of log-probabilities between engine and trainer, by dtype of matrix products."""
TAKEN = 0.8
"""Share of the free memory that the trainer takes while the engine sleeps."""
_END_S = 30.0
"""Seconds that killed processes may take to end."""
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class World:
    """A policy with two trained versions, and the engine that serves it."""

    policy: Policy
    runs: ModelRuns
    engine: Engine
    folders: dict[int, dict[str, Path]]
    """Of versions 1 and 2, by agent."""

    def sample(self, version: int, sampling: SamplingParams) -> tuple[list[Request], list[Action]]:
        """Requests of all agents, and the completions of a version."""
        asked = [
            Request(agent, prompt_ids, sampling, seed)
            for agent in self.policy.agents
            for text in QUESTIONS
            for prompt_ids in [self.policy.lineup.render(agent, Observation((Message("user", text),)))]
            for seed in range(2)
        ]
        served: Served = self.engine.serve(version, self.folders[version])
        actions = served.generate(asked)
        served.close()
        return asked, actions

    def measure_gap(self, version: int, asked: Sequence[Request], actions: Sequence[Action]) -> float:
        """Mean difference of the completions' log-probabilities from those of the trainer with a version's weights."""
        self.policy.load(version, self.folders[version])
        options, differences = LossOptions(asked[0].sampling.temperature), []
        for agent in self.policy.agents:
            samples = [
                Sample(request.prompt_ids, a.token_ids, a.sampling_logps, 0.0, 0.0, 0, version, support=a.support)
                for request, a in zip(asked, actions, strict=True)
                if request.agent == agent
            ]
            for rows in plan_batches(samples, 2048, share_prompts=False):
                batch = collate(samples, rows, self.policy.device)
                logps = self.runs.compute_logps(agent, self.policy.active(agent), batch, options)
                differences.append((logps - batch.tokens.sampling_logps).abs())
        return float(torch.cat(differences).mean())


def check_engine(setting: Setting) -> Iterator[Result]:
    """Check the engine of the configuration with its agents."""
    config = setting.config
    policy = Policy.open(config.agents, config.model, config.lora, config.train.seed)
    folders = {}
    for version in (1, 2):
        shift_weights(policy, version)
        folders[version] = policy.save(setting.folder / f"version-{version}")
    runs = ModelRuns(policy)
    for agent in policy.agents:
        runs.probe_model(agent)
    before = list_family(os.getpid())
    engine, seconds = _measure_call(lambda: config.engine.open(EngineHost.of(policy)))
    try:
        kind = type(engine).__module__.rpartition(".")[2]
        yield Result("start of the engine", f"{kind}, {seconds:.0f} s", verdict="note", value=seconds)
        world = World(policy, runs, engine, folders)
        yield from _check_samples(world)
        yield from _check_sleep(setting, world)
        yield from _check_kill([child for child in list_family(os.getpid()) if child not in before])
    finally:
        engine.close()


def shift_weights(policy: Policy, version: int) -> None:
    """Move the weights of every agent at random, in place; they follow from the version alone."""
    with torch.no_grad():
        for agent in policy.agents:
            for name, parameter in policy.parameters(agent).items():
                generator = torch.Generator().manual_seed(derive_seed(version, agent, name))
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.device), alpha=SHIFTS[policy.lineup.weights(agent)])


def _check_samples(world: World) -> Iterator[Result]:
    limit = GAPS[world.policy.dtype]
    plain = SamplingParams(max_new_tokens=32)
    remedy = "compare the versions of vllm and torch with requirements/cuda.txt, or set engine.kind=transformers"
    asked, actions = world.sample(1, plain)
    yield _judge_gap("log-probabilities against the trainer's", world.measure_gap(1, asked, actions), limit, remedy)
    _, again = world.sample(1, plain)
    same = sum(one.token_ids == other.token_ids for one, other in zip(actions, again, strict=True))
    found, expected = f"{same} of {len(actions)} completions are the same", "all"
    # On a GPU the sums of a batch may be rounded in another order.
    verdict: Verdict = "ok" if same == len(actions) else "missed" if world.policy.device.type == "cuda" else "failed"
    yield Result("the same seeds again", found, expected, verdict, remedy if verdict == "failed" else "")
    # Of the right weights they are nearer than of the wrong ones.
    for name, version, other in (("version 2 of the weights", 2, 1), ("version 1 after version 2", 1, 2)):
        asked, actions = world.sample(version, plain)
        far = min(limit, world.measure_gap(other, asked, actions) / 2)
        yield _judge_gap(name, world.measure_gap(version, asked, actions), far, remedy)
    asked, actions = world.sample(1, SamplingParams(0.8, 0.9, 50, 32, keep_support=True))
    gap = world.measure_gap(1, asked, actions)
    yield _judge_gap("with top_p 0.9 and top_k 50, over the recorded support", gap, limit, remedy)
    kept = [len(support) for action in actions for support in action.support]
    outside = sum(count > 50 for count in kept)
    yield judge("tokens left by top_k 50", f"at most {max(kept, default=0)}", "at most 50", not outside, remedy)


def _check_sleep(setting: Setting, world: World) -> Iterator[Result]:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=16)
    _, before = world.sample(1, greedy)
    lineup = world.policy.lineup
    lineup.release_cached_memory()
    free = [0.0 if setting.is_small else setting.count_free_bytes()]
    _, sleep_s = _measure_call(world.engine.sleep)
    if not setting.is_small:
        free.append(setting.count_free_bytes())
        taken = torch.empty(int(TAKEN * free[-1]), dtype=torch.uint8, device=setting.device)
        taken.fill_(1)
        del taken
    _, wake_s = _measure_call(world.engine.wake)
    _, after = world.sample(1, greedy)
    same = sum(one.token_ids == other.token_ids for one, other in zip(before, after, strict=True))
    remedy = "lower engine.memory_frac"
    found, expected = f"{same} of {len(before)} completions are the same", "nearly all"
    name = f"sleep, the trainer takes {TAKEN:.0%} of the free memory, wake"
    yield judge(name, found, expected, same >= 0.8 * len(before), remedy)
    yield Result("sleep and wake", f"{sleep_s:.1f} s and {wake_s:.1f} s", verdict="note", value=sleep_s + wake_s)
    if not setting.is_small:
        found = f"{(free[1] - free[0]) / GIB:.1f} GiB"
        yield Result("memory released by sleep", found, verdict="note", value=(free[1] - free[0]) / GIB)


def _check_kill(processes: Sequence[psutil.Process]) -> Iterator[Result]:
    """Kill the engine's server, if it has one, and see that nothing of it survives."""
    servers = [process for process in processes if "magrpo.engines.vllm_server" in process.cmdline()[1:4]]
    for server in servers:
        os.kill(server.pid, signal.SIGKILL)
    alive = wait_for_end(processes if servers else [], _END_S)
    found = f"{len(alive)} of {len(processes)} processes survive" if servers else "the engine has no process"
    remedy = f"kill {' '.join(str(process.pid) for process in alive)}"
    yield judge("processes of the killed engine", found, "none survives", not alive, remedy)


def _judge_gap(name: str, gap: float, limit: float, remedy: str) -> Result:
    good = gap <= limit
    found, expected = f"{gap:.3g} apart on average", f"at most {limit:.3g}"
    return Result(name, found, expected, "ok" if good else "failed", "" if good else remedy, gap)


def _measure_call(call: Callable[[], ResultT]) -> tuple[ResultT, float]:
    began = time.perf_counter()
    return call(), time.perf_counter() - began
