"""The measurements of a row of the table of baselines, and the tables of a few rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from magrpo.config.agents import AgentConfig
from magrpo.config.run import BaselineRow, RunConfig, load_config
from magrpo.envs.program import AgentProgram
from magrpo.experiments.baselines import RunTeam, Teams, parse_names, with_baselines
from magrpo.reports.baselines import BaselineResult, BaselineTable
from magrpo.rewards.writing import WritingReward
from magrpo.stages.evaluate import summarise_rows
from magrpo.types import EvalReport, EvalRow, TimedAnswer
from tests.reports.pages import CONFIG, Page


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
    ).model_copy(update=fields)
    return BaselineResult(row, report, timed, row.reward.maxima, comparable=True)


def test_an_answer_without_time_has_no_speed(config: RunConfig, reports: list[EvalReport]) -> None:
    """An episode of a program that asked no agent sampled nothing, in no time."""
    timed = [TimedAnswer("test/a", 0.5, 10), TimedAnswer("test/b", 0.0, 0)]
    result = make_result(config, reports[0], timed)
    assert result.means["test/sampled"]["tokens_per_s"] == {"test/a": 20.0}
    assert result.compute_mean("seconds") == pytest.approx(0.25)
    silent = make_result(config, reports[0], timed[1:])
    assert silent.format_mean("tokens_per_s") == "-"


def test_what_agents_said_to_a_program_is_not_measured_as_its_texts(config: RunConfig) -> None:
    """The program may have failed before its second call, and may edit what its agents said."""
    reward = WritingReward(kind="writing")
    parts = dict.fromkeys(reward.maxima, 0.5)
    texts = {"helper": "a draft"}
    row = EvalRow("test/a", "test", "sampled", 0, (2.0,), (parts,), (None,), texts, {}, 7)
    report = EvalReport(0, (row,), summarise_rows([row], reward, 0))
    env = AgentProgram(run="my:program", writes=("summary", "elaboration"))
    result = make_result(config, report, env=env, reward=reward)
    assert not any(name.startswith("paper/") for name in result.means["test/sampled"])
    assert result.list_paper_columns() == ["structure", "length_ratio", "unique_words", "style"]


def test_a_table_of_an_oracle_alone_ranks_nothing(tmp_path: Path, config: RunConfig, reports: list[EvalReport]) -> None:
    timed = [TimedAnswer("test/a", 0.5, 10)]
    oracle = make_result(config, reports[0], timed, name="oracle_stop", title="an oracle", stop_above=1.0)
    table = BaselineTable(config, [oracle])
    assert table.paper_table().rows == []
    assert table.judge_rows().word == "no verdict"
    table.write_files(tmp_path)
    assert Page((tmp_path / "baselines.html").read_text(encoding="utf-8")).headings[0] == "Verdict"


def test_intervals_of_one_problem_are_for_new_seeds_only(config: RunConfig, reports: list[EvalReport]) -> None:
    rows = [row for row in reports[0].rows if row.task_id == "test/a"]
    report = EvalReport(0, tuple(rows), summarise_rows(rows, config.reward, 0))
    result = make_result(config, report)
    result.other_runs = [make_result(config, report)] * 2
    note = BaselineTable(config, [result]).summary_table().note
    assert "95 % intervals for new seeds on the same problem, from 3 runs" in note


def make_team(run: str, agents: Sequence[AgentConfig]) -> RunTeam:
    """The agents of a run after training."""
    weights = Path(run, "stages", "00001", "update", "weights")
    return RunTeam(run, tuple(agent.model_copy(update={"start_from": weights / agent.name}) for agent in agents))


def test_the_cross_play_table_names_the_role_of_the_first_agent(config: RunConfig, reports: list[EvalReport]) -> None:
    """The first row is that of a single agent, in an environment with a role of its own."""
    run, partner = (make_team(name, config.agents) for name in ("a", "b"))
    teams = Teams("a", RunTeam("the run", config.agents), run, None, (partner,))
    rows = with_baselines(config, parse_names("all"), teams).baselines.rows
    results = [BaselineResult(row, reports[0], (), config.reward.maxima, comparable=True) for row in rows]
    assert rows[0].env.roles() == ("solo",)
    [table] = BaselineTable(config, results).cross_play_tables()
    assert table.title.startswith("Cross-play: helper from the run of the row")


@pytest.mark.parametrize("share", ["some problems", "no problem"])
def test_the_cross_play_table_covers_the_problems_that_all_rows_have(
    config: RunConfig, reports: list[EvalReport], share: str
) -> None:
    """The sandbox failed on the others in some rows. ``partners`` alone gives the run's own team, too."""
    run, partner = (make_team(name, config.agents) for name in ("a", "b"))
    teams = Teams("a", RunTeam("the run", config.agents), run, None, (partner,))
    rows = with_baselines(config, parse_names("partners"), teams).baselines.rows
    first = min(row.task_id for row in reports[0].rows if row.split == "test")

    def leave_out(problems: Callable[[str], bool]) -> EvalReport:
        kept = tuple(row for row in reports[0].rows if row.split != "test" or not problems(row.task_id))
        return replace(reports[0], rows=kept)

    measured = {"partners_b_b": leave_out(lambda task_id: task_id == first)}
    if share == "no problem":
        measured["partners_a_b"] = leave_out(lambda task_id: task_id != first)
    results = [
        BaselineResult(row, measured.get(row.name, reports[0]), (), config.reward.maxima, comparable=True)
        for row in rows
    ]
    tables = list(BaselineTable(config, results).cross_play_tables())
    assert len(tables) == (share == "some problems")


@pytest.mark.parametrize(
    ("overrides", "where"), [((), "at the maximum"), (("eval.stop_above=3.5",), "above a reward of 3.5")]
)
def test_an_oracle_that_stops_just_below_the_maximum_stops_there(
    reports: list[EvalReport], overrides: Sequence[str], where: str
) -> None:
    config = load_config(CONFIG.with_name("embedded_two_turns.toml"), overrides)
    teams = Teams("a", RunTeam("the run", config.agents), make_team("a", config.agents), None, ())
    rows = with_baselines(config, ["naive", "oracle_stop"], teams).baselines.rows
    results = [BaselineResult(row, reports[0], (), config.reward.maxima, comparable=True) for row in rows]
    tables = {table.title: table for table in BaselineTable(config, results).list_tables()}
    assert tables["How the rows are made"].rows[1][3].endswith(f"; oracle: stops {where}")
