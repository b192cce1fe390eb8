"""The beginning of an attempt, and its end, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from magrpo.config.place import Place
from magrpo.config.run import RunConfig, load_config
from magrpo.errors import ConfigError
from magrpo.planning.place_check import check_place
from magrpo.planning.precision import settle_dtype
from magrpo.progress.state import Attempt, Observer, RunState
from magrpo.run.steps import steps
from magrpo.run.store import RunStore
from magrpo.tracking.mlflow_runs import MlflowTracker
from magrpo.tracking.outbox import read_outbox
from magrpo.training.execute import _record_status, _settle_dtype, execute
from magrpo.training.loop import RunStep
from pipelines.arguments import locate_config
from tests.pipelines.micro import write_config


def test_records_are_delivered_even_if_the_run_cannot_be_described() -> None:
    tracker, console = MagicMock(), MagicMock()
    describe = MagicMock(side_effect=ValueError("a damaged evaluation"))
    with (
        pytest.raises(ValueError, match="damaged evaluation"),
        _record_status(tracker, describe, console, 0.0),
    ):
        pass
    describe.assert_called_once_with("FINISHED")
    tracker.flush.assert_called_once_with()


@pytest.mark.parametrize(("first", "status"), [(KeyboardInterrupt, "KILLED"), (OSError, "FAILED")])
def test_what_fails_while_an_interrupted_run_closes_does_not_make_it_a_failed_one(
    first: type[BaseException], status: str
) -> None:
    tracker, describe = MagicMock(), MagicMock()

    def close_twice() -> None:
        try:
            raise first
        finally:
            raise ValueError("closed twice")

    with (
        pytest.raises(ValueError, match="closed twice"),
        _record_status(tracker, describe, MagicMock(), 0.0),
    ):
        close_twice()
    describe.assert_called_once_with(status)


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt("stopped"), "KILLED"), (OSError("stopped"), "FAILED")]
)
def test_an_attempt_that_fails_after_its_last_stage_is_not_recorded_as_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: str
) -> None:
    store = RunStore.create(load_config(write_config(tmp_path, iterations=0)), "unpublished")

    def run_loop(*_: object) -> MagicMock:
        tracker = MlflowTracker(store.config().tracking, store.path.parent, store.run_id, store.path)
        tracker.record_start()
        tracker.close("FINISHED")
        return MagicMock()

    monkeypatch.setattr("magrpo.training.execute._run_loop", run_loop)
    monkeypatch.setattr("magrpo.training.execute.publish_report", MagicMock(side_effect=error))
    with pytest.raises(BaseException, match="stopped"):
        execute(store.path.parent, "unpublished", lambda run_step: run_step, {})
    records = list(read_outbox(store.path))
    assert [record["value"] for record in records if record["kind"] == "status"] == ["RUNNING", "FINISHED", status]
    assert "resume with" in records[-1]["values"]["mlflow.note.content"]


@pytest.mark.parametrize(
    ("place", "dtype"),
    [
        ({}, "mixed"),
        ({"ranks": {"count": 2}}, "mixed"),
        ({"address": "auto", "ranks": {"count": 2}}, "auto"),
    ],
)
def test_the_precision_is_that_of_this_machine_wherever_on_it_a_run_executes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: dict[str, object], dtype: str
) -> None:
    def settle(config: RunConfig, say: Callable[[str], None]) -> RunConfig:
        return settle_dtype(config, say, lambda: 2.0)

    monkeypatch.setattr("magrpo.planning.precision.LARGE", 0)
    monkeypatch.setattr("magrpo.planning.precision.settle_dtype", settle)
    config = load_config(locate_config("embedded"), [f"root={tmp_path}", "model.dtype=auto"])
    store = RunStore.create(config, "run")
    _settle_dtype(store, Place.model_validate(place), MagicMock())
    assert store.config().model.dtype == dtype


class Reached(Exception):
    """The loop would begin."""


def stop_before_loop(_: RunStep) -> RunStep:
    raise Reached


def test_training_that_is_repeated_may_last_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``train.max_tokens`` ended it, and its outputs are set aside because they were made another way."""
    config = load_config(write_config(tmp_path, iterations=5), ["train.max_tokens=1000"])
    store = RunStore.create(config, "stale")
    store.commit("00000/prepare", "another key", lambda _: {})
    assert store.end_training(2).train.num_iterations == 2
    states: list[RunState] = []

    def begin(config: RunConfig, *_: object) -> None:
        assert config.train.num_iterations == 5
        raise Reached

    monkeypatch.setattr("magrpo.training.execute.run_steps", begin)
    with pytest.raises(Reached):
        execute(store.path.parent, "stale", lambda run_step: run_step, {}, observers=[States(states)])
    assert states[0].num_iterations == 5, "what the console shows"


def test_updates_that_are_repeated_need_a_gpu_for_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left until outputs are set aside because they were made another way."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = load_config(write_config(tmp_path, iterations=1), ["algo.kernel=triton", "model.device=auto"])
    store = RunStore.create(config, "stale")
    for step in steps(config):
        store.commit(step.output, "another key", lambda _: {})
    check_place(config, Place(), store)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        execute(store.path.parent, "stale", stop_before_loop, {})


class States(Observer):
    """Collects the state of every attempt."""

    def __init__(self, states: list[RunState]) -> None:
        self.states = states

    def attempt_started(self, attempt: Attempt) -> None:
        self.states.append(attempt.state)

    def team_promoted(self, text: str) -> None:
        raise AssertionError("there is no team")

    def attempt_ended(self, error: BaseException | None) -> None:
        assert isinstance(error, Reached)


def test_a_run_that_ends_during_warm_up_says_so_when_it_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(write_config(tmp_path, iterations=2), ["optim.lr=0.01", "optim.warmup_iterations=5"])
    store = RunStore.create(config, "short")
    with pytest.raises(Reached):
        execute(store.path.parent, "short", stop_before_loop, {})
    assert (
        "optim.warmup_iterations = 5 exceeds train.num_iterations = 2: the learning rate ends at 0.004, below its peak"
    ) in caplog.text
