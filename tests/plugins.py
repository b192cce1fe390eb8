"""Plug-ins that live outside the project, as a user would write them; what is heavy in them is scripted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from magrpo.plugins import Plugin
from magrpo.types import Execution, ExecutionReport, Problem, Split
from tests.fakes import LengthEnv, PassReward, ScriptedEngine, ScriptedSandbox, TurnsEnv


class ListedProblems(Plugin):
    """``size`` numbered problems in each split."""

    size: int = 4

    def load(self) -> Mapping[Split, Sequence[Problem]]:
        return {
            split: [Problem(f"{split}/{i}", f"p{i}", "f", "t") for i in range(self.size)]
            for split in ("train", "test", "ood")
        }


class Env(Plugin, LengthEnv):
    """See :class:`tests.fakes.LengthEnv`."""

    num_turns: int = 1


class TakingTurns(Plugin, TurnsEnv):
    """See :class:`tests.fakes.TurnsEnv`."""

    num_turns: int = 2


class Reward(Plugin, PassReward):
    """See :class:`tests.fakes.PassReward`."""


class WatchingReward(Reward):
    """Counts calls of the helper's function."""

    def executions(
        self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]
    ) -> Mapping[str, Execution]:
        wanted = super().executions(problem, texts, reports)
        return {name: replace(execution, watch="aux") for name, execution in wanted.items()}


class Sandbox(Plugin):
    """Everything passes."""

    def open(self) -> ScriptedSandbox:
        return ScriptedSandbox(lambda _: "pass")


class Engine(Plugin):
    """Every answer is ``text``."""

    text: str = "good"

    def open(self, host: object) -> ScriptedEngine:
        return ScriptedEngine(lambda _: self.text)


class NotAPlugin:
    """What a user may name by mistake."""


CONFIG = """
[[agents]]
name = "h"
role = "helper"
model = "base"

[[agents]]
name = "m"
role = "main"
model = "base"

[problems]
kind = "tests.plugins:ListedProblems"

[env]
kind = "tests.plugins:Env"

[reward]
kind = "tests.plugins:Reward"

[sandbox]
kind = "tests.plugins:Sandbox"

[engine]
kind = "tests.plugins:Engine"

[optim]
lr = 1e-3
"""
