"""The loop on scripted stages: which stages run, in which order, and what the tracker is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from magrpo.config import RunConfig, load_config
from magrpo.store import Pointer, RunStore
from magrpo.tracking import MemoryTracker
from pipelines.training.loop import run
from tests import plugins


class ScriptedStages:
    """Commits a file for each stage; a rollout deeper than ``depth`` turns finds no node to act at."""

    def __init__(self, store: RunStore, depth: int = 99) -> None:
        self.store = store
        self.depth = depth
        self.calls: list[str] = []

    def _commit(self, name: str, metrics: dict[str, float], *inputs: Pointer) -> Pointer:
        self.calls.append(name)
        assert all(self.store.folder(pointer).is_dir() for pointer in inputs)

        def write(folder: Path) -> dict[str, float]:
            (folder / "train.jsonl.gz").write_text(name)
            return metrics

        return self.store.commit(name, "k", write)

    def prepare(self):
        return self._commit("prepare", {})

    def start(self):
        return self._commit("start", {})

    def rollout(self, iteration, turn, problems, checkpoint, parents):
        assert (parents is None) == (turn == 0)
        groups = float(turn < self.depth)
        return self._commit(
            f"{iteration}/rollout.{turn}", {"rollout/groups": groups, "time/rollout_s": 1.0}, checkpoint
        )

    def score(self, iteration, turn, groups):
        return self._commit(f"{iteration}/score.{turn}", {"reward/joint": float(turn)}, groups)

    def credit(self, iteration, scored):
        return self._commit(f"{iteration}/credit", {}, *scored)

    def update(self, iteration, samples, checkpoint):
        return self._commit(f"{iteration}/update", {"update/loss": float(iteration)}, samples, checkpoint)

    def evaluate(self, iteration, problems, checkpoint):
        return self._commit(f"{iteration}/evaluate", {"eval/return": 0.5}, problems, checkpoint)

    def report(self, evaluations):
        return self._commit("report", {"report/gain": 1.0}, *evaluations)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(plugins.CONFIG)
    return load_config(path, [f"root={tmp_path}", "train.num_iterations=3", "eval.every=2", "env.num_turns=2"])


def test_every_stage_runs_once_in_order(config: RunConfig) -> None:
    store, tracker = RunStore.create(config), MemoryTracker()
    stages = ScriptedStages(store)
    outcome = run(config, stages, store, tracker)
    iteration = ["rollout.0", "score.0", "rollout.1", "score.1", "credit", "update"]
    expected = ["prepare", "start", "0/evaluate"]
    expected += [f"1/{stage}" for stage in iteration]
    expected += [f"2/{stage}" for stage in [*iteration, "evaluate"]]
    expected += [f"3/{stage}" for stage in [*iteration, "evaluate"]]
    assert stages.calls == [*expected, "report"]
    assert sorted(outcome.evaluations) == [0, 2, 3]
    assert outcome.checkpoint["dir"].endswith("3/update")
    assert [(name, context) for name, _, _, context in tracker.datasets] == [
        (f"{config.problems.kind} train", "training")
    ]
    once = {"rollout/groups": 1.0, "time/rollout_s": 2.0, "reward/joint": 1.0, "update/loss": 1.0}
    assert tracker.history[:2] == [(0, {"eval/return": 0.5}), (1, once)]
    assert tracker.history[-1] == (3, {"report/gain": 1.0})
    assert {"problems", "report", "checkpoints/00000", "checkpoints/00003"} <= {f for _, f in tracker.artifacts}


def test_an_iteration_ends_early_when_every_node_terminated(config: RunConfig) -> None:
    store = RunStore.create(config)
    stages = ScriptedStages(store, depth=1)
    run(config, stages, store, MemoryTracker())
    assert [call for call in stages.calls if call.startswith("1/")] == [
        "1/rollout.0",
        "1/score.0",
        "1/rollout.1",
        "1/credit",
        "1/update",
    ]
