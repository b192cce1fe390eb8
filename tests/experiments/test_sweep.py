"""``magrpo sweep``: which runs it makes, what it does about those that end badly, and what it says in the end."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import pytest
from mlflow import MlflowClient

from magrpo.algo.stats import crossed_interval
from magrpo.config.run import load_resolved
from magrpo.engines.transformers import TransformersEngine
from magrpo.experiments.sweep_grid import Sweep, load_sweep, plan_sweep
from magrpo.interfaces import Engine
from magrpo.model.host import EngineHost
from magrpo.plugins import ConfigError, Plugin
from magrpo.reports.budget import Budget
from magrpo.reports.comparison import judge_settings
from magrpo.reports.comparison_tables import (
    difference_tables,
    evaluation_table,
    setting_table,
)
from magrpo.reports.evaluations import EvaluatedRun, load_evaluated_run
from magrpo.reports.figures import format_interval
from magrpo.reports.over_seeds import TOO_FEW_SEEDS, average_evaluations, hide_intervals
from magrpo.rewards.common import ProgramReward
from magrpo.run.store import RunStore
from magrpo.stages.evaluate import summarise_rows
from magrpo.types import EvalReport, EvalRow, Problem
from pipelines.cli import main
from tests.pipelines.micro import write_config
from tests.reports.pages import Page

ENGINES = ("tests.experiments.test_sweep:Moody", "transformers")
MOODS: list[BaseException] = []


class Moody(Plugin):
    """The transformers engine, but each of ``MOODS`` keeps it from opening once."""

    def open(self, host: EngineHost) -> Engine:
        if MOODS:
            raise MOODS.pop(0)
        return TransformersEngine(kind="transformers").open(host)


def planned(folder: Path, *settings: str, seeds: int = 1, overrides: Sequence[str] = ()) -> Sweep:
    return plan_sweep(write_config(folder), overrides, settings, seeds, "s", None)


def test_every_combination_with_every_seed(tmp_path: Path) -> None:
    settings = ("algo.estimator=magrpo,marloo", "optim.lr=1e-2,0.5")
    plan = planned(tmp_path, *settings, seeds=2, overrides=["train.seed=5", "algo.gamma=0.5"])
    names = [f"s-{estimator}-{lr}-s{s}" for estimator in ("magrpo", "marloo") for lr in ("1e-2", "0.5") for s in (5, 6)]
    assert [child.run_id for child in plan.children] == names
    configs = [load_resolved(child.config) for child in plan.children]
    assert [c.algo.estimator for c in configs] == ["magrpo"] * 4 + ["marloo"] * 4
    assert [c.optim.lr for c in configs] == [0.01, 0.01, 0.5, 0.5] * 2
    assert [c.train.seed for c in configs] == [5, 6] * 4
    assert {c.algo.gamma for c in configs} == {0.5}
    assert plan.children[-1].title == "algo.estimator=marloo optim.lr=0.5"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mlflow.db"], "a plan writes nothing"


def test_commas_in_brackets_separate_nothing_and_values_need_not_be_names(tmp_path: Path) -> None:
    plan = planned(tmp_path, 'lora.target_modules=["q_proj", "v_proj"],["q_proj"]')
    assert [load_resolved(c.config).lora.target_modules for c in plan.children] == [("q_proj", "v_proj"), ("q_proj",)]
    assert [c.run_id for c in planned(tmp_path, "optim.lr=1e-3,1e-3,'1e-3'").children] == ["s-00-s0", "s-01-s0"]
    assert [c.run_id for c in planned(tmp_path, seeds=2).children] == ["s-s0", "s-s1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algo.estimator"], "--set 'algo.estimator': must be written section.key=value,value"),
        (["algo.estimator="], "must be written section.key=value,value"),
        (["train.seed=1,2"], "--set train.seed: use --seeds"),
        (["root=a,b"], "--set root: use --root"),
        (["algo.gamma=1", "algo.gamma=0.5"], "a key is given twice"),
        (["algo.estimator=magrpo,marlo"], "algo.estimator: unknown value 'marlo'; did you mean 'marloo'"),
    ],
)
def test_each_mistake_is_told_before_anything_runs(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, *settings)


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs" / "s-s0").mkdir(parents=True)
    with pytest.raises(ConfigError, match="s-s0 exists: choose another --name, or --resume s"):
        planned(tmp_path)
    with pytest.raises(ConfigError, match=r"no sweep 's' in .*; there are none"):
        load_sweep(tmp_path / "runs", "s")


def reports_of(values: Mapping[int, Sequence[float]]) -> list[EvalReport]:
    """Evaluations, by iteration, whose problems, sampled once, came to these fractions of their tests."""
    reports = []
    for iteration, fractions in values.items():
        rows = [
            EvalRow(f"p{i}", "test", "sampled", 0, (value,), ({"tests": value},), (value == 1,), {}, {}, 1)
            for i, value in enumerate(fractions)
        ]
        reports.append(EvalReport(iteration, tuple(rows), summarise_rows(rows, TESTS_ONLY, 0)))
    return reports


class OnlyTests(ProgramReward):
    """Its only part are the tests, at most 1."""

    part_maxima: ClassVar[Mapping[str, float]] = {"tests": 1.0}


TESTS_ONLY = OnlyTests(kind="tests.experiments.test_sweep:OnlyTests")


def compared(folder: Path, seed: int, values: Mapping[int, Sequence[float]]) -> EvaluatedRun:
    """A run that generated 10 tokens in an iteration; its problems are told apart by their place."""
    [child] = planned(folder, overrides=[f"train.seed={seed}"]).children
    config = load_resolved(child.config).model_copy(update={"reward": TESTS_ONLY})
    run = EvaluatedRun(str(seed), RunStore(folder, "s"), config, reports_of(values))
    run.budgets = [Budget(i, tokens=10 * i, joint_actions=2 * i, updates=i) for i in values]
    run.problems = {f"p{i}": Problem(f"p{i}", "") for i in range(9)}
    return run


def test_means_and_intervals_are_over_seeds_and_problems(tmp_path: Path) -> None:
    one = compared(tmp_path, 0, {0: [0.0, 0.5, 1.0], 2: [1.0, 1.0, 1.0], 4: [1.0, 0.0, 0.5]})
    two = compared(tmp_path, 1, {0: [0.5, 0.5, 0.0], 3: [1.0, 1.0, 1.0], 4: [1.0, 0.5, 0.0]})
    first, last = average_evaluations([one, two])
    assert (first.policy_version, last.policy_version) == (0, 4)
    assert first.summary["test/sampled"]["return"] == crossed_interval([[0.0, 0.5, 1.0], [0.5, 0.5, 0.0]], 0)
    assert last.summary["test/sampled"]["tests"] == crossed_interval([[1.0, 0.0, 0.5], [1.0, 0.5, 0.0]], 0)
    assert average_evaluations([one]) == one.reports


def test_a_single_seed_has_the_interval_over_problems(tmp_path: Path) -> None:
    run = compared(tmp_path, 0, {0: [0.0, 0.5, 1.0, 1.0]})
    section = evaluation_table("", {"a": [(run, 0)]}, "")
    assert section.rows[0][-2] == format_interval("tests", run.last.summary["test/sampled"]["tests"])


def test_differences_over_seeds_are_paired_and_those_that_may_be_none_are_marked(tmp_path: Path) -> None:
    base = [compared(tmp_path, seed, {0: [0.0, 0.5, 1.0, 0.2 + 0.01 * seed]}) for seed in (0, 1, 2)]
    more = [compared(tmp_path, seed, {0: [0.1, 0.6, 1.1, 0.3 + 0.01 * seed]}) for seed in (0, 1, 2)]
    noise = [compared(tmp_path, seed, {0: [0.0, 0.6, 0.9, 0.2]}) for seed in (0, 1, 2)]
    ends = {title: [(run, 0) for run in runs] for title, runs in (("base", base), ("more", more), ("noise", noise))}
    [section] = difference_tables("At the end", ends)
    (_, better, *_), (_, same, *_) = section.rows
    assert better == "+10.0 [+10.0, +10.0]"
    assert same.startswith("~ ")
    assert "~: the interval holds 0, so no difference is shown" in section.note
    for run in more:
        run.problems = {task_id: Problem(task_id, "another") for task_id in run.problems}
    del ends["noise"]
    [section] = difference_tables("At the end", ends)
    assert section.rows[0][1] == "other problems"


def test_two_seeds_are_too_few_for_an_interval(tmp_path: Path) -> None:
    """The same two seeds without an interval everywhere: of Student's t it would reach beyond every percentage."""
    base = [compared(tmp_path, seed, {0: [0.0, 0.0], 4: [0.2 + 0.6 * seed, 0.4]}) for seed in (0, 1)]
    more = [compared(tmp_path, seed, {0: [0.0, 0.0], 4: [0.9, 1.0 - 0.5 * seed]}) for seed in (0, 1)]
    settings = {"base": base, "more": more}
    ends = {title: [(run, 1) for run in runs] for title, runs in settings.items()}
    table = evaluation_table("At the end", ends, "Note.")
    assert [row[-2] for row in table.rows] == ["45.0", "82.5"]
    assert table.note == f"Note. {TOO_FEW_SEEDS}"
    [section] = difference_tables("At the end", ends)
    assert section.rows[0][1] == "+37.5"
    table = setting_table(settings)
    assert [row[:3] for row in table.rows] == [("base", "2", "45.0"), ("more", "2", "82.5")]
    assert TOO_FEW_SEEDS in table.note
    [comparison] = judge_settings(settings)
    assert comparison.word == "too few seeds"
    assert "[" not in comparison.sentence
    curve = [report.summary["test/sampled"]["return"] for report in hide_intervals(average_evaluations(more), 2)]
    assert all(value.low == value.mean == value.high for value in curve), "no band"
    three = setting_table({"base": [*base, compared(tmp_path, 2, {4: [0.5, 0.5]})]})
    assert "\n[" in three.rows[0][2], "the interval stands below"


