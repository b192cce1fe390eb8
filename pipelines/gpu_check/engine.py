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

from magrpo.engines.vllm import VllmEngine
from magrpo.interfaces import Engine
from magrpo.model.collate import collate, plan_batches
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from magrpo.planning.card import GIB
from magrpo.planning.sizes import POLICY, estimate_memory
from magrpo.process.children import find_running, list_family, send_signal, wait_for_end
from magrpo.seeds import derive_seed
from magrpo.stages.model_runs import ModelRuns
from magrpo.types import Action, Message, Observation, Request, Sample, SamplingParams
from magrpo_kernels import LossOptions
from pipelines.gpu_check.ceilings import find_ceilings
from pipelines.gpu_check.results import Result, Verdict, judge
from pipelines.gpu_check.setting import Setting

QUESTIONS = ("Return the sum of a list.", "Count the vowels of a text.", "Reverse a text.", "Find the largest number.")
SHIFTS = {"lora": 0.05, "full": 0.003}
"""Standard deviation of what is added to trained weights, so that versions differ."""
GAPS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference of log-probabilities between engine and trainer, by dtype of matrix products."""
TAKEN = 0.8
"""Share of the free memory that the trainer takes while the engine sleeps."""
SMALL_UPDATE = 64 << 20
"""Bytes that the trainer takes where the engine's weights may stay."""
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

    def ask(self, sampling: SamplingParams) -> list[Request]:
        """Requests of all agents."""
        return [
            Request(agent, prompt_ids, sampling, seed)
            for agent in self.policy.agents
            for text in QUESTIONS
            for prompt_ids in [self.policy.lineup.render(agent, Observation((Message("user", text),)))]
            for seed in range(2)
        ]

    def sample(self, version: int, sampling: SamplingParams) -> tuple[list[Request], list[Action]]:
        """Requests of all agents, and the completions of a version."""
        asked = self.ask(sampling)
        served = self.engine.serve(version, self.folders[version])
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
        yield _check_kill([child for child in list_family(os.getpid()) if child not in before])
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
    """Sleep and wake beside served weights, as in training."""
    asked = world.ask(SamplingParams(max_new_tokens=16))
    served = world.engine.serve(1, world.folders[1])
    served.generate(asked)
    world.policy.lineup.release_cached_memory()
    free = [0 if setting.is_small else setting.count_free_bytes()]
    _, sleep_s = _measure_call(world.engine.sleep)
    if not setting.is_small:
        free.append(setting.count_free_bytes())
        taken = torch.empty(int(TAKEN * free[-1]), dtype=torch.uint8, device=setting.device)
        taken.fill_(1)
        del taken
    _, wake_s = _measure_call(world.engine.wake)
    gap = world.measure_gap(1, asked, served.generate(asked))
    served.close()
    name = f"after sleep, the trainer taking {TAKEN:.0%} of the free memory, and wake"
    yield _judge_gap(name, gap, GAPS[world.policy.dtype], "lower engine.memory_frac")
    if setting.is_small:
        return
    sizes = estimate_memory(setting.config, setting.model_dtype.itemsize, None)
    link_s = 2 * sum(sizes.get(purpose, 0.0) for purpose in POLICY) / find_ceilings(setting).link_bytes_per_s
    found, expected = f"{sleep_s:.1f} s and {wake_s:.1f} s", f"{link_s:.1f} s in all for the weights, by the link"
    yield Result("sleep and wake", found, expected, "note", value=sleep_s + wake_s)
    released = (free[1] - free[0]) / GIB
    share = setting.engine.memory_frac if isinstance(setting.engine, VllmEngine) else 0.0
    least = 0.8 * share * torch.cuda.mem_get_info(setting.device)[1] / GIB
    expected = f"{least:.1f} GiB or more: most of engine.memory_frac"
    verdict: Verdict = "ok" if released >= least else "missed"
    yield Result("memory released by sleep", f"{released:.1f} GiB", expected, verdict, value=released)
    yield from _check_short_sleep(setting, world, sleep_s + wake_s)


def _check_short_sleep(setting: Setting, world: World, long_s: float) -> Iterator[Result]:
    """Sleep after an update that left room for the engine's weights, which then stay on the card."""
    asked = world.ask(SamplingParams(max_new_tokens=16))
    served = world.engine.serve(1, world.folders[1])
    served.generate(asked)
    seconds = 0.0
    for _ in range(2):  # the first tells the engine how little updates take
        world.policy.lineup.release_cached_memory()
        torch.cuda.reset_peak_memory_stats()
        _, sleep_s = _measure_call(world.engine.sleep)
        torch.empty(SMALL_UPDATE, dtype=torch.uint8, device=setting.device)
        _, wake_s = _measure_call(world.engine.wake)
        seconds = sleep_s + wake_s
    gap = world.measure_gap(1, asked, served.generate(asked))
    served.close()
    limit, remedy = GAPS[world.policy.dtype], "report it with gpu-report.json"
    yield _judge_gap("after a sleep that keeps the weights", gap, limit, remedy)
    verdict: Verdict = "ok" if seconds <= long_s else "missed"
    expected = f"at most {long_s:.1f} s, as with the weights"
    yield Result("sleep and wake, weights kept", f"{seconds:.1f} s", expected, verdict, value=seconds)


def _check_kill(processes: Sequence[psutil.Process]) -> Result:
    """Kill the engine's server, if it has one, and see that nothing of it survives."""
    servers = find_running(processes, "magrpo.engines.vllm_server")
    send_signal(servers, signal.SIGKILL)
    alive = wait_for_end(processes if servers else [], _END_S)
    found = f"{len(alive)} of {len(processes)} survive" if servers else "the engine has none"
    remedy = f"kill {' '.join(str(process.pid) for process in alive)}"
    return judge("processes of the killed engine", found, "none survives", not alive, remedy)


def _judge_gap(name: str, gap: float, limit: float, remedy: str) -> Result:
    good = gap <= limit
    found, expected = f"{gap:.3g} apart on average", f"at most {limit:.3g}"
    return Result(name, found, expected, "ok" if good else "failed", "" if good else remedy, gap)


def _measure_call(call: Callable[[], ResultT]) -> tuple[ResultT, float]:
    began = time.perf_counter()
    return call(), time.perf_counter() - began
