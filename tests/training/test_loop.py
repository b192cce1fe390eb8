"""The loop on scripted stages: which stages run, in which order, and what the tracker is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.errors import ConfigError
from magrpo.run.rewind import steps_to_repeat
from magrpo.run.steps import SAMPLING_STAGES, Step, first_missing, steps
from magrpo.run.store import ENDED, Pointer, RunStore
from magrpo.training import loop
from magrpo.training.loop import Outcome, run_steps
from magrpo.training.recorder import RunRecorder
from tests import plugins
from tests.memory_tracker import MemoryTracker


class ScriptedStages:
    """Commits a file for each step; a rollout deeper than ``depth`` turns finds no node to act at.

    ``at_work`` is called within each step, before it is committed.
    """

    def __init__(
        self, store: RunStore, depth: int = 99, at_work: Callable[[Step], None] = lambda _: None, tokens: int = 0
    ) -> None:
        self.store = store
        self.depth = depth
        self.tokens = tokens
        self.at_work = at_work
        self.calls: list[str] = []

    def run_step(self, step: Step, inputs: Sequence[Pointer]) -> Pointer:
        self.calls.append(step.label if step.happens_once else f"{step.iteration}/{step.label}")
        assert [pointer["dir"] for pointer in inputs] == [f"stages/{name}" for name in step.inputs][: len(inputs)]
        metrics = {
            "rollout": {
                "rollout/groups": float(int(step.part or 0) < self.depth),
                "time/rollout_s": 1.0,
                **({"rollout/tokens": float(self.tokens)} if self.tokens else {}),
            },
            "score": {"reward/joint": float(step.part or 0)},
            "update": {"update/loss": float(step.iteration)},
            "evaluate": {"eval/return": 0.5},
            "report": {"report/gain": 1.0},
        }.get(step.stage, {})

        def write(folder: Path) -> dict[str, float]:
            self.at_work(step)
            (folder / "train.jsonl.gz").write_text(step.label)
            return metrics

        return self.store.commit(step.output, "k", write)


def run(config: RunConfig, stages: ScriptedStages, tracker: MemoryTracker) -> Outcome:
    return run_steps(config, stages.store, stages.run_step, RunRecorder(config, stages.store, tracker))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(plugins.CONFIG)
    overrides = ["train.num_iterations=3", "eval.every=2", "env.num_turns=2", "tracking.traces=0"]
    return load_config(path, [f"root={tmp_path}", *overrides])


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


# ----------------------------------------------------------------------------------------------------------------- lag
PATIENCE_S = 120.0


def with_lag(config: RunConfig, lag: int, iterations: int = 6) -> RunConfig:
    train = config.train.model_copy(update={"lag": lag, "num_iterations": iterations})
    return config.model_copy(update={"train": train})


class Begun:
    """The steps that began so far; threads wait for one another here."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self._changed = threading.Condition()

    def add(self, step: Step) -> None:
        with self._changed:
            self.steps.append(str(step))
            self._changed.notify_all()

    def wait_for(self, *steps: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(steps) <= set(self.steps), PATIENCE_S), (steps, self.steps)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_rollout_samples_from_the_checkpoint_of_so_many_updates_ago(config: RunConfig, lag: int) -> None:
    rollouts = [step for step in steps(with_lag(config, lag)) if step.label == "rollout.0"]
    checkpoints = [int(step.inputs[1].partition("/")[0]) for step in rollouts]
    assert checkpoints == [max(step.iteration - 1 - lag, 0) for step in rollouts]
    updates = [step for step in steps(with_lag(config, lag)) if step.stage == "update"]
    assert [int(step.inputs[1].partition("/")[0]) for step in updates] == [step.iteration - 1 for step in updates]


@pytest.mark.parametrize("lag", [1, 2])
def test_iterations_are_sampled_while_an_update_runs(config: RunConfig, lag: int) -> None:
    """Each update waits here for the rollouts that may run beside it, and no other has begun by then."""
    config = with_lag(config, lag)
    last, begun = config.train.num_iterations, Begun()

    def at_work(step: Step) -> None:
        if step.stage == "update":
            ahead = range(step.iteration + 1, min(step.iteration + lag, last) + 1)
            begun.wait_for(*(f"rollout.0:{iteration}" for iteration in ahead))
            assert f"rollout.0:{step.iteration + lag + 1}" not in begun.steps
        begun.add(step)

    stages, tracker = ScriptedStages(RunStore.create(config, "ahead"), at_work=at_work), MemoryTracker()
    outcome = run(config, stages, tracker)
    assert sorted(stages.calls) == sorted(set(stages.calls))
    assert len(stages.calls) == len(steps(config))
    in_turn, in_turn_tracker = ScriptedStages(RunStore.create(config, "turn")), MemoryTracker()
    assert run(with_lag(config, 0), in_turn, in_turn_tracker) == outcome
    assert tracker.history == in_turn_tracker.history, "metrics reach MLflow in the order of iterations"
    assert [folder for _, folder in tracker.artifacts] == [folder for _, folder in in_turn_tracker.artifacts]


@pytest.mark.parametrize("lag", [0, 2])
def test_only_sampling_leaves_the_calling_thread(config: RunConfig, lag: int) -> None:
    threads: dict[Step, int] = {}
    config = with_lag(config, lag)

    def at_work(step: Step) -> None:
        threads[step] = threading.get_ident()

    run(config, ScriptedStages(RunStore.create(config), at_work=at_work), MemoryTracker())
    elsewhere = {step for step, thread in threads.items() if thread != threading.get_ident()}
    assert elsewhere == {step for step in threads if lag and step.stage in SAMPLING_STAGES}


