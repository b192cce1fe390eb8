"""Problem sets in the HumanEval form: HumanEval (arXiv 2107.03374), CoopHumanEval (arXiv 2508.04652), your own."""

from __future__ import annotations

import ast
import logging
from typing import ClassVar

from pydantic import Field

from magrpo.problems.rows import Row, halves, read_rows
from magrpo.registry import ConfigError, Plugin
from magrpo.types import Problem, Split

log = logging.getLogger(__name__)


class HumanEval(Plugin):
    """Problems in the HumanEval form: ``task_id, prompt, entry_point, test, canonical_solution``.

    ``prompt`` ends in the docstring of ``entry_point``, ``test`` defines ``check(candidate)``, and
    ``canonical_solution``, which may be missing, continues ``prompt``.
    """

    benchmark: ClassVar[str] = "HumanEval"
    ids: ClassVar[str] = "HumanEval/"

    source: str = "openai/openai_humaneval"
    """A .jsonl, .jsonl.gz or .parquet file, or a hub id."""
    hub_split: str = "test"
    """Split to read of a hub id."""
    test_frac: float = Field(0.2, gt=0, lt=1)
    """Share of the problems held out, chosen by a hash of their task_id."""

    def load(self) -> dict[Split, list[Problem]]:
        """``train`` and ``test``; warns where training would use a public benchmark's test problems.

        Raises:
            ConfigError: the source, a row or a field is unusable; the message names it and the remedy.
        """
        problems = [parse_problem(row) for row in read_rows(self.source, self.hub_split)]
        splits = halves(problems, self.test_frac, self.source)
        if all(problem.task_id.startswith(self.ids) for problem in problems):
            warn_about_training(self.benchmark, len(splits["train"]))
        return splits


class CoopHumanEval(HumanEval):
    """CoopHumanEval: problems in the HumanEval form that divide naturally between two writers."""

    benchmark: ClassVar[str] = "CoopHumanEval"
    ids: ClassVar[str] = ""

    source: str = "OpenMLRL/CoopHumanEval"
    """A .jsonl, .jsonl.gz or .parquet file, or a hub id."""


def warn_about_training(benchmark: str, number: int) -> None:
    """Warn that what is called ``train`` comes from the test split of a public benchmark."""
    log.warning(
        "the train split holds %d problems of the public test split of %s: results on %s itself, or of any model "
        "trained here, are no longer comparable with published ones",
        number,
        benchmark,
        benchmark,
    )


def parse_problem(row: Row) -> Problem:
    """A row in the HumanEval form.

    Raises:
        ConfigError: a field is missing or unusable; the message names row, field and remedy.
    """
    problem = Problem(
        task_id=str(row.values["task_id"]) if "task_id" in row.values else row.text("task_id"),
        prompt=row.text("prompt"),
        entry_point=row.text("entry_point"),
        test=row.text("test"),
        canonical_solution=row.text("canonical_solution") if row.values.get("canonical_solution") is not None else "",
    )
    if not problem.entry_point.isidentifier():
        raise ConfigError(f"{row.where}: entry_point {problem.entry_point!r} is not the name of a function")
    try:
        tree = ast.parse(problem.test)
    except SyntaxError as error:
        raise ConfigError(f"{row.where}: test is not Python: {error.msg} (line {error.lineno} of the test)") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        raise ConfigError(f"{row.where}: test does not define check(candidate)")
    return problem
