"""Kill -9 at every boundary of a stage and inside stages: a resumed run ends bit for bit where it would have ended.

The commands run in processes of their own, forked from one that has the libraries loaded. What kills them is installed
in the process by the functions ``die_*`` below.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run, RunInfo

from magrpo.config.run import load_config
from magrpo.reports.evaluations import EvaluatedRun
from magrpo.reports.figures import format_difference, format_wall_time
from magrpo.reports.publish import rebuild_report
from magrpo.reports.verdict import judge_run
from magrpo.run.config_diff import flatten_config
from magrpo.run.manifest import MANIFEST
from magrpo.run.rewind import steps_to_repeat
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.tracking.mlflow_runs import SYSTEM_PREFIX
from magrpo.tracking.provenance import collect_provenance
from magrpo.tracking.wall_time import read_wall_time
from tests.pipelines.micro import command, magrpo, resume_locally, run_locally, write_config

TIMED = ("time/", "sandbox/")
"""Metrics of the work done: wall time, and programs run, more of them where a process has run none yet."""

BUDGET = {"report.html", "report.json"}
"""Files that tell time and programs run: more of both where a stage was cut short and begun again."""


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_commit(folder: str = "") -> None:
    """As soon as the output of the step in ``folder`` is in place; without it, that of any step."""
    commit = RunStore.commit

    def commit_and_die(store: RunStore, name: str, *rest: object) -> object:
        pointer = commit(store, name, *rest)
        if folder in ("", name):
            die()
        return pointer

    RunStore.commit = commit_and_die  # type: ignore[method-assign,assignment]


def die_before_rename(stage: str) -> None:
    """When everything of ``stage`` is written, but it is not in place yet."""
    rename = Path.rename

    def rename_or_die(self: Path, target: Path) -> Path:
        if target.name == stage and target.parent.name != "00000":
            die()
        return rename(self, target)

    Path.rename = rename_or_die  # type: ignore[method-assign,assignment]


def die_at_work(stage: str) -> None:
    """When ``stage`` of an iteration reports its first items."""
    from magrpo.progress.console import RunConsole

    start_step = RunConsole.start_step

    def start_to_die(self: RunConsole, step: Step) -> Callable[[int], None]:
        advance = start_step(self, step)
        return die if step.label == stage and step.iteration > 0 else advance

    RunConsole.start_step = start_to_die  # type: ignore[method-assign]


def wait_at_work(stage: str) -> None:
    """Let ``stage`` of iteration 1 never end, in the main thread, where a signal interrupts it."""
    import torch

    from magrpo.progress.console import RunConsole

    torch.set_num_threads(1)  # with more, agents answer in threads, for which an interrupted run waits

    start_step = RunConsole.start_step

    def wait(_: int) -> None:
        print("waits", flush=True)
        time.sleep(600)

    def start_to_wait(self: RunConsole, step: Step) -> Callable[[int], None]:
        advance = start_step(self, step)
        return wait if step.label == stage and step.iteration > 0 else advance

    RunConsole.start_step = start_to_wait  # type: ignore[method-assign]


class Runs:
    """Runs of one configuration under one root, by name. ``flags`` are added to every command."""

    def __init__(self, folder: Path, config: Sequence[str] = (), flags: Sequence[str] = ("--local",)) -> None:
        self.config = [*(config or [str(write_config(folder, iterations=2))]), f"root={folder / 'runs'}"]
        self.root, self.flags = folder / "runs", flags

    def train(self, name: str, before: Callable[[], None] | None = None) -> int:
        """Start or resume a run."""
        return command(self.arguments(name), self.log(name), before)

    def train_unrecorded(self, name: str) -> None:
        """Make a run in this process that MLflow does not hold: that takes a third of the time."""
        path, *given = self.config
        run_locally(load_config(path, given), name)

    def arguments(self, name: str) -> list[str]:
        """To start or resume a run."""
        new = ["train", *self.config, "--name", name]
        again = ["resume", name, "--root", str(self.root)]
        return [*(again if RunStore(self.root, name).exists() else new), *self.flags]

    def stop_unrecorded(self, name: str, folder: str) -> RunStore:
        """As :meth:`train_unrecorded`, stopped after the output of ``folder``."""
        commit = RunStore.commit

        def commit_and_stop(*arguments: object) -> object:
            pointer = commit(*arguments)
            if pointer["dir"].endswith(folder):
                raise KeyboardInterrupt
            return pointer

        with patch.object(RunStore, "commit", commit_and_stop), pytest.raises(KeyboardInterrupt):
            self.train_unrecorded(name)
        return RunStore.open(self.root, name)

    def assert_goes_on(self, folder: str, stage: str) -> None:
        """A run stopped after the output of ``folder``, resumed, and begun again from ``stage`` ends as ``whole``."""
        store = self.stop_unrecorded("stopped", folder)
        resume_locally(store)
        assert self.outcome("stopped") == self.outcome("whole")
        store.set_aside([step.output for step in steps_to_repeat(store, store.config(), stage)])
        resume_locally(store)
        assert self.outcome("stopped") == self.outcome("whole")

    def log(self, name: str) -> Path:
        return self.root.parent / f"{name}.log"

    def metrics(self, name: str) -> dict[str, dict[str, float]]:
        """The metrics in the manifests of all committed stages."""
        return {stage: manifest["metrics"] for stage, manifest in self.manifests(name).items()}

    def outcome(self, name: str) -> dict[str, object]:
        """All that must not depend on how often a run was killed: keys, digests, metrics and the files themselves."""
        stages = self.root / name / "stages"
        files = {str(p.relative_to(stages)): p for p in stages.rglob("*") if p.is_file() and p.name != MANIFEST}
        files = {path: file for path, file in files.items() if file.name not in BUDGET}
        manifests = self.manifests(name)
        for manifest in manifests.values():
            del manifest["digest"]
            manifest["metrics"] = {k: v for k, v in manifest["metrics"].items() if not k.startswith(TIMED)}
            manifest["files"] = {name: facts for name, facts in manifest["files"].items() if name not in BUDGET}
        return {"manifests": manifests, "files": {path: file.read_bytes() for path, file in files.items()}}

    @property
    def mlflow(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.root / 'mlflow.db'}")

    def mlflow_run(self, name: str) -> Run:
        """The one MLflow run of a run."""
        experiment = self.mlflow.get_experiment_by_name("magrpo")
        assert experiment is not None
        [run] = self.mlflow.search_runs([experiment.experiment_id], f"tags.`magrpo.run_id` = '{name}'")
        return run

    def tracked(self, name: str) -> dict[str, Any]:
        """What MLflow holds of a run, with no value twice; of a step done again, the later one."""
        client, run = self.mlflow, self.mlflow_run(name)
        histories: dict[str, list[tuple[int, float]]] = {}
        for key in (key for key in run.data.metrics if not key.startswith(SYSTEM_PREFIX)):
            points = client.get_metric_history(run.info.run_id, key)
            values = [(p.step, p.value) for p in sorted(points, key=lambda p: (p.step, p.timestamp))]
            assert all(one != other for one, other in pairwise(values)), f"{key}: {values}"
            newest = dict(values)  # of several values of a step, the last
            histories[key] = sorted((s, 0.0 if key.startswith(TIMED) else v) for s, v in newest.items())
        return {
            "status": run.info.status,
            "params": run.data.params,
            "metrics": histories,
            "datasets": sorted((d.dataset.name, d.dataset.digest) for d in run.inputs.dataset_inputs),
            "traces": sorted(_traces(client, run.info)),
            "artifacts": sorted(_artifacts(client, run.info.run_id, "")),
        }

    def manifests(self, name: str) -> dict[str, dict[str, Any]]:
        """The manifests of all committed stages."""
        stages = self.root / name / "stages"
        found = stages.glob(f"*/[!.]*/{MANIFEST}")
        return {str(path.parent.relative_to(stages)): json.loads(path.read_text()) for path in found}


def _traces(client: MlflowClient, run: RunInfo) -> Iterator[tuple[str, str | None, list[tuple[str, Any]]]]:
    """Iteration, problem and feedback of the traces of a run."""
    query = f"metadata.`mlflow.sourceRun` = '{run.run_id}'"
    for trace in client.search_traces(locations=[run.experiment_id], filter_string=query, include_spans=False):
        feedback = sorted((found.name, found.value) for found in trace.info.assessments)
        yield trace.info.tags["magrpo.iteration"], trace.info.request_preview, feedback


def _artifacts(client: MlflowClient, run_id: str, folder: str) -> list[str]:
    found = client.list_artifacts(run_id, folder or None)
    inner = [path for item in found if item.is_dir for path in _artifacts(client, run_id, item.path)]
    return inner + [item.path for item in found if not item.is_dir]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With an uninterrupted run, ``whole``."""
    runs = Runs(tmp_path_factory.mktemp("resume"))
    assert runs.train("whole") == 0
    return runs


