"""The measurements of a row of the table of baselines, and the tables of a few rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from magrpo.config.run import BaselineRow, RunConfig
from magrpo.reports.baselines import BaselineResult
from magrpo.types import EvalReport, TimedAnswer


def make_result(
    config: RunConfig, report: EvalReport, timed: Sequence[TimedAnswer] = (), **fields: object
) -> BaselineResult:
    """The measurements of the row ``naive`` of a run, which has the run's agents, environment and reward."""
    row = BaselineRow(
        name="naive",
        title="naive concatenation",
        env=config.env,
        reward=config.reward,
        agents=config.agents,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    return BaselineResult(row.model_copy(update=fields), report, timed, config.reward.maxima, comparable=True)


def test_an_answer_without_time_has_no_speed(config: RunConfig, reports: list[EvalReport]) -> None:
    """An episode of a program that asked no agent sampled nothing, in no time."""
    timed = [TimedAnswer("test/a", 0.5, 10), TimedAnswer("test/b", 0.0, 0)]
    result = make_result(config, reports[0], timed)
    assert result.means["test/sampled"]["tokens_per_s"] == {"test/a": 20.0}
    assert result.compute_mean("seconds") == pytest.approx(0.25)
    silent = make_result(config, reports[0], timed[1:])
    assert silent.format_mean("tokens_per_s") == "-"
