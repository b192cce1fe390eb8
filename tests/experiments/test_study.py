"""``magrpo study``: what it fixes, which runs it makes, how it survives failures and kills, and what it concludes."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from rich.console import Console

from magrpo.algo.stats import seed_interval
from magrpo.config.place import Place
from magrpo.config.run import load_config
from magrpo.config.study import StudyConfig
from magrpo.errors import ConfigError
from magrpo.experiments.study import Study, check_study_place, fix_study, load_study
from magrpo.experiments.study_runs import execute_run, run_study
from magrpo.process.children import list_family
from magrpo.process.signals import EndedBySignal
from magrpo.reports.budget import build_ledger
from magrpo.reports.study import StudiedRun, StudyReport
from magrpo.run.files import is_finished, keep_place
from magrpo.run.store import RunStore
from magrpo.tracking.outbox import find_folder_id
from magrpo.types import ExecutionReport
from pipelines.arguments import STUDIES, list_shipped, locate_config
from pipelines.cli import main
from tests.experiments.fake_runs import make_run, run_hanging_study, run_with_a_partner
from tests.pipelines.micro import run_locally, start, write_config
from tests.plugins import Reward
from tests.processes import assert_all_end, wait_until
from tests.reports.pages import Page

TEXT = """
config = "run.toml"
outcome = "final_return"
tokens = 100
seeds = [0, 1, 2]

[pilots]
seeds = [7, 8]
rates = [1e-2, 2e-2]

[[arms]]
name = "plain"

[[arms]]
name = "loo"
set = ["algo.estimator=marloo"]
"""
QUIET = Console(quiet=True)


def write_study(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the study above, with some of its text replaced, beside the configuration of a micro run.

    Fake runs never open the sandbox. With this one and a precision, their processes load neither torch nor MLflow.
    """
    config = write_config(folder)
    text = config.read_text().replace("tests.pipelines.micro:Sandbox", "tests.plugins:Sandbox")
    config.write_text(f'{text}\n[model]\ndtype = "float32"\n')
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "s.toml"
    path.write_text(text)
    return path


def load(path: Path) -> Study:
    return load_study(path, None, None, locate_config)