def assert_same(runs: Runs, name: str) -> None:
    assert runs.outcome(name) == runs.outcome("whole")
    assert runs.tracked(name) == runs.tracked("whole")


def test_mlflow_holds_everything_about_a_run(runs: Runs) -> None:
    store = RunStore.open(runs.root, "whole")
    run, tracked = runs.mlflow_run("whole"), runs.tracked("whole")
    assert tracked["status"] == "FINISHED"
    assert run.data.params == {key: str(value) for key, value in flatten_config(store.config()).items()}
    tags = run.data.tags
    assert tags["magrpo.seed"] == "0"
    assert tags["mlflow.note.content"].startswith("**MAGRPO** on `tests.plugins:ListedProblems`, agents `helper` (base")
    verdict = judge_run(EvaluatedRun.read(store))
    assert "Finished.\n" in tags["mlflow.note.content"]
    assert verdict.gain is not None
    assert (tags["verdict"], tags["gain"]) == (verdict.word, format_difference(verdict.gain))
    assert f"- **{verdict.word}**{verdict.sentence.removeprefix(verdict.word)}\n" in tags["mlflow.note.content"]
    wall_time = read_wall_time(store.path)
    assert wall_time is not None
    assert run.info.end_time - run.info.start_time == pytest.approx(1000 * wall_time.seconds)
    assert f"- took {format_wall_time(wall_time)}" in tags["mlflow.note.content"]
    report = (store.path / "report.html").read_text()
    rebuild_report(store)
    assert (store.path / "report.html").read_text() == report
    assert "magrpo.rewound" not in tags
    assert [iteration for iteration, *_ in tracked["traces"]] == ["0", "0", "2", "2"]  # two of each evaluation
    assert {f"version.{name}" for name in ("python", "torch", "transformers", "mlflow", "prefect")} <= set(tags)
    assert {key: tags.get(key) for key in collect_provenance()} == collect_provenance()
    prepared = store.path / "stages" / "00000" / "prepare"
    kind = store.config().problems.kind
    assert {name for name, _ in tracked["datasets"]} == {f"{kind} {split}" for split in ("train", "test", "ood")}
    assert len({digest for _, digest in tracked["datasets"]}) == 3
    stored = {Path(path).name for path in tracked["artifacts"]}
    assert {path.name for path in prepared.iterdir()} <= stored
    committed = {path.parent.name for path in store.path.glob(f"stages/*/*/{MANIFEST}")}
    folders = {part for path in tracked["artifacts"] for part in Path(path).parts}
    assert committed - {"prepare", "update"} <= folders
    assert "adapter_model.safetensors" in folders
    top = {Path(path).parts[0] for path in tracked["artifacts"]}
    assert top == {"checkpoints", "problems", "report", "report.html", "stages"}
    assert [path for path in tracked["artifacts"] if path.startswith("report/")] == ["report/report.json"]


