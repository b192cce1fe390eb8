"""75 % of the maximum is told as 75 % under every ``reward.shift``, wherever a return is told as a percentage.

-4 is the setting of the paper's authors: the largest joint reward is then 0.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from infra.embedded.demonstrations import RECIPES, make_revisions
from magrpo.config.run import RunConfig, load_config
from magrpo.problems.coopcode import CoopCode
from magrpo.progress.console import RunConsole
from magrpo.progress.state import RunState
from magrpo.reports.evaluations import EvaluatedRun, mean_returns
from magrpo.reports.exhibits import choose_examples
from magrpo.rewards.coding import CodingReward
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.stages.evaluate import summarise_rows
from magrpo.types import HEADLINE, AnswerStats, EvalReport, EvalRow, Problem

CONFIG = Path(__file__).parents[2] / "pipelines" / "configs" / "embedded.toml"
SHIFTS = (0.0, -4.0)


@pytest.fixture(params=SHIFTS)
def config(request: pytest.FixtureRequest) -> RunConfig:
    return load_config(CONFIG, [f"reward.shift={request.param}"])


def report(config: RunConfig, version: int, cooperation: float) -> EvalReport:
    """Two trajectories of one problem whose parts add up to 2.5 and the cooperation."""
    parts = {"structure": 1.0, "syntax": 0.5, "tests": 0.5, "cooperation": cooperation}
    assert isinstance(config.reward, CodingReward)
    total = sum(parts.values()) + config.reward.shift
    answers = dict.fromkeys(("helper", "main"), AnswerStats(0, False, 0.0, 0.0, 0.0))
    one = EvalRow("t", "test", "sampled", 0, (total,), (parts,), (False,), dict.fromkeys(answers, ""), answers, 9)
    rows = (one, replace(one, index=1))
    return EvalReport(version, rows, summarise_rows(rows, config.reward, 0))


def test_evaluation_and_what_reads_it_problem_by_problem(tmp_path: Path, config: RunConfig) -> None:
    made = report(config, 0, 1.0)
    assert made.summary[HEADLINE]["return"].mean == 0.75
    assert mean_returns(made, config.reward) == {"t": 0.75}
    assert EvaluatedRun(RunStore(tmp_path, "run"), config, [made]).means[-1][HEADLINE]["return"] == {"t": 0.75}


def test_examples(tmp_path: Path, config: RunConfig) -> None:
    made = [report(config, 0, 0.0), report(config, 5, 1.0)]
    run = EvaluatedRun(RunStore(tmp_path, "run"), config, made)
    run.problems = {"t": Problem("t", "write t")}
    [shown] = choose_examples(run)
    assert shown.title == "Largest gain, +25.0 points: t"
    assert list(shown.reward.rows[-1]) == ["return, %", "100", "50.0", "75.0"]


def test_console_and_state(config: RunConfig) -> None:
    assert isinstance(config.reward, CodingReward)
    state, out = RunState(2, config.reward), io.StringIO()
    with RunConsole(state, Console(file=out, soft_wrap=True)) as console:
        console.start_step(Step("credit", 1))
        metrics = {"reward/joint": 3.0 + config.reward.shift, "time/credit_s": 1.0}
        console.finish_step(Step("credit", 1), metrics, reused=False)
        console.start_step(Step("update", 1))
        console.finish_step(Step("update", 1), {"time/update_s": 1.0}, reused=False)
    assert "1/2  joint return 75.0%" in out.getvalue()
    assert state.training_return == 0.75
    assert state.describe_returns() == "training 75.0%"


def test_demonstrations_repeat_what_is_good_enough() -> None:
    problems = CoopCode(kind="coopcode", num_train=6, num_test=3, num_ood=3).load()["train"]
    recipe, plugin = RECIPES["coopcode"]
    sandbox = plugin.open()
    try:
        plain, shifted = (
            make_revisions(problems, replace(recipe, reward=CodingReward(shift=shift), good_frac=0.75), sandbox, seed=0)
            for shift in (0.0, -4.0)
        )
    finally:
        sandbox.close()
    assert shifted == plain
