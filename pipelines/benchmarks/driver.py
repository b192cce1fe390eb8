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
from time import process_time
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from magrpo import layout
from magrpo.config import RunConfig, load_config
from magrpo.engines import Completion, make_action
from magrpo.interfaces import Progress
from magrpo.layout import Step
from magrpo.plugins import Plugin
from magrpo.policy import Policy
from magrpo.store import RunStore, read_records
from magrpo.types import Action, Case, CaseStatus, Execution, ExecutionReport, Request, Sample
from pipelines.arguments import Positive, locate_config
from pipelines.progress.console import RunConsole
from pipelines.progress.state import RunState
from pipelines.training.stages import StageRunner

AIM_MS = 0.5
"""CPU time of a completion of 512 tokens that the process of a run may spend, in milliseconds."""
GROUP_SIZE = 16
_STAGES: tuple[Literal["rollout", "score", "credit"], ...] = ("rollout", "score", "credit")


def bench_driver(*, completions: Positive = 2048, tokens: Positive = 512) -> int:
    """Print the figures of :func:`measure_driver` as a table; the exit code is 0.

    Args:
        completions: Completions of an iteration.
        tokens: Tokens of each completion.
    """
    ms_by_part = measure_driver(completions, tokens)
    table = Table("", "ms a completion", box=None, title=f"{completions:,} completions of {tokens:,} tokens")
    table.columns[1].justify = "right"
    for part, ms in ms_by_part.items():
        table.add_row(part, f"{ms:.3f}")
    total = sum(ms_by_part.values())
    table.add_row("all", f"{total:.3f}", style="bold")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"one core suffices for {1e3 * tokens / total:,.0f} tokens/s; the aim is {AIM_MS} ms for 512 tokens")
    return 0


def measure_driver(completions: int, tokens: int) -> dict[str, float]:
    """CPU time of each part, in milliseconds a completion, all threads together; the second of two iterations."""
    with tempfile.TemporaryDirectory(prefix="magrpo-bench-") as folder:
        config = _make_config(Path(folder), max(1, completions // (2 * GROUP_SIZE)), tokens)
        store = RunStore.create(config, "bench")
        with (
            RunConsole(RunState(2, config.reward.fraction)) as console,
            StageRunner(config, store, console, lambda _: None) as stages,
        ):
            untrained = [stages.run_step(Step("prepare", 0), []), stages.run_step(Step("start", 0), [])]
            for iteration in (1, 2):  # the first one also fills caches and loads libraries
                _SECONDS.clear()
                pointers = untrained
                for stage in _STAGES:
                    with _measure(f"{stage}, the rest"):
                        step = Step(stage, iteration, "" if stage == "credit" else "0")
                        pointers = [stages.run_step(step, pointers)]
                with _measure("samples read by the update"):
                    of_agents = [layout.samples_file(agent.name) for agent in config.agents]
                    read = [read_records(store.folder(pointers[0]) / file, Sample) for file in of_agents]
    number = sum(map(len, read))
    del _SECONDS[_PREPARATION]
    return {part: 1e3 * seconds / number for part, seconds in _SECONDS.items()}


def _make_config(root: Path, num_problems: int, tokens: int) -> RunConfig:
    settings = [
        f"root={root}",
        f"engine.kind={__name__}:MemoryEngine",
        f"sandbox={{kind='{__name__}:MemorySandbox'}}",
        f"rollout.problems_per_iteration={num_problems}",
        f"rollout.group_size={GROUP_SIZE}",
        f"rollout.max_new_tokens={tokens}",
    ]
    return load_config(locate_config("embedded"), settings)


# ------------------------------------------------------------------------------------------------------- answers
class GivenLogprob(msgspec.Struct, gc=False):
    """A sampled token, as a vLLM server describes it."""

    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list["GivenLogprob"] = []


class Logprobs(msgspec.Struct):
    """The sampled tokens of a choice."""

    content: list[GivenLogprob]


class Choice(msgspec.Struct):
    """The completion in an answer."""

    index: int
    token_ids: list[int]
    logprobs: Logprobs


class Answer(msgspec.Struct):
    """The body of an answer of ``/inference/v1/generate``."""

    choices: list[Choice]
    request_id: str = "bench"


class MemoryEngine(Plugin):
    """Answers requests with programs of the longest length that is allowed."""

    kind: str = f"{__name__}:MemoryEngine"

    def open(self, policy: Policy) -> "AnsweringEngine":
        return AnsweringEngine(policy)


class AnsweringEngine:
    """An :class:`magrpo.interfaces.Engine` that decodes answers made beforehand."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._version = policy, 0

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        with _measure(_PREPARATION):
            answers = [self._write_answer(request) for request in requests]
        with _measure("answers decoded"):
            decode = msgspec.json.Decoder(Answer).decode
            completions = []
            for answer in answers:
                [choice] = decode(answer).choices
                completions.append(Completion(choice.token_ids, [given.logprob for given in choice.logprobs.content]))
        with _measure("actions made"):
            actions = []
            for request, completion in zip(requests, completions, strict=True):
                actions.append(make_action(self._policy, request, completion, self._version))
                if progress is not None:
                    progress(1)
        return actions

    def load(self, policy_version: int, weights: Mapping[str, Path]) -> None:
        self._version = policy_version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...

    def _write_answer(self, request: Request) -> bytes:
        """A program for the prompt, distinct for each seed, that ends with empty lines."""
        tokenizer, rng = self._policy.tokenizer(request.agent), random.Random(request.seed)
        prompt = str(tokenizer.decode(list(request.prompt_ids), skip_special_tokens=True))
        head = next(line for line in prompt.splitlines() if line.startswith("def "))
        lines = [head.replace(head[4 : head.index("(")], "aux", 1) if request.agent == "helper" else head]
        lines += [f"    step_{i} = max({rng.randrange(10**6)}, {i}) % 7" for i in range(request.sampling.max_new_tokens)]
        token_ids = list[int]()
        for line in lines:
            of_line = tokenizer.encode(f"{line}\n", add_special_tokens=False)
            if len(token_ids) + len(of_line) > request.sampling.max_new_tokens - 8:
                break
            token_ids += of_line
        token_ids += tokenizer.encode("    return 1\n", add_special_tokens=False)
        newline = tokenizer.encode("\n", add_special_tokens=False)
        token_ids += newline * (request.sampling.max_new_tokens - len(token_ids))
        logps = msgspec.convert([-rng.expovariate(2) * (rng.random() < 0.6) - 1e-5 for _ in token_ids], list[float])
        given = [
            GivenLogprob(token, logp, 1, [GivenLogprob(token, logp, 1)])
            for token, logp in zip(token_ids, logps, strict=True)
        ]
        return msgspec.json.encode(Answer([Choice(0, token_ids, Logprobs(given))]))


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
    first = next((status for status in statuses if status != "pass"), "pass")
    return ExecutionReport(first, tuple(Case(status) for status in statuses), "none", 0.01, 0.01, 2**24)


# --------------------------------------------------------------------------------------------------------- clock
_PREPARATION = "preparation of the answers"
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
