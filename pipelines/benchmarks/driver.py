"""``magrpo bench driver``: CPU time that the process of a run spends on each completion, besides models and programs.

Rollout, score and credit of one iteration run as in training, with an engine and a sandbox that answer from memory: the
engine with bytes as a vLLM server sends them, which are decoded and become actions.
"""

import random
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import process_time
from typing import Literal, Self

import msgspec
from rich.console import Console
from rich.table import Table

from magrpo import layout
from magrpo.config import RunConfig, load_config
from magrpo.engines import Completion, make_action
from magrpo.engines.host import EngineHost
from magrpo.interfaces import Progress
from magrpo.layout import Step
from magrpo.lineup import Lineup
from magrpo.plugins import Plugin
from magrpo.rewards.coding import CodingReward
from magrpo.store import Pointer, RunStore, read_records
from magrpo.types import Action, Case, CaseStatus, Execution, ExecutionReport, JointReward, Problem, Request, Sample
from pipelines.arguments import Positive, locate_config
from pipelines.progress.console import RunConsole
from pipelines.progress.state import RunState
from pipelines.training.stages import StageRunner

AIM_MS = 0.5
"""CPU time of a completion of 512 tokens that the process of a run may spend, in milliseconds."""
GROUP_SIZE = 16
_ITERATIONS = 3
_PREPARATION, _REWARD = "preparation of the answers", "the reward's own work"
_READ = "samples read by the update, in the ranks where it has any"
_STAGES: tuple[Literal["rollout", "score", "credit"], ...] = ("rollout", "score", "credit")


