"""The base class of problem sets read from files: every row is a problem, and a fraction of them is held out."""

import ast
import logging
from abc import abstractmethod
from typing import Any, ClassVar

from pydantic import Field

from magrpo.checks.calls import PluginCall
from magrpo.checks.problems import check_problem
from magrpo.errors import ConfigError
from magrpo.plugins import Plugin
from magrpo.problems.rows import DatasetRow, check_source, one_line, read_rows, split_by_hash
from magrpo.types import Problem, Split

log = logging.getLogger(__name__)


class FileProblems(Plugin):
    """A problem set whose rows come from a file or the hub; subclasses parse one row."""

    benchmark: ClassVar[str]
    """The public benchmark whose test problems the source holds; empty if the benchmark has its own training split."""
    ids: ClassVar[str] = ""
    """Prefix of the ``task_id`` of every problem of that benchmark."""
    hidden_tests: ClassVar[bool] = False
    """See :class:`magrpo.interfaces.HasHiddenTests`."""

    source: str
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, or a hub id."""
    hub_split: str = "test"
    """Split to read if ``source`` is a hub id."""
    test_frac: float = Field(0.2, gt=0, lt=1)
    """Fraction of the problems to hold out, chosen by a hash of the prompt."""

    @abstractmethod
    def parse(self, row: DatasetRow) -> Problem | None:
        """Make the problem of a row; None leaves the row out.

        Raises:
            ConfigError: a field is missing or unusable; the message names row, field and remedy.
        """

    def check_source(self) -> None:
        """See :class:`magrpo.interfaces.ChecksSource`."""
        check_source(self.source)

    def load(self) -> dict[Split, list[Problem]]:
        """Load ``train`` and ``test``; warns if the training split holds test problems of a public benchmark.

        If several problems have the same prompt, tests and hidden tests, only the first is kept, with a warning.

        Raises:
            ConfigError: the source, a row or a field is unusable; the message names it and the remedy.
        """
        rows = read_rows(self.source, self.hub_split)
        problems = []
        for row in rows:
            if (problem := self._parse_checked(row)) is not None:
                for field in ("task_id", "prompt", "test", "hidden_test", "canonical_solution"):
                    row.check_size(field, getattr(problem, field))
                problems.append(problem)
        if not problems:
            raise ConfigError(f"{self.source}: all {len(rows)} rows were skipped; widen the limits in [problems]")
        if num_left_out := len(rows) - len(problems):
            message = "skipped %d of %d rows that do not meet the limits in [problems]"
            log.warning(message, num_left_out, len(rows))
        first_ids: dict[tuple[str, ...], str] = {}  # a task_id that occurs twice stays: split_by_hash rejects it
        distinct = [p for p in problems if first_ids.setdefault(_list_content(p), p.task_id) == p.task_id]
        if num_left_out := len(problems) - len(distinct):
            log.warning("skipped %d duplicate problems, with the same prompt and tests as others", num_left_out)
        splits = split_by_hash(distinct, self.test_frac, self.source)
        if self.benchmark and all(problem.task_id.startswith(self.ids) for problem in distinct):
            log.warning(
                "the train split holds %d problems of the public test split of %s: results on %s itself, or of any "
                "model trained here, are no longer comparable with published ones",
                len(splits["train"]),
                self.benchmark,
                self.benchmark,
            )
        return splits

    def _parse_checked(self, row: DatasetRow) -> Problem | None:
        call = PluginCall("problems", self, "parse()", row.where, "row")
        with call:
            problem: Any = self.parse(row)
        if problem is None:
            return None
        if not isinstance(problem, Problem):
            raise call.refuse_value(problem, "a Problem, or None to skip the row")
        check_problem(call, problem)
        return problem


def _list_content(problem: Problem) -> tuple[str, ...]:
    """A key that is equal for problems that differ only in ``task_id``, solution and white space."""
    return tuple(map(one_line, (problem.prompt, problem.test, problem.hidden_test)))


def format_signature(function: ast.FunctionDef) -> str:
    """Format the source of a function above its body."""
    decorators = "".join(f"@{ast.unparse(node)}\n" for node in function.decorator_list)
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{decorators}def {function.name}({ast.unparse(function.args)}){returns}:"


def format_docstring(text: str) -> str:
    """Format the source of a docstring with this text."""
    text = text.replace("\r\n", "\n").strip().replace("\\", "\\\\").replace('"""', "'''")
    if text.endswith('"'):  # four quotation marks in a row would end the docstring too early
        text += " "
    return f'"""{text}"""'


def indent_body(text: str) -> str:
    """Indent the text as the body of a function."""
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())
