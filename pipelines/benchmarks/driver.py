"""``magrpo bench driver``: CPU time that the process of a run spends on each completion, besides models and programs.

Rollout, score and credit of one iteration run as in training: the engine asks servers over HTTP, which send answers
made beforehand; the reward prices programs; the sandbox reports without running them.
"""

import random
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from time import process_time
from typing import Literal, Self
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from magrpo.config.place import Place
from magrpo.config.run import RunConfig, load_config
from magrpo.engines import Completion, pool
from magrpo.engines.compact_answers import CompactAnswer
from magrpo.interfaces import Progress, Served
from magrpo.model.host import EngineHost
from magrpo.model.lineup import Lineup
from magrpo.plugins import Plugin
from magrpo.progress.console import RunConsole
from magrpo.progress.state import RunState
from magrpo.run import files
from magrpo.run.steps import Step
from magrpo.run.store import Pointer, RunStore, read_records
from magrpo.stages import pricing
from magrpo.training.stages import StageRunner
from magrpo.types import Action, Case, CaseStatus, Execution, ExecutionReport, Request, Sample
from pipelines.arguments import Positive, locate_config
from pipelines.benchmarks.stand_ins import StandIns

AIM_MS = 0.5
"""CPU time of a completion of 512 tokens that the process of a run may spend, in milliseconds."""
GROUP_SIZE = 16
NUM_SERVERS = 16
_WAVES = 4
"""Completions for each one in flight, as in a batch of 16,384 on these servers."""
_ITERATIONS = 3
_PREPARATION = "preparation of the answers"
_ANSWERS = "rollout: requesting answers over HTTP, decoding them, building actions"
_READ = "reading samples for the update, if it runs in this process"
_STAGES: Mapping[Literal["rollout", "score", "credit"], str] = {
    "rollout": "rollout: prompts, files",
    "score": "score: programs, rewards, files",
    "credit": "credit: advantages, files",
}