def finished(root: Path) -> list[str]:
    return sorted(path.parents[3].name for path in root.glob("s-*/stages/00001/report/_SUCCESS"))


def test_a_sweep_survives_failures_and_interruptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, root = str(write_config(tmp_path, iterations=1)), tmp_path / "runs"
    names = [f"s-{kind}-s{seed}" for kind in ("tests.experiments.test_sweep-Moody", "transformers") for seed in (0, 1)]
    grid = ["--set", "engine.kind=tests.experiments.test_sweep:Moody,transformers", "--seeds", "2"]
    resume = ["sweep", "--resume", "s", "--root", str(root)]
    assert main(["sweep", config, *grid, "--name", "s", "--dry-run"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names
    assert [path.name for path in root.iterdir()] == ["mlflow.db"], "nothing new"

    MOODS[:] = [RuntimeError("no luck"), KeyboardInterrupt()]
    assert main(["sweep", config, *grid, "--name", "s", "--local"]) == 130
    assert f"sweep --resume s --root {root} --local" in capsys.readouterr().out
    assert finished(root) == []
    assert sorted(path.name for path in root.glob("s-*")) == sorted(names[:2])
    assert "no luck" in (root / "sweeps" / "s" / f"{names[0]}.error.txt").read_text()

    MOODS[:] = [RuntimeError("still none")]
    assert main([*resume, "--local"]) == 1
    said = capsys.readouterr().out
    assert f"failed: {names[0]}: RuntimeError: still none" in said
    assert finished(root) == names[1:]
    before = {name: (root / name / "tracking.jsonl").read_bytes() for name in names[1:]}

    assert main([*resume, "--local", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "[1/4]" not in said
    assert "At the end of training" in said, "the table"
    assert "too few seeds:" in said, "the verdict"
    assert finished(root) == names
    assert {name: (root / name / "tracking.jsonl").read_bytes() for name in before} == before, "done, so left alone"
    assert main([*resume, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("finished") >= 4
    check_report(root, names)
    check_tracking(root, names)
    check_comparison(root, names, capsys)


def check_report(root: Path, names: list[str]) -> None:
    """The engines are the same, so are the settings' figures; each is the mean of its seeds'."""
    folder = root / "sweeps" / "s"
    ends = [load_evaluated_run("", RunStore.open(root, name)).last.summary["test/sampled"]["return"] for name in names]
    assert ends[:2] == ends[2:]
    with (folder / "sweep.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["quantity"] == "return" and row["policy_version"] == "1"]
    means = [float(r["mean"]) for r in rows if (r["seed"], r["split"], r["mode"]) == ("", "test", "sampled")]
    assert means == pytest.approx([fmean(end.mean for end in ends[:2])] * 2)
    text = (folder / "sweep.html").read_text()
    page = Page(text)
    same = ["+0.0", "+0.0", "2"]
    assert ["transformers", *same] in [cells for rows in page.tables.values() for cells in rows]
    assert "not finished" not in page.text
    assert "<svg" in text
    assert len(json.loads((folder / "sweep.json").read_text())["children"]) == 4


def check_tracking(root: Path, names: list[str]) -> None:
    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    [parent] = client.search_runs(["1"], "tags.`magrpo.sweep` = 's'")
    assert parent.info.status == "FINISHED"
    assert parent.data.params["train.seed"] == "0,1"
    children = client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert sorted(run.data.tags["magrpo.run_id"] for run in children) == names
    assert {run.info.status for run in children} == {"FINISHED"}
    logged = {Path(file.path).name for file in client.list_artifacts(parent.info.run_id, "sweep")}
    assert logged == {"sweep.html", "sweep.csv"}
    assert len(client.search_runs(["1"])) == len(names) + 1


def check_comparison(root: Path, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With the same runs under another name: every setting twice, each at the mean of its seeds."""
    shutil.copytree(root / "sweeps" / "s", root / "sweeps" / "t")
    assert main(["compare", "s", "t", "--root", str(root)]) == 0
    folder = root / "comparisons" / "s-vs-t"
    text = (folder / "compare.html").read_text()
    page = Page(text)
    mean = fmean(
        load_evaluated_run("", RunStore.open(root, name)).last.summary["test/sampled"]["return"].mean
        for name in names[:2]
    )
    for title in ("Held-out problems, sampled", "At an equal budget of tokens"):
        heads, *rows = page.tables[title]
        assert [row[0] for row in rows] == [f"{name} {title}" for name in "st" for title in ENGINES]
        assert {row[1] for row in rows} == {"2"}
        assert {row[heads.index("return")].split()[0] for row in rows} == {f"{100 * mean:.1f}"}
    same = ["+0.0", "+0.0", "2"]
    assert [f"t {ENGINES[1]}", *same] in [cells for rows in page.tables.values() for cells in rows]
    assert text.count("<svg") == 4, "return and pass@1 over iterations and tokens"
    capsys.readouterr()
    assert main(["compare", "s", names[0], "--root", str(root)]) == 2
    assert "s is a sweep, but the others are not" in capsys.readouterr().err
