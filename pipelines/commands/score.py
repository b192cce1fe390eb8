"""``magrpo score``: price joint completions from files.

No policies, no training: problems and completions in, one report line for each completion out.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import msgspec
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

from magrpo.interfaces import Progress as Advance
from magrpo.interfaces import Sandbox, SandboxPlugin
from magrpo.plugins import ConfigError, Section, plugin_field, validate_config
from magrpo.rewards.common import merge_hidden_report
from magrpo.stages.backend import Cache
from magrpo.stages.score import Scored, score_texts
from magrpo.types import Problem

ROLES = ("helper", "main")
_CHUNK = 512
LineT = TypeVar("LineT")


class ScoreConfig(Section):
    """What ``magrpo score`` can be told by ``section.key=value``."""

    reward: plugin_field("reward")  # type: ignore[valid-type]
    """What a joint action is worth."""
    sandbox: plugin_field("sandbox")  # type: ignore[valid-type]
    """Where untrusted programs run."""


class CompletionLine(msgspec.Struct, frozen=True):
    """One line of the completions file."""

    task_id: str
    completions: dict[str, str]


class ReportLine(msgspec.Struct, frozen=True):
    """One line of the report. ``index`` numbers a task's completions from 0; ``reward`` is null if the sandbox failed.

    ``status`` is that of the combined program: ``pass``, or what the first test came to that did not pass;
    ``not_run`` when there was no program to run.
    """

    task_id: str
    index: int
    status: str
    tests_passed: int
    tests_total: int
    reward: float | None
    parts: dict[str, float]
    level: str
    duration_s: float


def score_files(problems_path: Path, completions_path: Path, output: Path, overrides: Sequence[str]) -> int:
    """Price every line of ``completions_path`` and write the report; returns the exit code.

    Raises:
        ConfigError: a file, a line of it or an option is unusable; the message names it.
    """
    tree: dict[str, Any] = {"reward": {"kind": "coding"}, "sandbox": {"kind": "pool"}}
    config = validate_config(ScoreConfig, tree, overrides, "score")
    problems = _problems(problems_path)
    lines = _completions(completions_path, problems)
    if not output.parent.is_dir():
        raise ConfigError(f"{output}: the folder {output.parent} does not exist")
    sandbox = cast(SandboxPlugin, config.sandbox).open()
    console = Console(stderr=True, highlight=False)
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
    tally: Counter[str] = Counter()
    try:
        with _opened(output, "wb") as file, Progress(*columns, console=console, transient=True) as bar:
            label = f"scoring at level {sandbox.level}"
            task = bar.add_task(label, total=len(lines))

            def ran(number: int) -> None:  # completions are done by the chunk, programs one by one
                tally["programs"] += number
                bar.update(task, description=f"{label}, {tally['programs']} programs run")

            for report, passed in _reports(problems, lines, config, sandbox, ran):
                tally["passed"] += passed
                tally["masked"] += report.reward is None
                file.write(msgspec.json.encode(report) + b"\n")
                bar.advance(task)
    finally:
        sandbox.close()
    masked = f", {tally['masked']} not scored: the sandbox failed on them" if tally["masked"] else ""
    console.print(f"{tally['passed']} of {len(lines)} pass all tests{masked}; report: {output}")
    return 1 if tally["masked"] else 0


def _reports(
    problems: Mapping[str, Problem],
    lines: Sequence[CompletionLine],
    config: ScoreConfig,
    sandbox: Sandbox,
    progress: Advance,
) -> Iterator[tuple[ReportLine, bool]]:
    """The report of every line in order, and whether all tests passed."""
    seen: Counter[str] = Counter()
    cache: Cache = {}
    rest = iter(lines)
    while chunk := list(islice(rest, _CHUNK)):
        items = [(problems[line.task_id], line.completions) for line in chunk]
        scored, _ = score_texts(items, reward=config.reward, sandbox=sandbox, cache=cache, progress=progress)
        for line, result in zip(chunk, scored, strict=True):
            passed = not result.masked and bool(config.reward.passed(result.reports))
            yield _report(line.task_id, seen[line.task_id], result, sandbox.level), passed
            seen[line.task_id] += 1


def _report(task_id: str, index: int, scored: Scored, level: str) -> ReportLine:
    program = merge_hidden_report(scored.reports, next(iter(scored.reports))) if scored.reports else None
    status = "infra_error" if scored.masked else program.status if program else "not_run"
    return ReportLine(
        task_id=task_id,
        index=index,
        status=status,
        tests_passed=program.tests_passed if program else 0,
        tests_total=program.tests_total if program else 0,
        reward=None if scored.masked else scored.reward.total,
        parts=scored.reward.parts,
        level=program.level if program else level,
        duration_s=sum(report.duration_s for report in scored.reports.values()),
    )


def _problems(path: Path) -> dict[str, Problem]:
    problems: dict[str, Problem] = {}
    for where, problem in _read(path, Problem):
        if problem.task_id in problems:
            raise ConfigError(f"{where}: task_id {problem.task_id!r} was there before; every problem needs its own")
        missing = [key for key in ("prompt", "entry_point", "test") if not getattr(problem, key)]
        if missing:
            raise ConfigError(f"{where}: {problem.task_id!r} has no {' and no '.join(missing)}")
        problems[problem.task_id] = problem
    if not problems:
        raise ConfigError(f"{path}: holds no problem")
    return problems


def _completions(path: Path, problems: dict[str, Problem]) -> list[CompletionLine]:
    lines = []
    for where, line in _read(path, CompletionLine):
        if line.task_id not in problems:
            raise ConfigError(f"{where}: task_id {line.task_id!r} is not among the problems")
        if sorted(line.completions) != sorted(ROLES):
            got = ", ".join(line.completions) or "none"
            raise ConfigError(f"{where}: completions needs the keys {' and '.join(ROLES)}, got {got}")
        lines.append(line)
    return lines


def _read(path: Path, line_type: type[LineT]) -> Iterator[tuple[str, LineT]]:
    """The lines of a JSONL file with their places, ``file:line``; blank lines are skipped."""
    decode = msgspec.json.Decoder(line_type).decode
    try:
        with _opened(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield f"{path}:{number}", decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ConfigError(f"{path}:{number}: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _opened(path: Path, mode: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode))
