"""``magrpo score``: scores joint completions from files, one line of the report each, without policies or training."""

import gzip
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

from magrpo.config.validate import validate_config
from magrpo.errors import MAX_QUOTED, ConfigError, quote_error, quote_value
from magrpo.files.writing import DRAFT
from magrpo.interfaces import Progress as Advance
from magrpo.interfaces import Sandbox, SandboxPlugin
from magrpo.plugins import Section, plugin_field
from magrpo.problems.rows import DatasetRow, read_file_rows
from magrpo.rewards.common import choose_report
from magrpo.sandboxes.instrument import instrument_test
from magrpo.stages.backend import Cache
from magrpo.stages.score import Scored, score_texts
from magrpo.types import UNJUDGED, ExecutionReport, Problem
from pipelines.arguments import HomePath, Overrides

_ROLES = {"coding": ("helper", "main"), "solo": ("solo",)}
"""Roles whose texts a reward of programs needs, by its kind; other kinds need the roles of ``coding``."""
_CHUNK = 512
_STREAM = re.compile(r"/dev/(stdout|stderr|fd/\d+)|/proc/\w+/fd/\d+")
LineT = TypeVar("LineT")


class ScoreConfig(Section):
    """Options of ``magrpo score``, set by ``section.key=value``."""

    reward: plugin_field("reward")  # type: ignore[valid-type]
    """Scores joint actions."""
    sandbox: plugin_field("sandbox")  # type: ignore[valid-type]
    """Runs untrusted programs."""


class CompletionLine(msgspec.Struct, frozen=True):
    """One line of the completions file."""

    task_id: str
    completions: dict[str, str]