class Runner:
    """Makes fake runs, and raises the error planned for a run instead."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.errors: dict[str, BaseException] = {}

    def __call__(self, store: RunStore) -> None:
        if store.run_id in self.errors:
            raise self.errors.pop(store.run_id)
        self.made.append(store.run_id)
        make_run(store)


# ------------------------------------------------------------------------------------------------------- the protocol
def test_another_reward_needs_an_outcome_that_it_shares(tmp_path: Path) -> None:
    """``solo`` has no part for cooperation, as ``coding`` has; ``writing_solo`` scores as ``writing``."""
    copy = tmp_path / "returns.toml"
    copy.write_text((STUDIES / "coopcode.toml").read_text().replace("area_pass_at_1", "area_return"))
    with pytest.raises(ConfigError, match="arm 'single-grpo' has another reward or penalty than 'aligned'"):
        load(copy)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = [7, 8]", "seeds = [7, 2]", "pilots.seeds: 2 are reported seeds; a learning rate must be chosen on"),
        ("seeds = [0, 1, 2]", "seeds = [0, 0]", "seeds: must be different numbers"),
        ("seeds = [0, 1, 2]", "seeds = [true, 2]", "seeds: must be a number, not true"),
        ("seeds = [0, 1, 2]", "seeds = true", "seeds: must be a list: write .true."),
        ('name = "loo"', 'name = "plain"', "arms: names must differ, got plain, plain"),
        ("algo.estimator=marloo", "optim.lr=1", "arm 'loo': optim.lr cannot be set; the pilots choose it"),
        ("algo.estimator=marloo", "train.seed=1", "arm 'loo': train.seed cannot be set; it follows from seeds"),
        ("algo.estimator=marloo", "algo.estimator=marlo", "s.toml: arm 'loo': .*did you mean 'marloo'"),
        ("algo.estimator=marloo", "agents.0.lr=0.1", "agent 'helper' has a learning rate of its own"),
        ("rates = [1e-2, 2e-2]", "rates = [1e-2, -2e-3]", "arm 'plain': .*optim.lr: .* greater than 0, got -0.002"),
        (
            'name = "loo"',
            'name = "loo"\nrates = [0.01234567, 0.01234568]',
            "arm 'loo': the candidates 0.01234567 and 0.01234568 .* both 0.0123457 in .*; give .* at most six digits",
        ),
        ("algo.estimator=marloo", "optim.schedule=linear", 'cannot decay towards it: set optim.schedule="constant"'),
        ("algo.estimator=marloo", "problems.size=7", "arm 'loo' has other problems than 'plain'"),
        (
            "algo.estimator=marloo",
            "penalty.cut_off=1",
            'their returns cannot be compared; set outcome = "final_pass_at_1"',
        ),
        ("algo.estimator=marloo", "eval.max_problems=1", "arm 'loo' has eval.max_problems = 1, but 'plain' has 2"),
        ("algo.estimator=marloo", "eval.stop_above=0.1", "eval.stop_above = 0.1, but 'plain' has None, so .*; set it"),
        ("algo.estimator=marloo", "eval.seed=7", "eval.seed = 7, but 'plain' has 1234, .*; set it for all arms alike"),
        (
            "algo.estimator=marloo",
            "rollout.leave_out_long=true",
            "rollout.leave_out_long = True, but 'plain' has False",
        ),
        ('"final_return"', '"final_retrun"', "outcome.*'final_retrun'"),
        ('"run.toml"', '"other"', "other: no such file; .*shipped configurations"),
    ],
)
def test_each_mistake_is_explained_before_anything_runs(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write_study(tmp_path, (old, new)))
    assert not (tmp_path / "runs" / "studies").exists()


class Unjudged(Reward):
    """Prices like its base, but nothing passes or fails."""

    def passed(self, reports: Mapping[str, ExecutionReport]) -> None:  # type: ignore[override]
        return None


UNJUDGED = "reward.kind=tests.experiments.test_study:Unjudged"


@pytest.mark.parametrize("arm", ["plain", "loo"])
def test_pass_at_1_needs_rewards_by_which_answers_pass(tmp_path: Path, arm: str) -> None:
    own = (f'name = "{arm}"', f'name = "{arm}"\nset = ["{UNJUDGED}"]')
    path = write_study(
        tmp_path, ('\nset = ["algo.estimator=marloo"]', ""), ('"final_return"', '"final_pass_at_1"'), own
    )
    message = f's.toml: arm \'{arm}\': outcome = "final_pass_at_1".*:Unjudged\'.*; set outcome = "final_return"'
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_pass_at_1_needs_equal_trust_in_tests(tmp_path: Path) -> None:
    changes = [
        ('"final_return"', '"final_pass_at_1"'),
        ("seeds = [0, 1, 2]", 'seeds = [0, 1, 2]\nset = ["reward.kind=coding"]'),
        ("algo.estimator=marloo", "reward.refuse_forgeable=false"),
    ]
    with pytest.raises(ConfigError, match=r"arm 'loo' has another reward.refuse_forgeable than 'plain'.*the same"):
        load(write_study(tmp_path, *changes))


def test_pass_at_1_is_no_remedy_where_nothing_passes(tmp_path: Path) -> None:
    path = write_study(tmp_path, ("algo.estimator=marloo", f'penalty.cut_off=1", "{UNJUDGED}'))
    with pytest.raises(ConfigError, match="cannot be compared; give them the same"):
        load(path)


@pytest.mark.parametrize("name", list_shipped(STUDIES))
def test_a_shipped_study_is_usable(name: str, tmp_path: Path) -> None:
    study = load_study(STUDIES / f"{name}.toml", None, tmp_path, locate_config)
    assert study.list_fixed()
    pilots = study.list_pilots()
    assert pilots
    for run in pilots:
        config = study.configure_run(run)
        assert (config.optim.lr, config.train.seed) == (run.rate, run.seed)
        assert config.train.max_tokens == study.config.pilots.tokens


def test_the_runs_of_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_study(tmp_path, ('name = "loo"', 'name = "loo"\nrates = [0.5]'))
    study = load(path)
    pilots = [f"s-plain-pilot-lr{rate}-s{seed}" for rate in ("0.01", "0.02") for seed in (7, 8)]
    assert [run.run_id for run in study.list_pilots()] == pilots, "an arm with one candidate needs no pilots"
    reported = [f"s-{arm}-s{seed}" for seed in (0, 1, 2) for arm in ("plain", "loo")]
    assert [run.run_id for run in study.list_reported({})] == reported
    assert study.choose_rates() == {"loo": 0.5}
    assert main(["study", str(path), "--dry-run"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*pilots, *reported]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mlflow.db"], "nothing new"


def test_a_plan_of_a_study_checks_its_place_and_tracking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, place = write_study(tmp_path), tmp_path / "place.toml"
    place.write_text("[ranks]\ncount = 3\n")
    assert main(["study", str(path), "--place", str(place), "--dry-run"]) == 2
    assert "ranks.count = 3 must divide" in capsys.readouterr().err
    path = write_study(tmp_path, ("tokens = 100", 'tokens = 100\nset = ["tracking.uri=databricks"]'))
    assert main(["study", str(path), "--dry-run"]) == 2
    assert "on Databricks an experiment is an absolute path" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_a_study_whose_last_place_has_the_gpus_needs_none_here(tmp_path: Path) -> None:
    study = load(write_study(tmp_path, ("tokens = 100", 'tokens = 100\nset = ["model.device=cuda"]')))
    with pytest.raises(ConfigError, match="PyTorch sees no CUDA device"):
        check_study_place(study, None)
    check_study_place(study, None, for_plan=True)
    study.folder.mkdir(parents=True)
    elsewhere = {"address": "head:6379", "samplers": {"count": 1}, "ranks": {"count": 1}}
    keep_place(study.folder_store, Place.model_validate(elsewhere))
    check_study_place(study, None)


def test_a_finished_study_fits_every_machine(tmp_path: Path) -> None:
    study = load(write_study(tmp_path))
    unfit = Place.model_validate({"ranks": {"count": 3}})
    with pytest.raises(ConfigError, match=r"ranks\.count = 3 must divide"):
        check_study_place(study, unfit)
    run_study(study, Runner(), QUIET)
    check_study_place(study, unfit)


def test_what_is_fixed_cannot_change(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    first = fix_study(load(path))
    path.write_text("# another comment\n" + path.read_text())
    assert fix_study(load(path)) == first, "a comment changes nothing"
    write_study(tmp_path, ('"final_return"', '"area_return"'), ("seeds = [0, 1, 2]", "seeds = [0, 1]"))
    message = r'has changed:\n  outcome: "final_return" -> "area_return"\n  seeds: \[0, 1, 2\] -> \[0, 1\]\nundo'
    with pytest.raises(ConfigError, match=message):
        fix_study(load(path))
    write_study(tmp_path)
    config = tmp_path / "run.toml"
    config.write_text(config.read_text().replace("group_size = 4", "group_size = 8"))
    with pytest.raises(ConfigError, match=r"run.toml: rollout.group_size: 4 -> 8"):
        fix_study(load(path))
    assert load_study(path, "other", None, locate_config).folder.name == "other"


def test_configurations_of_one_name_in_two_folders_are_both_fixed(tmp_path: Path) -> None:
    path = write_study(
        tmp_path, ('"run.toml"', '"x/run.toml"'), ('name = "loo"', 'name = "loo"\nconfig = "y/run.toml"')
    )
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        shutil.copy(tmp_path / "run.toml", tmp_path / folder)
    fix_study(load(path))
    for folder in ("x", "y"):
        config = tmp_path / folder / "run.toml"
        text = config.read_text()
        config.write_text(text.replace("group_size = 4", "group_size = 8"))
        with pytest.raises(ConfigError, match=f"  {folder}/run.toml: rollout.group_size: 4 -> 8"):
            fix_study(load(path))
        config.write_text(text)
    fix_study(load(path))


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    study = load(write_study(tmp_path))
    study.folder.mkdir(parents=True)
    (study.folder / "study.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"study.json is damaged: restore it from a backup"):
        fix_study(study)


def test_a_study_leaves_other_runs_alone(tmp_path: Path) -> None:
    study = load(write_study(tmp_path))
    RunStore.create(load_config(tmp_path / "run.toml"), "s-loo-s1")
    with pytest.raises(ConfigError, match=r"run s-loo-s1 exists in .*: choose another --name"):
        fix_study(study)


# ------------------------------------------------------------------------------------------------------------- the runs
def test_a_run_of_a_study_has_an_identity_and_does_not_choose_its_precision_by_measurement(tmp_path: Path) -> None:
    measured = 'set = ["model.dtype=auto", "model.device=cpu"]'
    study = load(write_study(tmp_path, ("seeds = [0, 1, 2]", f"seeds = [0]\n{measured}")))
    fix_study(study)
    run, *_ = study.list_pilots()
    assert study.configure_run(run).model.dtype == "auto"
    assert execute_run(study, Runner(), run) == ""
    store = study.find_store(run.run_id)
    assert store.config().model.dtype == "float32"
    assert find_folder_id(store.path), "so that MLflow tells it from runs of the same name in other folders"


def test_a_study_survives_failures_and_interruptions(tmp_path: Path) -> None:
    study, runner = load(write_study(tmp_path)), Runner()
    runner.errors = {"s-plain-pilot-lr0.02-s7": RuntimeError("no luck"), "s-loo-s1": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run_study(study, runner, QUIET)
    assert "no luck" in (study.folder / "s-plain-pilot-lr0.02-s7.error.txt").read_text()
    assert "s-plain-s0" not in runner.made, "a pilot of its arm is missing"
    assert study.choose_rates() == {"loo": 0.01}
    assert "not finished" in Page((study.folder / "study.html").read_text()).text

    runner.errors = {"s-loo-s2": RuntimeError("still none")}
    assert run_study(study, runner, QUIET) == {"s-loo-s2": "RuntimeError: still none"}
    assert [path.name for path in study.folder.glob("*.error.txt")] == ["s-loo-s2.error.txt"], "the other is mended"
    assert run_study(study, runner, QUIET) == {}
    assert run_study(study, runner, QUIET) == {}
    names = [run.run_id for run in [*study.list_pilots(), *study.list_reported({})]]
    assert sorted(runner.made) == sorted(names), "every run was made once"
    check_report(study)
    check_tracking(study, names)


def test_an_error_while_an_interrupt_is_handled_ends_the_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, made = load(write_study(tmp_path, *FOUR_RUNS)), []

    def run(store: RunStore, *, local: bool) -> None:
        made.append(store.run_id)
        try:
            raise EndedBySignal(signal.SIGTERM)
        finally:
            raise RuntimeError("the engine did not close")

    monkeypatch.setattr("pipelines.commands.study.run_stages", run)
    assert main(["study", str(study.path), "--local"]) == 128 + signal.SIGTERM
    assert len(made) == 1
    assert "ended by SIGTERM; finished work is kept. Resume with:" in capsys.readouterr().out
    assert not list(study.folder.glob("*.error.txt")), "an interrupt is no failure"
    [parent] = MlflowClient(f"sqlite:///{study.root / 'mlflow.db'}").search_runs(["1"], "tags.`magrpo.study` = 's'")
    assert parent.info.status == "KILLED"


def test_a_run_without_the_outcome_has_failed(tmp_path: Path) -> None:
    changes = ("seeds = [0, 1, 2]", "seeds = [0]"), ('"final_return"', '"final_pass_at_1"')
    study = load(write_study(tmp_path, *changes))
    failures = run_study(study, partial(make_run, is_judged=False), QUIET)
    assert failures["s-loo-pilot-lr0.01-s7"] == "its evaluations have no pass_at_1"
    assert "no pass_at_1" in Page((study.folder / "study.html").read_text()).text


FOUR_RUNS = ("rates = [1e-2, 2e-2]", "rates = [1e-2]"), ("seeds = [0, 1, 2]", "seeds = [0, 1]")


def test_runs_are_executed_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    study = load(write_study(tmp_path, *FOUR_RUNS))
    failures = run_study(study, run_with_a_partner, QUIET, workers=2)
    assert failures == {
        "s-plain-s1": "its process ended with status 137",
        "s-loo-s1": "RuntimeError: no luck",
    }
    markers = [path.read_text().split() for path in (study.root / "markers").iterdir()]
    assert len({os.getpid(), *(int(pid) for pid, _ in markers)}) == 5, "each run had a process of its own"
    assert {int(threads) for _, threads in markers} == {max(1, len(os.sched_getaffinity(0)) // 2)}
    assert "OMP_NUM_THREADS" not in os.environ
    assert run_study(study, make_run, QUIET) == {}, "the two that failed are executed again"


@pytest.mark.slow
def test_an_ended_study_ends_its_runs(tmp_path: Path) -> None:
    process = get_context("spawn").Process(target=run_hanging_study, args=(write_study(tmp_path, *FOUR_RUNS),))
    process.start()
    wait_until(lambda: len(list((tmp_path / "runs").glob("s-*/begun"))) == 2)
    family = list_family(process.pid or 0)
    process.terminate()
    process.join()
    assert_all_end(family)
    study = load(tmp_path / "s.toml")
    assert len(list(study.root.glob("s-*"))) == 2, "no other run was begun"
    assert not list(study.folder.glob("*.error.txt")), "an interrupt is no failure"
    assert "not finished" in Page((study.folder / "study.html").read_text()).text


def check_report(study: Study) -> None:
    """The pilots' seeds like 0.01, the reported ones 0.02: the rates come from the former."""
    assert study.choose_rates() == {"plain": 0.01, "loo": 0.01}
    page = Page((study.folder / "study.html").read_text())
    _, *rows = page.tables["Primary outcome: return after 100 tokens"]
    assert [row[:3] for row in rows] == [["plain", "0.01", "3"], ["loo", "0.01", "3"]]
    assert [row[3].split()[0] for row in rows] == ["51.0", "62.0"]
    assert rows[1][4].startswith("+11.0"), "10, and one more for each seed"
    assert rows[1][5] == "0.0027", "of t = 11 / (1 / sqrt(3)) = 19.05 with two degrees of freedom"
    _, *pilots = page.tables["Pilots: the choice of the learning rates"]
    assert [(row[0], row[1], row[-1]) for row in pilots] == [
        *(("plain", "0.01", "chosen"), ("plain", "0.02", "")),
        *(("loo", "0.01", "chosen"), ("loo", "0.02", "")),
    ]
    assert "loo is better than plain" in page.text
    assert study.folder.joinpath("study.json").read_text().count('"digest"') == 1
    with (study.folder / "study.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * (8 + 6), "two evaluations of each run"


def check_tracking(study: Study, names: list[str]) -> None:
    """Assert that MLflow has a finished run of the study with its report, and that all runs are recorded under it."""
    client = MlflowClient(f"sqlite:///{study.root / 'mlflow.db'}")
    [parent] = client.search_runs(["1"], "tags.`magrpo.study` = 's'")
    assert parent.info.status == "FINISHED"
    assert parent.data.params["outcome"] == "final_return"
    logged = {Path(file.path).name for file in client.list_artifacts(parent.info.run_id, "study")}
    assert logged == {"study.html", "study.csv"}
    for name in names:
        first = json.loads((study.root / name / "tracking.jsonl").read_text().splitlines()[0])
        assert first["values"]["magrpo.parent"] == "s"
        assert first["values"]["magrpo.parent_folder"] == parent.data.tags["magrpo.folder"]


def test_training_ends_at_its_tokens_as_a_shorter_run_would(tmp_path: Path) -> None:
    """A limit of tokens changes no result, only the iteration that is the last."""
    path = write_config(tmp_path, iterations=50)
    whole = ["eval.every=9"]
    store, tracker, outcome = run_locally(load_config(path, [*whole, "train.max_tokens=120"]))
    length = store.config().train.num_iterations
    [report] = store.path.rglob("report.html")
    assert f"{length} iterations, seed" in Page(report.read_text()).text
    assert is_finished(store)
    tokens = {budget.iteration: budget.tokens for budget in build_ledger(store.stage_metrics())}
    assert tokens[length - 1] < 120 <= tokens[length]
    shorter, other_tracker, other = run_locally(load_config(path, [*whole, f"train.num_iterations={length}"]))
    assert outcome.checkpoint["sha"] == other.checkpoint["sha"]
    assert list(outcome.evaluations) == list(other.evaluations) == [0, length]
    assert [(step, t.split) for step, t in tracker.traces] == [(step, t.split) for step, t in other_tracker.traces]
    first = store.manifest_of(f"{length:05d}/update")["key"]
    assert first == shorter.manifest_of(f"{length:05d}/update")["key"]


# ------------------------------------------------------------------------------------------------------ the conclusions
def report_of(outcomes: dict[str, Sequence[float]], study: str = "area_return") -> StudyReport:
    """The report of a study whose runs rose from 0 to twice these outcomes over 100 tokens."""
    num_seeds = max(map(len, outcomes.values()))
    tree = {"config": "x", "outcome": study, "tokens": 100, "seeds": list(range(num_seeds))}
    config = StudyConfig.model_validate({**tree, "arms": [{"name": name} for name in outcomes]})
    runs = [
        StudiedRun(name, name, seed, None, False, [(0, 0, {"return": 0.0}), (4, 100, {"return": 2 * value})])
        for name, values in outcomes.items()
        for seed, value in enumerate(values)
    ]
    return StudyReport("s", config, runs, dict.fromkeys(outcomes), {}, {"when": "", "digest": "", "fixed": {}})


def test_differences_are_paired_by_seed() -> None:
    """The seeds differ far more than the arms do, which differ by 2 points, give or take 1."""
    report = report_of({"base": [0.1, 0.3, 0.5], "arm": [0.11, 0.32, 0.53]})
    base, arm = report.arms
    assert base.difference is None
    assert arm.difference is not None
    assert astuple(arm.difference) == pytest.approx(astuple(seed_interval([0.01, 0.02, 0.03])))
    assert arm.p == pytest.approx(0.0742, abs=1e-4), "of t = 2 sqrt(3) = 3.46"
    [banner] = report.list_banners()
    assert banner.word == "no reliable difference"


def test_holm_decides_about_many_arms_and_losers_are_printed() -> None:
    """Alone both would be significant; of two, the weaker one is so because the stronger one is."""
    report = report_of(
        {"base": [0.1, 0.2, 0.3, 0.4], "worse": [0.05, 0.16, 0.25, 0.36], "better": [0.2, 0.301, 0.4, 0.5]}
    )
    assert [banner.word for banner in report.list_banners()] == ["worse", "better"]
    for arm in report.arms[1:]:
        assert arm.difference is not None
        assert not arm.difference.low <= 0 <= arm.difference.high, "intervals agree with the words"
    assert [row[0] for row in report.outcome_table().rows] == ["base", "worse", "better"]


def test_without_all_runs_there_is_no_verdict() -> None:
    report = report_of({"base": [0.1, 0.2, 0.3], "arm": [0.2, 0.3]})
    [banner] = report.list_banners()
    assert (banner.word, report.num_missing) == ("not finished", 1)
    assert [arm.difference for arm in report.arms] == [None, None]
    assert report.run_table().rows[-1][2] == "not finished"


def test_two_seeds_are_said_to_be_few() -> None:
    report = report_of({"base": [0.1, 0.2], "arm": [0.2, 0.31]})
    [banner] = report.list_banners()
    assert "12.7 standard errors" in banner.advice
    assert "12.7 standard errors" in report.outcome_table().note


@pytest.mark.parametrize("num_seeds", [2, 3])
def test_equal_differences_decide_nothing(num_seeds: int) -> None:
    """Outcomes that take few values may differ by the same value in every seed, by luck."""
    report = report_of({"base": [0.5, 0.6, 0.7][:num_seeds], "arm": [0.6, 0.7, 0.8][:num_seeds]})
    [banner] = report.list_banners()
    assert banner.word == "no reliable difference"
    assert "the same in every seed" in banner.advice
    assert report.arms[1].p == 1.0


def test_one_arm_has_a_mean_over_seeds() -> None:
    report = report_of({"only": [0.1, 0.2, 0.3]}, "final_return")
    [banner] = report.list_banners()
    assert banner.word == "measured"
    assert report.outcome_table().rows[0][3].startswith("40.0 [")


# ------------------------------------------------------------------------------------------------------- the table
def test_one_seed_has_no_interval() -> None:
    report = report_of({"base": [0.1], "arm": [0.2]}, "final_return")
    [banner] = report.list_banners()
    assert banner.sentence == "return after 100 tokens: base 20.0 %, arm 40.0 % (1 seed)."
    assert report.secondary_table().rows == [("base", "20.0"), ("arm", "40.0")]
    assert report.secondary_table().note == "Secondary, in percent."
    assert report.outcome_table().note == "Held-out problems, sampled; percent."


def test_a_finished_run_may_be_deleted(tmp_path: Path) -> None:
    """Or executed elsewhere: the folder of the study remembers it."""
    study, runner = load(write_study(tmp_path)), Runner()
    run_study(study, runner, QUIET)
    table = (study.folder / "study.csv").read_bytes()
    shutil.rmtree(study.root / "s-plain-pilot-lr0.01-s7")
    shutil.rmtree(study.root / "s-loo-s1")
    assert run_study(study, Runner(), QUIET) == {}
    assert (study.folder / "study.csv").read_bytes() == table

    there = load_study(study.path, None, tmp_path / "there", locate_config)
    shutil.copytree(study.folder, there.folder)
    shutil.copytree(study.root / "s-loo-s0", there.root / "s-loo-s0")
    shutil.rmtree(there.root / "s-loo-s0" / "stages")
    runner = Runner()
    assert run_study(there, runner, QUIET) == {}
    assert runner.made == ["s-loo-s0"], "a run that has been started again is not finished"
    assert (there.folder / "study.csv").read_bytes() == table
    check_report(there)


def test_a_finished_study_needs_neither_models_nor_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = load(write_study(tmp_path, *FOUR_RUNS))
    checked: list[str] = []
    monkeypatch.setattr("pipelines.commands.study.check_inputs", lambda config, **_: checked.append(str(config.root)))
    assert main(["study", str(study.path), "--dry-run"]) == 0
    assert len(checked) == 2, "once for each arm"
    fix_study(study)
    run_study(study, Runner(), QUIET)
    assert main(["study", str(study.path), "--dry-run"]) == 0
    assert main(["study", str(study.path), "--local"]) == 0
    assert len(checked) == 2, "nothing is left to run"


def test_an_edit_of_a_finished_study_is_named_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = "rates = [1e-2, 2e-2]"
    study = load(write_study(tmp_path, (rates, "rates = [1e-2]")))
    fix_study(study)
    run_study(study, Runner(), QUIET)
    path = write_study(tmp_path, (rates, "rates = [2e-2]"))
    for flag in ("--local", "--dry-run"):
        assert main(["study", str(path), flag]) == 2
        assert "was fixed on" in capsys.readouterr().err


def test_reported_runs_must_have_the_rate_that_the_pilots_choose(tmp_path: Path) -> None:
    study, runner = load(write_study(tmp_path)), Runner()
    run_study(study, runner, QUIET)
    (study.folder / "study.csv").unlink()
    chosen = study.choose_rates()["loo"]
    reported = study.find_store("s-loo-s1")
    config = reported.config()
    reported.write_config(config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 0.5})}))
    with pytest.raises(ConfigError, match=rf"s-loo-s1 was trained with optim.lr=0.5, but .* now choose {chosen!r}"):
        check_study_place(study, None)


