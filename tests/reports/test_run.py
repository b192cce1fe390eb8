"""The report of a run: what the page shows, and that nothing in a completion becomes part of it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from magrpo.config.run import RunConfig
from magrpo.reports.budget import Budget
from magrpo.reports.exhibits import choose_examples
from magrpo.reports.figures import tabulate_quantities
from magrpo.reports.origin import describe_origin, suggest_commands
from magrpo.reports.tables import print_tables
from magrpo.run.store import RunStore
from magrpo.stages.evaluate import summarise_rows
from magrpo.tracking.outbox import RECORDS, encode_record
from magrpo.types import HEADLINE, EvalReport, EvalRow
from tests.reports.pages import ATTACK, BUDGETS, Page, make_report


def test_a_report_of_training(tmp_path: Path, config: RunConfig, reports: list[EvalReport]) -> None:
    make_report(config, reports, BUDGETS).write_files(tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    shown = Page(text)
    assert shown.headings == [
        "Verdict",
        "Summary",
        "No reliable change of the held-out return: from 62.5% to 81.2%",
        "Before and after",
        "Held-out problems, sampled",
        "Next steps",
        "Highest rewards",
        "Training health",
        "Training, iteration by iteration",
        "Training metrics",
        "Held-out problems, greedy",
        "New compositions (ood), sampled",
        "New compositions (ood), greedy",
        "More examples",
        "Budget: 500 tokens generated, 50 answer sets scored (joint actions), 5 programs run, 5 updates",
        "Configuration: 25 values that differ from the defaults",
        "About this run",
    ]
    assert ATTACK in shown.text
    assert shown.tables["Training metrics"] == [
        ["metric", "first", "last", "lowest", "highest"],
        ["update/helper/entropy", "1", "0.2", "0.2", "1"],
        ["update/never_heard_of", "10", "50", "10", "50"],
        ["time/update_s", "2", "2", "2", "2"],
    ]
    assert shown.tags.isdisjoint({"script", "img", "link", "iframe", "object"})
    assert shown.handlers == []
    assert [link for link in shown.loaded if not link.startswith(("#", "data:image/png;base64,"))] == []
    assert "@import" not in text
    assert "url(http" not in text
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json"}
    tree = json.loads((tmp_path / "report.json").read_text())
    assert tree["gains"]["test/sampled"]["tests"]["mean"] == pytest.approx((1 + 0 + 0 - 0.5) / 4)
    assert tree["budget"][-1]["tokens"] == 500


def test_the_figures_of_the_tables(config: RunConfig, reports: list[EvalReport]) -> None:
    first = tabulate_quantities(make_report(config, reports, BUDGETS))[HEADLINE]
    assert first.title == "Held-out problems, sampled"
    assert list(first.columns) == [
        "",
        "before training",
        "after 5 iterations",
        "gain, paired by problem",
    ]
    lines = {line[0]: line[1:] for line in first.rows}
    assert [cell.split()[0] for cell in lines["tests"]] == ["50.0", "62.5", "~"], "the interval of +12.5 holds 0"
    assert [cell.split()[0] for cell in lines["generated tokens"]] == ["18.0", "18.0", "~"]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, r"pass@1 +25\.0 \[0\.0, 75\.0\] +50\.0 \[0\.0, 100\.0\] +~ \+25\.0 \[\+0\.0, \+75\.0\]"),
        (60, r"pass@1 +25\.0 +50\.0 +~ \+25\.0 *\n +\[0\.0, 75\.0\] +\[0\.0, 100\.0\] +\[\+0\.0, \+75\.0\]"),
    ],
)
def test_the_tables_of_a_run_fit_a_terminal(
    config: RunConfig, reports: list[EvalReport], width: int, shown: str
) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    print_tables(list(tabulate_quantities(make_report(config, reports, BUDGETS)).values()), console)
    assert re.search(shown, console.export_text())


def test_quantities_that_one_evaluation_lacks_are_left_out(config: RunConfig, reports: list[EvalReport]) -> None:
    """A sample on which the sandbox failed takes away the pass@k of all samples of a problem."""
    first, last = reports
    lacking = {
        key: {name: value for name, value in values.items() if name != "pass_at_1"}
        for key, values in first.summary.items()
    }
    for summary, is_shown in ((first.summary, True), (lacking, False)):
        run = make_report(config, [replace(first, summary=summary), last], BUDGETS)
        lines = tabulate_quantities(run)[HEADLINE].rows
        assert any(line[0] == "pass@1" for line in lines) == is_shown


def test_a_report_on_one_problem_has_no_interval(tmp_path: Path, config: RunConfig, reports: list[EvalReport]) -> None:
    only = [keep_rows(config, report, lambda row: row.task_id == "test/a") for report in reports]
    for evaluations in (only, only[1:]):
        make_report(config, evaluations, BUDGETS).write_files(tmp_path)
        shown = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
        assert re.findall(r"\[[-+\d.,]+, [-+\d.,]+\]", shown.text) == []


def test_an_evaluation_alone(tmp_path: Path, config: RunConfig, reports: list[EvalReport]) -> None:
    make_report(config, reports[1:], [Budget()]).write_files(tmp_path)
    shown = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "Learning curves" not in shown.headings
    assert "Budget" not in shown.headings
    assert "Highest return, 100.0 %: test/c" in shown.text
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json"}


def keep_rows(config: RunConfig, report: EvalReport, kept: Callable[[EvalRow], bool]) -> EvalReport:
    """An evaluation as it would be if only the rows that are ``kept`` could be judged."""
    rows = tuple(filter(kept, report.rows))
    return replace(report, rows=rows, summary=summarise_rows(rows, config.reward, 0))


def ask_helper_only(config: RunConfig, report: EvalReport, task_id: str) -> EvalReport:
    """An evaluation in which a program asked the helper on a single problem."""
    rows = tuple(
        row
        if row.task_id == task_id
        else replace(row, texts={"main": row.texts["main"]}, answers={"main": row.answers["main"]})
        for row in report.rows
    )
    return replace(report, rows=rows, summary=summarise_rows(rows, config.reward, 0))


def test_gains_need_problems_that_both_evaluations_have(
    tmp_path: Path, config: RunConfig, reports: list[EvalReport]
) -> None:
    """The helper was asked on other problems, and no answer to the new compositions could be judged at first."""
    first = keep_rows(config, ask_helper_only(config, reports[0], "test/a"), lambda row: row.split != "ood")
    run = make_report(config, [first, ask_helper_only(config, reports[1], "test/b")], BUDGETS)
    run.write_files(tmp_path)
    gains = json.loads((tmp_path / "report.json").read_text())["gains"]
    assert gains.keys() == {"test/sampled", "test/greedy"}
    assert "main/response_tokens" in gains["test/sampled"]
    assert "helper/response_tokens" not in gains["test/sampled"]
    shown = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "New compositions (ood), sampled" not in shown.headings
    later = keep_rows(config, reports[1], lambda row: row.split == "test" or row.task_id == "ood/b")
    earlier = keep_rows(config, reports[0], lambda row: row.split == "test" or row.task_id == "ood/a")
    make_report(config, [earlier, later], BUDGETS).write_files(tmp_path)
    shown = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert shown.tables["New compositions (ood), sampled"][1][-1] == "-"


def test_a_report_of_evaluations_without_a_common_problem(
    tmp_path: Path, config: RunConfig, reports: list[EvalReport]
) -> None:
    first = keep_rows(config, reports[0], lambda row: row.task_id == "test/a")
    run = make_report(config, [first, keep_rows(config, reports[1], lambda row: row.task_id == "test/b")], BUDGETS)
    run.write_files(tmp_path)
    assert run.verdict.word == "measured once"
    assert json.loads((tmp_path / "report.json").read_text())["gains"]["test/sampled"] == {}


def test_examples_are_chosen_by_their_gain(config: RunConfig, reports: list[EvalReport]) -> None:
    shown = choose_examples(make_report(config, reports, BUDGETS))
    assert [one.title for one in shown] == [
        "Largest gain, +62.5 points: test/a",
        "Median gain, +37.5 points: test/b",
        "Largest loss, -25.0 points: test/d",
    ]
    assert list(shown[0].reward.rows[2]) == ["tests", "1", "0.00", "1.00"]
    assert list(shown[0].reward.rows[-1]) == ["return, %", "100", "37.5", "100.0"]
    assert [one.text for one in shown[0].sides["after"]] == [ATTACK, "main of a"]


def test_a_turn_without_a_price_has_no_return(tmp_path: Path, config: RunConfig, reports: list[EvalReport]) -> None:
    rows = tuple(replace(row, returns=(0.0, *row.returns), parts=({}, *row.parts)) for row in reports[1].rows)
    run = make_report(config, [replace(reports[1], rows=rows)], [Budget()])
    shown = choose_examples(run)[0].reward
    assert shown.columns == ("", "at most", "turn 1", "turn 2")
    assert [list(line) for line in (shown.rows[2], shown.rows[-1])] == [
        ["tests", "1", "-", "1.00"],
        ["return, %", "100", "-", "100.0"],
    ]
    run.write_files(tmp_path)
    assert "against turn" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_an_example_shows_a_trajectory_that_changed(config: RunConfig, reports: list[EvalReport]) -> None:
    """The first trajectories are equal, as they are where a few iterations changed little; only the second differs."""
    first = reports[0]
    changed = [
        replace(row, returns=(4.0,), texts={"helper": "other"})
        if (row.task_id, row.mode, row.index) == ("test/a", "sampled", 1)
        else row
        for row in first.rows
    ]
    run = make_report(config, [first, replace(first, policy_version=2, rows=tuple(changed))], BUDGETS)
    best, middle, last = choose_examples(run)
    assert best.title == "Largest gain, +31.2 points: test/a", "half of 62.5: one of two trajectories"
    assert [shown.text for shown in best.sides["after"]] == ["other"]
    assert [one.title.partition(":")[0] for one in (middle, last)] == [
        "No change",
        "No change",
    ]


def test_a_report_says_where_its_run_comes_from(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = RunStore.create(config.model_copy(update={"root": tmp_path / "runs"}), "first")
    assert [name for name, _ in describe_origin(store, config)] == ["run folder", "MLflow"], "nothing is recorded yet"
    records = [
        {"kind": "status", "value": "RUNNING", "time_ms": 0},
        {"kind": "tags", "values": {"machine": "node7, 16 cores", "version.torch": "2.13.0"}},
        {"kind": "tags", "values": {"mlflow.source.git.commit": "abc", "git.dirty": "true"}},
    ]
    (store.path / RECORDS).write_bytes(b"".join(map(encode_record, records)) + b'{"torn')
    facts = dict(describe_origin(store, config))
    assert facts["started"] == "1970-01-01 00:00 UTC"
    assert (facts["machine"], facts["commit"], facts["libraries"]) == (
        "node7, 16 cores",
        "abc with changes",
        "torch 2.13.0",
    )
    *_, (_, command) = suggest_commands(store, config)
    assert command == "magrpo ask first", "the root is the default"