class ReportLine(msgspec.Struct, frozen=True):
    """One line of the report. ``index`` numbers a task's completions from 0; ``reward`` is null if
    the sandbox or the task's test failed.

    ``status``: ``pass``, the outcome of the first test that did not, or ``not_run`` without a program to run.
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
    forgeable: bool
    """Whether the program could have forged its verdict: see ``docs/sandbox.md``."""


def score_files(*overrides: Overrides, problems: HomePath, completions: HomePath, output: HomePath) -> int:
    """Score every line of ``completions`` and write the report; the exit code is 1 if some could not be judged.

    Raises ConfigError if a file, one of its lines or an option is unusable; the message names it.

    Args:
        overrides: Options of the reward and the sandbox: reward.key=value, sandbox.key=value.
        problems: JSON lines (.gz too), a JSON array or Parquet with task_id, prompt, entry_point, test, and optionally
            canonical_solution.
        completions: A file of these forms with task_id and completions, an object with the answers of helper and main,
            or of solo with reward.kind=solo. A task may have several lines.
        output: One JSON line for each line of completions, in order: task_id, index, status, tests_passed,
            tests_total, reward, parts, level, duration_s, forgeable.
    """
    tree: dict[str, Any] = {"reward": {"kind": "coding"}, "sandbox": {"kind": "pool"}}
    config = validate_config(ScoreConfig, tree, overrides, "score")
    kind = config.reward.kind
    if kind not in _ROLES and ":" not in kind:
        raise ConfigError(
            f"reward.kind = {kind!r}: magrpo score runs programs of {' and '.join(_ROLES['coding'])} "
            '(reward.kind="coding") or of one programmer (reward.kind="solo")'
        )
    problem_of = _read_problems(problems)
    lines = _read_completions(completions, problem_of, _ROLES.get(kind, _ROLES["coding"]))
    _check_output(output, {"--problems": problems, "--completions": completions})
    console = Console(stderr=True, highlight=False)
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
    tally: Counter[str] = Counter()
    with (
        closing(cast(SandboxPlugin, config.sandbox).open()) as sandbox,
        _open_report(output) as file,
        Progress(*columns, console=console, transient=True) as bar,
    ):
        label = f"scoring at isolation level {sandbox.level}"
        task = bar.add_task(label, total=len(lines))

        def count_programs(number: int) -> None:  # completions finish by the chunk, programs one by one
            tally["programs"] += number
            bar.update(task, description=f"{label}, {tally['programs']} programs run")

        for report, passed in _score_lines(problem_of, lines, config, sandbox, count_programs):
            tally["passed"] += passed
            if report.reward is None:
                tally[report.status] += 1
            tally["forgeable"] += report.forgeable
            file.write(msgspec.json.encode(report) + b"\n")
            bar.advance(task)
    masked = f", {tally['infra_error']} not scored: the sandbox failed on them" if tally["infra_error"] else ""
    masked += f", {tally['test_error']} not scored: their tests cannot be run" if tally["test_error"] else ""
    forgeable = f", {tally['forgeable']} could forge their verdicts" if tally["forgeable"] else ""
    console.print(
        f"{tally['passed']} of {len(lines)} pass all tests{masked}{forgeable}; report: {output}", markup=False
    )
    return 1 if masked else 0


@contextmanager
def _open_report(output: Path) -> Iterator[IO[bytes]]:
    """Open the report, compressed if its name ends with ``.gz``; an earlier report stays until this one is whole."""
    open_file = gzip.open if output.suffix == ".gz" else open
    # Behind /dev/stdout there may be a file that holds more than this report.
    if _STREAM.fullmatch(str(output.absolute())) or (output.exists() and not output.is_file()):
        with open_file(output, "ab") as file:
            yield cast(IO[bytes], file)
        return
    target = output.resolve()  # a link stays a link
    draft = target.with_name(DRAFT.format(target.name))
    try:
        with open_file(draft, "wb") as file:
            yield cast(IO[bytes], file)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _check_output(output: Path, inputs: Mapping[str, Path]) -> None:
    if not output.parent.is_dir():
        raise ConfigError(f"{output}: the folder {output.parent} does not exist")
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file")
    for flag, path in inputs.items():
        if output.exists() and output.samefile(path):
            raise ConfigError(f"--output {output} is the file of {flag}; name another file")


def _score_lines(
    problems: Mapping[str, Problem],
    lines: Sequence[CompletionLine],
    config: ScoreConfig,
    sandbox: Sandbox,
    progress: Advance,
) -> Iterator[tuple[ReportLine, bool]]:
    """Yield the report of every line, in order, and whether all its tests passed."""
    next_index: Counter[str] = Counter()
    cache: Cache = {}
    for start in range(0, len(lines), _CHUNK):
        chunk = lines[start : start + _CHUNK]
        items = [(problems[line.task_id], line.completions) for line in chunk]
        scored, _ = score_texts(items, reward=config.reward, sandbox=sandbox, cache=cache, progress=progress)
        for line, result in zip(chunk, scored, strict=True):
            reports = result.reports
            program = choose_report(reports)
            report = ReportLine(
                task_id=line.task_id,
                index=next_index[line.task_id],
                status=_find_status(result, program),
                tests_passed=program.tests_passed if program else 0,
                tests_total=program.tests_total if program else 0,
                reward=None if result.masked else result.reward.total,
                parts=result.reward.parts,
                level=program.level if program else sandbox.level,
                duration_s=sum(report.duration_s for report in reports.values()),
                forgeable=program is not None and program.forgeable,
            )
            yield report, not result.masked and bool(config.reward.passed(reports))
            next_index[line.task_id] += 1


def _find_status(result: Scored, program: ExecutionReport | None) -> str:
    """Return the status of the program, or why it was not judged."""
    if result.masked:
        statuses = {status for report in result.reports.values() for status in report.statuses}
        return min(statuses & UNJUDGED)
    return program.status if program else "not_run"


def _read_problems(path: Path) -> dict[str, Problem]:
    problems: dict[str, Problem] = {}
    for where, problem in _read_lines(path, Problem, ("task_id", "prompt", "entry_point", "test")):
        if problem.task_id in problems:
            name = quote_value(problem.task_id)
            raise ConfigError(f"{where}: task_id {name} appears twice; every problem needs its own")
        missing = [key for key in ("prompt", "entry_point", "test") if not getattr(problem, key)]
        if missing:
            raise ConfigError(f"{where}: {quote_value(problem.task_id)} has no {' and no '.join(missing)}")
        for field in ("task_id", "prompt", "test", "hidden_test"):
            DatasetRow(where, {}).check_size(field, getattr(problem, field))
        for field in ("test", "hidden_test"):
            _check_test(where, field, getattr(problem, field), problem.entry_point)
        problems[problem.task_id] = problem
    if not problems:
        raise ConfigError(f"{path}: contains no problem")
    return problems


def _check_test(where: str, field: str, test: str, entry_point: str) -> None:
    try:
        instrument_test(test, entry_point)
    except SyntaxError as error:
        raise ConfigError(f"{where}: field {field!r} is not Python: {quote_error(error)}") from None


def _read_completions(path: Path, problems: dict[str, Problem], roles: Sequence[str]) -> list[CompletionLine]:
    lines = []
    for where, line in _read_lines(path, CompletionLine, ("task_id", "completions")):
        if line.task_id not in problems:
            raise ConfigError(f"{where}: task_id {quote_value(line.task_id)} is not among the problems")
        if sorted(line.completions) != sorted(roles):
            got = ", ".join(line.completions) or "none"
            keys = " and ".join(roles)
            raise ConfigError(f"{where}: completions needs the keys {keys}, got {got:.{MAX_QUOTED}}")
        lines.append(line)
    if not lines:
        raise ConfigError(f"{path}: contains no completion")
    return lines


def _read_lines(path: Path, line_type: type[LineT], keys: Sequence[str]) -> Iterator[tuple[str, LineT]]:
    """Yield the objects of a file, which all have ``keys``, with their positions, ``file:line``."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file")
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file")
    for row in read_file_rows(path):
        if missing := [key for key in keys if key not in row.values]:
            found = f"{', '.join(row.values) or 'none':.{MAX_QUOTED}}"
            raise ConfigError(f"{row.where}: has no {' and no '.join(map(repr, missing))}; its keys are {found}")
        # As in training, further columns are ignored, a missing value may be null, and an id may be a number.
        values = {key: value for key, value in row.values.items() if value is not None and key != "tags"}
        if isinstance(values.get("task_id"), int):
            values["task_id"] = str(values["task_id"])
        try:
            yield row.where, msgspec.convert(values, line_type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{row.where}: {quote_error(error)}") from None