def test_level_and_statistics_of_the_sandbox_are_recorded(runs: Runs) -> None:
    assert runs.log("whole").read_text().count("sandbox: none, programs run unprotected") == 1
    data = runs.mlflow_run("whole").data
    assert data.tags["sandbox.level"] == "none"
    names = ("executions", "candidates_per_s", "timeout_frac", "crash_frac", "memory_frac", "infra_error_frac", "level")
    assert {f"sandbox/{name}" for name in names} | {"eval/sandbox/infra_error_frac"} <= data.metrics.keys()
    assert data.metrics["sandbox/level"] == 0.0


EVERY = (
    *("00000/prepare", "00000/update", "00000/evaluate"),
    *(f"0000{number}/{stage}" for number in (1, 2) for stage in ("rollout.0", "score.0", "credit", "update")),
    *("00002/evaluate", "00002/report"),
)
SOME = ("00000/prepare", "00000/evaluate", "00001/score.0", "00001/update", "00002/update", *EVERY[-2:])
"""One boundary of each kind: the next process makes the weights, samples, credits, samples from trained weights, prunes
and evaluates, reports, or only ends."""


@pytest.mark.parametrize("folders", [SOME, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "every"])
def test_killed_after_stages(runs: Runs, folders: Sequence[str]) -> None:
    """Each process goes on where the one before was killed."""
    assert set(EVERY) == runs.metrics("whole").keys()
    name = f"after-{len(folders)}"
    kept: dict[str, dict[str, float]] = {}
    for folder in folders:
        assert runs.train(name, partial(die_after_commit, folder)) == -signal.SIGKILL
        now = runs.metrics(name)
        assert now.keys() == set(EVERY[: EVERY.index(folder) + 1])
        assert now.items() >= kept.items(), "a committed stage was done again"
        kept = now
    assert runs.train(name) == 0
    assert runs.metrics(name) == kept
    assert_same(runs, name)


@pytest.mark.parametrize(
    ("killer", "stage"),
    [
        pytest.param(die_at_work, "rollout.0", marks=pytest.mark.slow),
        pytest.param(die_at_work, "score.0", marks=pytest.mark.slow),
        (die_at_work, "update"),
        pytest.param(die_at_work, "evaluate", marks=pytest.mark.slow),
        pytest.param(die_before_rename, "update", marks=pytest.mark.slow),
    ],
)
def test_killed_inside_a_stage(runs: Runs, killer: Callable[[str], None], stage: str) -> None:
    name = f"{killer.__name__}-{stage}"
    assert runs.train(name, partial(killer, stage)) == -signal.SIGKILL
    kept = runs.metrics(name)
    assert 0 < len(kept) < len(runs.metrics("whole"))
    assert not any(folder.endswith(stage) and not folder.startswith("00000") for folder in kept)
    assert runs.train(name) == 0
    assert runs.metrics(name).items() >= kept.items(), "a committed stage was done again"
    assert_same(runs, name)


def test_a_run_goes_on_without_the_weights_it_started_from(runs: Runs, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(runs.root / "whole" / "agents" / "helper", weights)
    started = Runs(runs.root.parent, [*runs.config, f"agents.0.start_from={weights}"])
    started.train_unrecorded("started")
    started.stop_unrecorded("moved", "00001/update")
    weights.rename(tmp_path / "elsewhere")
    assert magrpo(started.arguments("moved")) == 0
    assert started.outcome("moved") == started.outcome("started")