def test_an_iteration_that_is_sampled_ahead_ends_early_too(config: RunConfig) -> None:
    config = with_lag(config, 1)
    store = RunStore.create(config)
    stages = ScriptedStages(store, depth=1)
    run(config, stages, MemoryTracker())
    assert [call for call in stages.calls if call.startswith("3/") and "evaluate" not in call] == [
        *("3/rollout.0", "3/score.0", "3/rollout.1", "3/credit", "3/update")
    ]
    assert first_missing(config, store) == len(steps(config))


def test_a_budget_of_tokens_ends_training_until_an_iteration_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(plugins.CONFIG)
    overrides = ["train.num_iterations=4", "eval.every=9", "train.max_tokens=20", "optim.schedule=constant"]
    overrides += ["tracking.traces=0"]
    config = load_config(path, [f"root={tmp_path}", *overrides])
    store, tracker = RunStore.create(config), MemoryTracker()
    stages = ScriptedStages(store, tokens=10)
    assert sorted(run(config, stages, tracker).evaluations) == [0, 2]
    assert store.config().train.num_iterations == 2
    assert store.planned_config() == config, "what MLflow has as parameters stays true"
    assert [step for step, _ in tracker.history] == [0, 1, 2, 2], "iteration 2 once, with its evaluation; the report"
    resumed = MemoryTracker()
    run(store.config(), stages, resumed)
    assert resumed.history == tracker.history
    store.set_aside([step.output for step in steps_to_repeat(store, store.config(), "rollout:2")])
    assert store.config() == config
    stages.tokens = 4
    assert sorted(run(store.config(), stages, MemoryTracker()).evaluations) == [0, 4]
    (store.path / ENDED).write_text("[]")
    with pytest.raises(ConfigError, match=f"{ENDED} is damaged: delete it"):
        store.config()


def test_an_error_in_a_thread_ends_the_run_after_the_steps_in_progress(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_lag(config, 2)
    store, begun, stopped = RunStore.create(config), Begun(), threading.Event()
    monkeypatch.setattr(loop, "Event", lambda: stopped)
    in_progress = "update:1", "rollout.0:2"

    def at_work(step: Step) -> None:
        begun.add(step)
        if str(step) == "score.0:3":
            begun.wait_for(*in_progress)
            raise OSError("the third iteration fails")
        if str(step) in in_progress:
            assert stopped.wait(PATIENCE_S)

    stages = ScriptedStages(store, at_work=at_work)
    with pytest.raises(OSError, match="the third iteration fails"):
        run(config, stages, MemoryTracker())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("magrpo-iteration")]
    committed = [str(step) for step in steps(config) if store.is_committed(step.output)]
    assert {*in_progress, "rollout.0:3"} <= set(committed)
    assert not {"score.0:2", "score.0:3", "rollout.0:4"} & set(committed)
    assert str(steps(config)[first_missing(config, store)]) == "score.0:2"

    monkeypatch.undo()
    resumed = ScriptedStages(store)
    run(config, resumed, MemoryTracker())
    assert first_missing(config, store) == len(steps(config))


def test_an_interrupt_ends_the_steps_in_threads(config: RunConfig) -> None:
    """Whoever waits for the engine is told by ``abort``, and has ended when the loop does."""
    config = with_lag(config, 1)
    store, begun, aborted = RunStore.create(config), Begun(), threading.Event()
    ended: list[str] = []

    class Aborted(BaseException):
        pass

    def at_work(step: Step) -> None:
        begun.add(step)
        if str(step) == "rollout.0:2":
            assert aborted.wait(PATIENCE_S)
            ended.append(str(step))
            raise Aborted
        if str(step) == "update:1":
            begun.wait_for("rollout.0:2")
            raise KeyboardInterrupt

    stages = ScriptedStages(store, at_work=at_work)
    recorder = RunRecorder(config, store, MemoryTracker())
    with pytest.raises(KeyboardInterrupt):
        run_steps(config, store, stages.run_step, recorder, aborted.set)
    assert ended == ["rollout.0:2"]
    assert not store.is_committed(Step("update", 1).output)


def test_repeating_from_a_stage_of_a_run_that_was_ahead(config: RunConfig) -> None:
    """The third iteration is sampled, the second update is missing; the first one's optimizer is kept."""
    config = with_lag(config, 2, iterations=4)
    store = RunStore.create(config)
    for step in steps(config):
        sampled = step.iteration == 2 and step.stage in SAMPLING_STAGES
        if step.iteration <= 1 or sampled or str(step) == "rollout.0:3":
            store.commit(step.output, "k", lambda _: {})
    assert str(steps(config)[first_missing(config, store)]) == "update:2"
    assert [str(step) for step in steps_to_repeat(store, config, "rollout:3")] == ["rollout.0:3"]
    assert [str(step) for step in steps_to_repeat(store, config, "credit")] == ["credit:2", "rollout.0:3"]
    assert [str(step) for step in steps_to_repeat(store, config, "update")] == [
        *("update:1", "rollout.0:2", "score.0:2", "rollout.1:2", "score.1:2", "credit:2", "rollout.0:3")
    ]
