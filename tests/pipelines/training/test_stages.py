"""The stages of a run: what a failed stage leaves behind for the next try."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest

from magrpo.config import load_config
from magrpo.engines import EngineError
from magrpo.interfaces import Progress
from magrpo.layout import Step
from magrpo.lineup import Lineup
from magrpo.store import RunStore
from magrpo.types import Action, Request
from pipelines.cli import main
from tests import plugins
from tests.fakes import ScriptedEngine
from tests.memory_tracker import MemoryTracker
from tests.pipelines.micro import open_stages, write_config

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
    config = load_config(write_config(tmp_path), ["engine.kind=tests.pipelines.training.test_stages:Engine"])
    store = RunStore.create(config)
    with open_stages(config, store, MemoryTracker()) as stages:
        inputs = [stages.run_step(Step("prepare", 0), []), stages.run_step(Step("start", 0), [])]
        with pytest.raises(EngineError):
            stages.run_step(Step("evaluate", 0), inputs)
        assert [engine.closed for engine in OPENED] == [True]
        assert store.metrics(stages.run_step(Step("evaluate", 0), inputs))["eval/response_tokens"] > 0
        assert len(OPENED) == 2
    assert OPENED[1].closed


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
    path = write_config(tmp_path, iterations=2)
    overrides = ["engine.kind=tests.pipelines.training.test_stages:Watched", "eval.every=5"]
    assert main(["train", str(path), *overrides, "--local"]) == 0
    once = ["wake", "generate", "sleep", "release"]
    assert [event for event, _ in groupby(EVENTS)] == ["generate", *once * 2, "wake", "generate"]