@dataclass(frozen=True, slots=True)
class DriverCosts:
    """CPU time in milliseconds a completion, all threads together."""

    parts: dict[str, float]
    """Of the run's own process."""
    besides: float
    """Of :data:`_READ`."""
    helpers: float
    """Of the processes that work for it, their start included: median iterations have less."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def bench_driver(*, completions: Positive = 2048, tokens: Positive = 512) -> int:
    """Print the CPU time per completion of a run's process, with and without helper processes; the exit code is 0.

    Args:
        completions: Completions per iteration.
        tokens: Tokens per completion.
    """
    costs = measure_driver(completions, tokens)
    with _no_helpers():
        alone = measure_driver(completions, tokens)
    table = Table("CPU ms per completion", "with helpers", "without", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for part in costs.parts:
        table.add_row(part, f"{costs.parts[part]:.3f}", f"{alone.parts[part]:.3f}")
    table.add_row("all", f"{costs.total:.3f}", f"{alone.total:.3f}")
    table.add_row("in addition: " + _READ, f"{costs.besides:.3f}", f"{alone.besides:.3f}")
    table.add_row(
        "in addition: helper processes, including their start", f"{costs.helpers:.3f}", f"{alone.helpers:.3f}"
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{completions:,} completions of {tokens:,} tokens from {NUM_SERVERS} servers")
    console.print(table)
    aim = AIM_MS * tokens / 512
    console.print(
        f"{costs.total / aim:.2f} of the target of {aim:.2f} ms, {costs.total / alone.total:.2f} of the time without "
        f"helpers; one core keeps up with {1e3 * tokens / costs.total:,.0f} tokens/s "
        f"({costs.total / 1e3 / tokens:.1e} s per token)"
    )
    return 0


def measure_driver(completions: int, tokens: int) -> DriverCosts:
    """The median of some iterations after one that warms up."""
    before = _count_children_s()
    with tempfile.TemporaryDirectory(prefix="magrpo-bench-") as name, ExitStack() as exits:
        folder = Path(name)
        config = _make_config(folder, max(1, completions // (2 * GROUP_SIZE)), tokens)
        run = RunStore.create(config, "bench")
        servers = StandIns(NUM_SERVERS, folder)
        exits.callback(servers.close)
        exits.enter_context(patch.dict(_STAND_INS, {"all": servers}))
        exits.enter_context(patch.object(pool, "check_prompts"))  # the window of a model that computes nothing
        max_batch = max(1, completions // (_WAVES * NUM_SERVERS))
        files.keep_place(run, Place.model_validate({"engine": {"servers": servers.urls, "max_batch": max_batch}}))
        measured: list[dict[str, float]] = []
        with (
            RunConsole(RunState(_ITERATIONS, config.reward)) as console,
            StageRunner(config, run, console, lambda _: None) as stages,
        ):
            untrained = [stages.run_step(Step("prepare", 0), []), stages.run_step(Step("start", 0), [])]
            number = 0
            for iteration in range(_ITERATIONS + 1):
                _SECONDS.clear()
                in_iteration = _run_iteration(config, run, stages, untrained, iteration)
                measured.append({part: 1e3 * seconds / in_iteration for part, seconds in _SECONDS.items()})
                number += in_iteration
        helpers = 1e3 * (_count_children_s() - before) / number  # the stand-ins still live
    parts = {part: median(of_iteration[part] for of_iteration in measured[1:]) for part in measured[0]}
    del parts[_PREPARATION]
    return DriverCosts(parts, parts.pop(_READ), helpers)


def _run_iteration(
    config: RunConfig, run: RunStore, stages: StageRunner, untrained: Sequence[Pointer], iteration: int
) -> int:
    """Rollout, score and credit of an iteration; returns the number of completions."""
    pointers = untrained
    for stage, part in _STAGES.items():
        with _measure(part):
            pointers = [stages.run_step(Step(stage, iteration, "" if stage == "credit" else "0"), pointers)]
    with _measure(_READ):
        names = [files.samples_file(agent.name) for agent in config.agents]
        return sum(len(read_records(run.folder(pointers[0]) / name, Sample)) for name in names)


def _make_config(root: Path, num_problems: int, tokens: int) -> RunConfig:
    settings = [
        f"root={root}",
        f"engine.kind={__name__}:PreparedEngine",
        f"sandbox={{kind='{__name__}:MemorySandbox'}}",
        f"rollout.problems_per_iteration={num_problems}",
        f"rollout.group_size={GROUP_SIZE}",
        f"rollout.max_new_tokens={tokens}",
    ]
    return load_config(locate_config("embedded"), settings)


@contextmanager
def _no_helpers() -> Iterator[None]:
    """Everything in this process, whatever its size."""
    with patch.object(pricing, "MANY", 2**62):
        yield


def _count_children_s() -> float:
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# ------------------------------------------------------------------------------------------------------- answers
_STAND_INS: dict[str, StandIns] = {}
"""The servers of the measurement under way."""


class PreparedEngine(Plugin):
    """The pool of servers, which have programs of the longest length that is allowed as answers."""

    kind: str = f"{__name__}:PreparedEngine"

    def open(self, host: EngineHost) -> "AnsweringEngine":
        base = host.lineup.base(host.lineup.agents[0])
        _STAND_INS["all"].prepare(base, {})
        return AnsweringEngine(host.lineup, base, pool.PoolEngine(host, {}, None))


class AnsweringEngine:
    """An :class:`magrpo.interfaces.Engine`, and what it serves: prepares the servers before it asks them."""

    def __init__(self, lineup: Lineup, base: str, servers: pool.PoolEngine) -> None:
        self._lineup, self._base, self._pool = lineup, base, servers
        self._served: Served | None = None
        self._lines: dict[str, list[list[int]]] = {}

    def serve(self, version: int, weights: Mapping[str, Path]) -> Self:
        self._served = self._pool.serve(version, weights)
        return self

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        assert self._served is not None
        with _measure(_PREPARATION):
            _STAND_INS["all"].prepare(self._base, {request.seed: self._write_answer(request) for request in requests})
        with _measure(_ANSWERS):
            return self._served.generate(requests, progress)

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        self._pool.close()

    def _write_answer(self, request: Request) -> CompactAnswer:
        """A program for the prompt, distinct for each seed, that ends with empty lines."""
        tokenizer, rng = self._lineup.tokenizer(request.agent), random.Random(request.seed)
        prompt = str(tokenizer.decode(list(request.prompt_ids), skip_special_tokens=True))
        head = next(line for line in prompt.splitlines() if line.startswith("def "))
        head = head.replace(head[4 : head.index("(")], "aux", 1) if request.agent == "helper" else head
        room = request.sampling.max_new_tokens
        token_ids, end = self._encode(request.agent, head), self._encode(request.agent, "    return 1")
        newline = tokenizer.encode("\n", add_special_tokens=False)
        if request.agent not in self._lines:
            lines = (f"    step_{i} = max({rng.randrange(10**6)}, {i}) % 7" for i in range(500))
            self._lines[request.agent] = [self._encode(request.agent, line) for line in lines]
        while len(token_ids) + len(line := rng.choice(self._lines[request.agent])) + len(end) <= room:
            token_ids += line
        token_ids += end
        token_ids += newline * (room - len(token_ids))
        logps = [-rng.expovariate(2) if rng.random() < 0.6 else -1e-5 for _ in token_ids]
        return CompactAnswer.pack("", [], "length", Completion(token_ids, logps))

    def _encode(self, agent: str, line: str) -> list[int]:
        token_ids: list[int] = self._lineup.tokenizer(agent).encode(f"{line}\n", add_special_tokens=False)
        return token_ids


class MemorySandbox(Plugin):
    """Reports five cases for each program without running it."""

    kind: str = f"{__name__}:MemorySandbox"

    def open(self) -> "ReportingSandbox":
        return ReportingSandbox()


class ReportingSandbox:
    """A :class:`magrpo.interfaces.Sandbox` whose reports follow from a checksum of the program."""

    level = "none"

    def run(self, executions: Sequence[Execution], progress: Progress | None = None) -> list[ExecutionReport]:
        if progress is not None:
            progress(len(executions))
        return [_judge_program(execution) for execution in executions]

    def close(self) -> None: ...


def _judge_program(execution: Execution) -> ExecutionReport:
    checksum = zlib.crc32(execution.source.encode())
    statuses: list[CaseStatus] = ["pass" if checksum >> bit & 1 else "wrong" for bit in range(5)]
    first = min(statuses, key=lambda status: status == "pass")
    return ExecutionReport(first, tuple(Case(status) for status in statuses), "none", 0.01, 0.01, 2**24)


# --------------------------------------------------------------------------------------------------------- clock
_SECONDS: dict[str, float] = defaultdict(float)
_RUNNING: list[str] = []


@contextmanager
def _measure(part: str) -> Iterator[None]:
    """Add the CPU time of the block to its part, and take it from that of the block around."""
    started = process_time()
    _RUNNING.append(part)
    try:
        yield
    finally:
        seconds = process_time() - started
        _RUNNING.pop()
        _SECONDS[part] += seconds
        if _RUNNING:
            _SECONDS[_RUNNING[-1]] -= seconds
