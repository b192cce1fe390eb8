"""``magrpo evaluate``: trained weights, evaluated in a run of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.experiments.derive import Source, create_baselines, create_evaluation
from magrpo.reports.evaluations import EvaluatedRun
from magrpo.reports.verdict import judge_run
from magrpo.run.files import read_evaluation
from magrpo.run.store import RunStore
from magrpo.types import Interval
from pipelines.cli import main
from tests.pipelines.micro import run_locally, write_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """A run of one iteration."""
    folder = tmp_path_factory.mktemp("trained")
    store, _, _ = run_locally(load_config(write_config(folder, iterations=1)), "source")
    return store


def _report(store: RunStore, iteration: int) -> object:
    report = read_evaluation(store.path / f"stages/{iteration:05d}/evaluate")
    return report.rows, report.summary


@pytest.mark.parametrize(("arguments", "iteration"), [([], 1), (["--checkpoint", "0"], 0)])
def test_an_evaluation_finds_what_training_found(trained: RunStore, arguments: list[str], iteration: int) -> None:
    root = trained.path.parent
    name = f"checkpoint-{iteration}"
    assert main(["evaluate", "source", *arguments, "--local", "--root", str(root), "--name", name]) == 0
    evaluation = RunStore.open(root, name)
    assert _report(evaluation, 0) == _report(trained, iteration)
    weights = "update/weights/main/adapter_model.safetensors"
    assert (evaluation.path / "stages/00000" / weights).read_bytes() == (
        trained.path / f"stages/{iteration:05d}" / weights
    ).read_bytes()


def test_overrides_count_and_names_do_not_clash(trained: RunStore) -> None:
    root = trained.path.parent
    names = []
    for _ in range(2):
        store = create_evaluation(Source("source", 1, root, ["eval.num_samples=7", "train.num_iterations=9"]), None)
        assert (store.config().eval.num_samples, store.config().train.num_iterations) == (7, 0)
        names.append(store.run_id)
    assert len(set(names)) == 2


@pytest.mark.parametrize(
    ("override", "remedy"),
    [("lora.alpha=5", "set lora.alpha = 4.0 (now 5.0)"), ("lora.rank=4", "set lora.rank = 2")],
)
def test_agents_are_not_evaluated_at_another_scale(
    trained: RunStore, capsys: pytest.CaptureFixture[str], override: str, remedy: str
) -> None:
    root = trained.path.parent
    command = ["evaluate", "source", override, "--local", "--root", str(root), "--name", "scaled"]
    assert main(command) == 2
    assert remedy in capsys.readouterr().err
    assert not (root / "scaled").exists()


def test_a_configuration_is_evaluated_untrained(trained: RunStore) -> None:
    root = trained.path.parent
    store = create_evaluation(Source(str(root.parent / "run.toml"), None, root), "untrained")
    assert store.path == root / "untrained"
    assert [agent.start_from for agent in store.config().agents] == [None, None]


@pytest.mark.parametrize("table", [[], ["--baselines", "single"]])
@pytest.mark.parametrize(
    ("given", "folder"), [([], "../runs"), (["root=other"], "other"), (["root=other", "--root", "third"], "third")]
)
def test_a_configuration_is_evaluated_in_the_root_where_it_would_be_trained(
    given: list[str], folder: str, table: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr("pipelines.commands.train.launch_run", lambda store, *_, **__: made.append(store.path.parent))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    main(["evaluate", str(write_config(tmp_path, iterations=1)), *given, *table])
    assert made == [Path(folder).resolve()]


def test_an_experiment_that_mlflow_cannot_use_takes_no_name(trained: RunStore) -> None:
    root = trained.path.parent
    overrides = ["tracking.uri=databricks", "tracking.experiment=relative"]
    with pytest.raises(ConfigError, match="on Databricks an experiment is an absolute path"):
        create_evaluation(Source("source", None, root, overrides), "refused")
    assert not (root / "refused").exists()


def test_a_run_may_be_named_by_its_folder(trained: RunStore) -> None:
    root = trained.path.parent
    evaluated = create_evaluation(Source(f"{trained.path}/", None, root), None)
    compared = create_baselines(Source(str(trained.path), None, root), "magrpo", None)
    assert evaluated.run_id.startswith("source-eval-1")
    assert compared.run_id.startswith("source-baselines")


def test_a_mistake_is_one_clear_line(trained: RunStore, tmp_path: Path) -> None:
    root = trained.path.parent
    with pytest.raises(ConfigError, match="run source has no weights of checkpoint 7; choose one of 0 to 1"):
        create_evaluation(Source("source", 7, root), None)
    with pytest.raises(ConfigError, match="no run 'nope'"):
        create_evaluation(Source("nope", None, root), None)
    with pytest.raises(ConfigError, match="a configuration has no checkpoints"):
        create_evaluation(Source(str(root.parent / "run.toml"), 1, root), None)
    empty = RunStore.create(load_config(root.parent / "run.toml", [f"root={tmp_path}"]), "empty")
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        create_evaluation(Source(empty.run_id, None, tmp_path), None)


def test_the_last_words_of_a_run_are_what_its_paired_interval_carries(
    trained: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", "source", "--local", "--root", str(trained.path.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    tree = json.loads((trained.path / "stages/00001/report/report.json").read_text())
    verdict = judge_run(EvaluatedRun.read(trained))
    assert verdict.gain == Interval(**tree["gains"]["test/sampled"]["return"])
    assert f"result:  {verdict.sentence}" in lines
    assert verdict.advice in {line[9:] for line in lines}, "after what the findings advise"