def bench_driver(*, completions: Positive = 2048, tokens: Positive = 512) -> int:
    """Print the figures of :func:`measure_driver` as a table; the exit code is 0.

    Args:
        completions: Completions of an iteration.
        tokens: Tokens of each completion.
    """
    measured = measure_driver(completions, tokens)
    apart = {f"besides: {part}": measured.pop(part) for part in (_READ, _REWARD)}
    total = sum(measured.values())
    table = Table("", "ms a completion", box=None, title=f"{completions:,} completions of {tokens:,} tokens")
    table.columns[1].justify = "right"
    for part, ms in {**measured, "all": total, **apart}.items():
        table.add_row(part, f"{ms:.3f}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    rate = 1e3 * tokens / total
    console.print(f"one core lasts for {rate:,.0f} tokens/s; the aim is {AIM_MS} ms for 512 tokens")
    return 0


def measure_driver(completions: int, tokens: int) -> dict[str, float]:
    """CPU time of each part in milliseconds a completion, all threads together: the median of some iterations."""
    with tempfile.TemporaryDirectory(prefix="magrpo-bench-") as folder:
        config = _make_config(Path(folder), max(1, completions // (2 * GROUP_SIZE)), tokens)
        store = RunStore.create(config, "bench")
        measured: list[dict[str, float]] = []
        with (
            RunConsole(RunState(_ITERATIONS, config.reward.fraction)) as console,
            StageRunner(config, store, console, lambda _: None) as stages,
        ):
            untrained = [stages.run_step(Step("prepare", 0), []), stages.run_step(Step("start", 0), [])]
            for iteration in range(_ITERATIONS + 1):
                _SECONDS.clear()
                number = _run_iteration(config, store, stages, untrained, iteration)
                measured.append({part: 1e3 * seconds / number for part, seconds in _SECONDS.items()})
    parts = [part for part in measured[0] if part != _PREPARATION]
    return {part: median(of_iteration[part] for of_iteration in measured[1:]) for part in parts}  # the first warms up


def _run_iteration(
    config: RunConfig, store: RunStore, stages: StageRunner, untrained: Sequence[Pointer], iteration: int
) -> int:
    """Rollout, score and credit of an iteration; returns the number of completions."""
    pointers = untrained
    for stage in _STAGES:
        with _measure(f"{stage}, the rest" if stage == "rollout" else stage):
            pointers = [stages.run_step(Step(stage, iteration, "" if stage == "credit" else "0"), pointers)]
    with _measure(_READ):
        files = [layout.samples_file(agent.name) for agent in config.agents]
        return sum(len(read_records(store.folder(pointers[0]) / file, Sample)) for file in files)


def _make_config(root: Path, num_problems: int, tokens: int) -> RunConfig:
    settings = [
        f"root={root}",
        f"engine.kind={__name__}:MemoryEngine",
        f"reward.kind={__name__}:MeasuredReward",
        f"sandbox={{kind='{__name__}:MemorySandbox'}}",
        f"rollout.problems_per_iteration={num_problems}",
        f"rollout.group_size={GROUP_SIZE}",
        f"rollout.max_new_tokens={tokens}",
    ]
    return load_config(locate_config("embedded"), settings)


# ------------------------------------------------------------------------------------------------------- answers
class _Token(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    """What is read of an answer of ``/inference/v1/generate``."""

    choices: list[_Choice]


class MemoryEngine(Plugin):
    """Answers requests with programs of the longest length that is allowed."""

    kind: str = f"{__name__}:MemoryEngine"

    def open(self, host: EngineHost) -> "AnsweringEngine":
        return AnsweringEngine(host.lineup)


class AnsweringEngine:
    """An :class:`magrpo.interfaces.Engine`, and what it serves: decodes answers made beforehand."""

    def __init__(self, lineup: Lineup) -> None:
        self._lineup = lineup

    def serve(self, version: int, weights: Mapping[str, Path]) -> Self:
        return self

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        with _measure(_PREPARATION):
            answers = [self._write_answer(request) for request in requests]
        with _measure("answers decoded"):
            decode = msgspec.json.Decoder(_Answer).decode
            completions = []
            for answer in answers:
                [choice] = decode(answer).choices
                completions.append(Completion(choice.token_ids, [given.logprob for given in choice.logprobs.content]))
        with _measure("actions made"):
            actions = []
            for request, completion in zip(requests, completions, strict=True):
                actions.append(make_action(self._lineup, request, completion, 0))
                if progress is not None:
                    progress(1)
        return actions

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...

    def _write_answer(self, request: Request) -> bytes:
        """A program for the prompt, distinct for each seed, that ends with empty lines."""
        tokenizer, rng = self._lineup.tokenizer(request.agent), random.Random(request.seed)
        prompt = str(tokenizer.decode(list(request.prompt_ids), skip_special_tokens=True))
        head = next(line for line in prompt.splitlines() if line.startswith("def "))
        lines = [head.replace(head[4 : head.index("(")], "aux", 1) if request.agent == "helper" else head]
        room = request.sampling.max_new_tokens
        lines += [f"    step_{i} = max({rng.randrange(10**6)}, {i}) % 7" for i in range(room)]
        token_ids = list[int]()
        for line in lines:
            of_line = tokenizer.encode(f"{line}\n", add_special_tokens=False)
            if len(token_ids) + len(of_line) > room - 8:
                break
            token_ids += of_line
        token_ids += tokenizer.encode("    return 1\n", add_special_tokens=False)
        newline = tokenizer.encode("\n", add_special_tokens=False)
        token_ids += newline * (room - len(token_ids))
        given = []
        for token_id in token_ids:
            logp = -rng.expovariate(2) if rng.random() < 0.6 else -1e-5
            sampled = {"token_id": token_id, "logprob": logp, "rank": 1}
            given.append({**sampled, "top_logprobs": [sampled]})
        choice = {"index": 0, "finish_reason": "length", "token_ids": token_ids, "logprobs": {"content": given}}
        return msgspec.json.encode({"request_id": "bench", "model": request.agent, "choices": [choice]})


class MeasuredReward(CodingReward):
    """The coding reward; its own work is a part of its own."""

    kind: str = f"{__name__}:MeasuredReward"

    def executions(
        self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]
    ) -> Mapping[str, Execution]:
        with _measure(_REWARD):
            return super().executions(problem, texts, reports)

    def price(self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]) -> JointReward:
        with _measure(_REWARD):
            return super().price(problem, texts, reports)


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