def test_an_interrupt_while_a_pilot_is_repeated_drops_no_reported_run(tmp_path: Path) -> None:
    study, runner = load(write_study(tmp_path)), Runner()
    run_study(study, runner, QUIET)
    table = study.folder / "study.csv"
    lines = sorted(table.read_text().splitlines())
    for seed in (0, 1, 2):
        shutil.rmtree(study.root / f"s-loo-s{seed}")
    pilot = "s-loo-pilot-lr0.02-s7"
    shutil.rmtree(study.root / pilot / "stages")
    runner.errors = {pilot: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run_study(study, runner, QUIET)
    assert sorted(table.read_text().splitlines()) == [line for line in lines if pilot not in line]
    runner.made = []
    assert run_study(study, runner, QUIET) == {}
    assert runner.made == [pilot]
    assert sorted(table.read_text().splitlines()) == lines


def test_a_table_counts_only_for_what_was_fixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = load(write_study(tmp_path, *FOUR_RUNS))
    run_study(study, Runner(), QUIET)
    table = study.folder / "study.csv"
    for run in list_finished(study):
        shutil.rmtree(study.root / run)
    table.write_text(table.read_text().replace("loo,reported,0.01,1,", "loo,reported,0.02,1,"))
    assert list_finished(study) == ["s-plain-s0", "s-loo-s0", "s-plain-s1"], "another learning rate"
    table.write_text(table.read_text().replace("loo,reported,0.02,1,", "loo,reported,0.02,one,"))
    assert main(["study", str(study.path), "--dry-run"]) == 2
    assert f"{table}: not a table of this program (ValueError: invalid literal" in capsys.readouterr().err
    (study.folder / "study.json").unlink()
    with pytest.raises(ConfigError, match=r"study.csv: no study.json beside it says what was fixed before its runs"):
        fix_study(study)


def list_finished(study: Study) -> list[str]:
    return [run.run_id for run in study.read_finished(study.choose_rates())]


# -------------------------------------------------------------------------------------------------------------- Prefect
@pytest.mark.slow
def test_a_killed_study_goes_on_through_prefect(tmp_path: Path) -> None:
    """The shipped study, as a newcomer starts it, killed in its third run."""
    log, again = tmp_path / "log", tmp_path / "again"
    arguments = ["study", "tiny", "--root", str(tmp_path / "runs")]
    process = start(arguments, log)
    wait_until(lambda: log.exists() and "[3/8]" in log.read_text())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    finished = list((tmp_path / "runs").glob("tiny-*/stages/*/report/_SUCCESS"))
    stages = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("tiny-*/stages/*/*/_SUCCESS")}
    assert len({path.parents[3] for path in stages}) >= 2
    process = start(arguments, again)
    process.join()
    assert process.exitcode == 0, again.read_text()
    text = again.read_text()
    assert text.count("finished already") == len(finished) >= 2
    assert {path: path.stat().st_mtime_ns for path in stages} == stages, "nothing was computed again"
    page = Page((tmp_path / "runs" / "studies" / "tiny" / "study.html").read_text())
    assert "missing" not in page.text
    assert "crossed" in page.text
