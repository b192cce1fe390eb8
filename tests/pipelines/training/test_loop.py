"""The loop on scripted stages: which stages run, in which order, and what the tracker is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from magrpo.config import RunConfig, load_config
from magrpo.layout import Step
from magrpo.store import Pointer, RunStore
from pipelines.training.loop import Outcome, run_steps
from pipelines.training.recorder import RunRecorder
from tests import plugins
from tests.memory_tracker import MemoryTracker


class ScriptedStages:
    """Commits a file for each step; a rollout deeper than ``depth`` turns finds no node to act at."""

    def __init__(self, store: RunStore, depth: int = 99) -> None:
        self.store = store
        self.depth = depth
        self.calls: list[str] = []

    def run_step(self, step: Step, inputs: Sequence[Pointer]) -> Pointer:
        self.calls.append(step.title if step.happens_once else f"{step.iteration}/{step.title}")
        assert [pointer["dir"] for pointer in inputs] == [f"stages/{name}" for name in step.inputs][: len(inputs)]
        metrics = {
            "rollout": {"rollout/groups": float(int(step.part or 0) < self.depth), "time/rollout_s": 1.0},
            "score": {"reward/joint": float(step.part or 0)},
            "update": {"update/loss": float(step.iteration)},
            "evaluate": {"eval/return": 0.5},
            "report": {"report/gain": 1.0},
        }.get(step.stage, {})

        def write(folder: Path) -> dict[str, float]:
            (folder / "train.jsonl.gz").write_text(step.name)
            return metrics

        return self.store.commit(step.folder, "k", write)


def run(config: RunConfig, stages: ScriptedStages, tracker: MemoryTracker) -> Outcome:
    return run_steps(config, stages.store, stages.run_step, RunRecorder(config, stages.store, tracker))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(plugins.CONFIG)
    return load_config(path, [f"root={tmp_path}", "train.num_iterations=3", "eval.every=2", "env.num_turns=2"])


def test_every_stage_runs_once_in_order(config: RunConfig) -> None:
    store, tracker = RunStore.create(config), MemoryTracker()
    stages = ScriptedStages(store)
    outcome = run(config, stages, tracker)
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
    run(config, stages, MemoryTracker())
    assert [call for call in stages.calls if call.startswith("1/")] == [
        "1/rollout.0",
        "1/score.0",
        "1/rollout.1",
        "1/credit",
        "1/update",
    ]
