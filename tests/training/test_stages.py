"""The stages of a run: what a failed stage leaves behind for the next try."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from magrpo.config.run import load_config
from magrpo.engines import EngineError, NonFiniteLogits
from magrpo.errors import ConfigError
from magrpo.interfaces import Progress
from magrpo.model.fingerprint import fingerprint_model
from magrpo.model.lineup import Lineup
from magrpo.progress.state import RunState
from magrpo.run import steps
from magrpo.run.files import BASES, GROUPS, SCORES, read_groups, samples_file, write_scores
from magrpo.run.steps import STAGES, StageSpec, Step
from magrpo.run.store import RunStore
from magrpo.sandboxes import SandboxDied, SandboxError
from magrpo.stages.checkpoints import check_bases
from magrpo.stages.context import Metrics, StageContext
from magrpo.training.stages import StageRunner
from magrpo.types import Action, Request
from pipelines.flows.train import is_transient
from tests import plugins
from tests.fakes import ScriptedEngine
from tests.memory_tracker import MemoryTracker
from tests.pipelines.micro import open_stages, run_locally, write_config

OPENED: list[MortalEngine] = []


class MortalEngine(ScriptedEngine):
    """The first one that is opened is dead, for ever."""

    def __init__(self) -> None:
        super().__init__(lambda _: "good")
        self.closed = False
        OPENED.append(self)

    def generate(self, requests: Sequence[Request], progress: Progress | None = None, version: int = 0) -> list[Action]:
        if self is OPENED[0]:
            raise EngineError("the server died")
        return super().generate(requests, progress, version)

    def close(self) -> None:
        self.closed = True


class Engine(plugins.Engine):
    """Opens a :class:`MortalEngine`."""

    def open(self, host: object) -> MortalEngine:
        return MortalEngine()


def test_after_a_death_another_try_opens_a_new_engine(tmp_path: Path) -> None:
    OPENED.clear()
    config = load_config(write_config(tmp_path), ["engine.kind=tests.training.test_stages:Engine"])
    store = RunStore.create(config)
    with open_stages(config, store, MemoryTracker()) as stages:
        inputs = [stages.run_step(Step("prepare", 0), []), stages.run_step(Step("start", 0), [])]
        with pytest.raises(EngineError):
            stages.run_step(Step("evaluate", 0), inputs)
        assert [engine.closed for engine in OPENED] == [True]
        assert store.metrics(stages.run_step(Step("evaluate", 0), inputs))["eval/generated_tokens"] > 0
        assert len(OPENED) == 2
    assert OPENED[1].closed


def test_the_line_of_a_step_tells_its_time_whatever_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, progress = load_config(write_config(tmp_path)), MagicMock()
    store = RunStore.create(config)
    with StageRunner(config, store, progress, lambda _: None) as stages:
        stages.run_step(Step("start", 0), [])
        monkeypatch.setattr("magrpo.training.stages.load_writer", lambda _: lambda _: {})
        stages.run_step(Step("tables", 0), [])
    for call in progress.finish_step.mock_calls:
        step, metrics = call.args
        state = RunState.begin(config)
        seconds = {key: 2.5 for key in metrics if key.startswith("time/")}
        state.finish_step(step, metrics | seconds, reused=False)
        assert "2.5 s" in state.finished_lines[step]


def test_a_base_model_that_was_overwritten_after_the_start_is_refused(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), ["engine.kind=tests.plugins:Engine"])
    store, base = RunStore.create(config, "run"), Path(config.agents[0].model)
    with open_stages(config, store, MemoryTracker()) as stages:
        inputs = [stages.run_step(Step("prepare", 0), []), stages.run_step(Step("start", 0), [])]
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(base, elsewhere)
    moved = config.model_copy(
        update={"agents": tuple(agent.model_copy(update={"model": str(elsewhere)}) for agent in config.agents)}
    )
    with open_stages(moved, store, MemoryTracker()) as stages:
        stages.run_step(Step("evaluate", 0), inputs)
    before = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    remedy = f"restore them, or train again from them: {store.format_command('resume')} --from-stage start"
    with (
        open_stages(config, store, MemoryTracker()) as stages,
        pytest.raises(ConfigError, match=f"agent 'helper': the files of its base model {base} .*{re.escape(remedy)}"),
    ):
        stages.run_step(Step("rollout", 1, "0"), inputs)
    (store.stage_folder("00000/update") / BASES).unlink()  # as in runs of earlier versions
    check_bases(store, Mock())


def test_the_fingerprint_of_a_large_file_covers_its_beginning_and_its_end(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    fingerprints = set()
    for position in (None, 0, 2**22 + 2**20 - 1):
        data = bytearray(2**22 + 2**20)
        if position is not None:
            data[position] = 1
        file.write_bytes(data)
        fingerprints.add(fingerprint_model(str(tmp_path)))
    assert len(fingerprints) == 3
    (tmp_path / "README.md").write_text("not loaded")
    assert fingerprint_model(str(tmp_path)) in fingerprints
    assert fingerprint_model("no-one/nothing") == "", "the cache of the hub does not hold it"


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (SandboxDied("no jail"), True),
        (SandboxError("no level works"), False),
        (EngineError("no server"), True),
        (NonFiniteLogits("diverged"), False),
    ],
)
def test_a_part_that_died_is_tried_again_and_one_that_would_fail_again_is_not(
    error: Exception, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = TaskRun(name="00001/score.0", task_key="score", dynamic_key="0")
    assert is_transient(None, run, Failed(data=error)) is again
    assert (f"00001/score.0 failed, retrying: {error}" in caplog.text) is again


EVENTS: list[str] = []


class WatchedEngine(ScriptedEngine):
    """Tells when it works, sleeps and wakes."""

    def __init__(self) -> None:
        super().__init__(lambda _: "good")

    def generate(self, requests: Sequence[Request], progress: Progress | None = None, version: int = 0) -> list[Action]:
        EVENTS.append("generate")
        return super().generate(requests, progress, version)

    def sleep(self) -> None:
        EVENTS.append("sleep")

    def wake(self) -> None:
        EVENTS.append("wake")


class Watched(plugins.Engine):
    """Opens a :class:`WatchedEngine`."""

    def open(self, host: object) -> WatchedEngine:
        return WatchedEngine()


def test_the_engine_wakes_when_the_update_has_released_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    EVENTS.clear()
    monkeypatch.setattr(Lineup, "release_cached_memory", lambda _: EVENTS.append("release"))
    overrides = ["engine.kind=tests.training.test_stages:Watched", "eval.every=5"]
    run_locally(load_config(write_config(tmp_path, iterations=2), overrides))
    once = ["wake", "generate", "sleep", "release"]
    assert [event for event, _ in groupby(EVENTS)] == ["generate", *once * 2, "wake", "generate"]


def keep_half(context: StageContext) -> Metrics:
    """The writer of a stage between ``score`` and ``credit``: it keeps every other node."""
    kept = context.read_scored()[::2]
    write_scores(context.folder, kept)
    return {"filter/nodes": float(len(kept))}


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_stage_put_before_credit_feeds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_needed: bool
) -> None:
    halving = StageSpec(
        name="filter",
        when="turn",
        inputs=("score",),
        writer="tests.training.test_stages:keep_half",
        sections=(),
        is_needed=lambda _: is_needed,
        activity="filtering",
    )
    later = replace(STAGES["credit"], inputs=("filter", "score", "critic"))
    monkeypatch.setattr(steps, "STAGES", {**STAGES, "filter": halving, "credit": later})
    config = load_config(write_config(tmp_path), ["engine.kind=tests.plugins:Engine"])
    store = RunStore.create(config)
    with open_stages(config, store, MemoryTracker()) as stages:
        rollout = stages.run_step(
            Step("rollout", 1, "0"), [stages.run_step(Step(name, 0), []) for name in ("prepare", "start")]
        )
        scored = stages.run_step(Step("score", 1, "0"), [rollout])
        inputs, nodes = [scored], float(len(read_groups(store.folder(rollout))))
        if is_needed:
            with pytest.raises(AssertionError, match=r"credit:1: filter is its first input, but wrote none of"):
                stages.run_step(Step("credit", 1), inputs)
            inputs = [stages.run_step(Step("filter", 1, "0"), [scored]), scored]
            nodes /= 2
            assert store.metrics(inputs[0])["filter/nodes"] == nodes
        samples = store.metrics(stages.run_step(Step("credit", 1), inputs))["credit/samples"]
        assert samples == nodes * len(config.agents) * config.rollout.group_size


def test_stages_that_are_repeated_write_the_same_files(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), ["engine.kind=tests.plugins:Engine"])
    store = RunStore.create(config)
    rollout, score, credit = Step("rollout", 1, "0"), Step("score", 1, "0"), Step("credit", 1)
    with open_stages(config, store, MemoryTracker()) as stages:
        untrained = [stages.run_step(Step("prepare", 0), []), stages.run_step(Step("start", 0), [])]
        sampled = stages.run_step(rollout, untrained)
        scored = stages.run_step(score, [sampled])
        credited = stages.run_step(credit, [scored])
    assert not (store.folder(scored) / GROUPS).exists()
    assert (store.folder(scored) / SCORES).exists()
    shutil.copytree(store.path, tmp_path / "runs" / "resumed")
    resumed = RunStore.open(tmp_path / "runs", "resumed")
    resumed.set_aside([score.output, credit.output])
    with open_stages(config, resumed, MemoryTracker()) as stages:
        assert stages.run_step(rollout, untrained) == sampled
        scored_again = stages.run_step(score, [sampled])
        assert resumed.file_digest(scored_again, SCORES) == store.file_digest(scored, SCORES)
    with open_stages(config, resumed, MemoryTracker()) as stages:
        credited_again = stages.run_step(credit, [scored_again])
        for agent in config.agents:
            file = samples_file(agent.name)
            assert resumed.file_digest(credited_again, file) == store.file_digest(credited, file)
