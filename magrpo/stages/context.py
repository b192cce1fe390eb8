"""The context that a stage of a run is given: its step, its inputs, the folder to write into, and the resources.

Each stage has a :data:`Writer` at the end of its module, which reads the inputs, calls the stage's pure function and
writes the files of the step. :class:`magrpo.run.steps.StageSpec` names the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from magrpo.config.run import BaselineRow, RunConfig
from magrpo.envs.program import AgentProgram
from magrpo.interfaces import Progress, Sandbox, Served, Updates
from magrpo.run import files, steps
from magrpo.run.steps import Step
from magrpo.run.store import Pointer, RunStore
from magrpo.stages.backend import Backend, Cache, Team
from magrpo.types import Problem, RolloutGroup, ScoredTurn, Split

if TYPE_CHECKING:
    from magrpo.gateway.player import EpisodePlayer
    from magrpo.model.lineup import Lineup
    from magrpo.model.policy import Policy

Metrics = Mapping[str, float]


class Resources(Protocol):
    """The heavy parts of a run, opened when first needed; implemented in :mod:`magrpo.training.resources`."""

    @property
    def lineup(self) -> Lineup: ...

    def open_updates(self) -> Updates:
        """Return the part that computes the updates of the run, opened once. Call :meth:`free_gpus` first."""

    @property
    def policy(self) -> Policy:
        """The policies in this process, which updates share. Call :meth:`free_gpus` first."""

    @property
    def sandbox(self) -> Sandbox: ...

    @property
    def player(self) -> EpisodePlayer | None:
        """Plays the episodes of a program; None if the environment is not a program."""

    def serve_checkpoint(self, checkpoint: Pointer) -> Served:
        """Serve the weights of ``checkpoint`` on the engine."""

    def serve_row(self, row: BaselineRow, untrained: Pointer) -> Served:
        """Serve the weights that ``row`` names, which belong to no checkpoint of the run, on the engine."""

    def free_gpus(self) -> None:
        """Let the engine release its GPU memory for an update."""


class StageConsole(Protocol):
    """The console of a stage; implemented by :class:`magrpo.progress.console.RunConsole`."""

    def say(self, text: str) -> None:
        """Print a line that stays on the screen."""

    def expect_items(self, total: int) -> None:
        """Announce that the step of the calling thread will finish ``total`` items."""


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Values that a process keeps between steps, so that it need not read them from files again."""

    reports: Cache = field(default_factory=dict)
    problems: dict[Split, list[Problem]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageContext:
    """One step to compute. ``advance`` takes the number of items just finished."""

    config: RunConfig
    store: RunStore
    step: Step
    inputs: Sequence[Pointer]
    folder: Path
    """The folder to write the step's files into."""
    resources: Resources
    console: StageConsole
    memory: RunMemory
    advance: Progress

    def load_problems(self, problems: Pointer) -> Mapping[Split, Sequence[Problem]]:
        """The problems committed by ``prepare``."""
        if not self.memory.problems:
            self.memory.problems.update(files.read_problems(self.store.folder(problems)))
        return self.memory.problems

    def read_scored(self) -> list[RolloutGroup[ScoredTurn]]:
        """The scored nodes of every turn, from the first input in its :class:`StageSpec` that this run computes."""
        writer = next(name for name in self.step.spec.inputs if steps.STAGES[name].is_needed(self.config))
        pointers = files.list_outputs(self.inputs, writer)
        assert pointers, f"{self.step}: {writer} is its first input, but wrote none of {self.step.inputs}"
        return [node for pointer in pointers for node in files.read_scored(self.store.folder(pointer))]

    def open_backend(self, engine: Served) -> Backend:
        """The backend of a stage that samples from ``engine`` and scores."""
        return Backend(
            engine=engine,
            sandbox=self.resources.sandbox,
            render=self.resources.lineup.render,
            player=self.resources.player,
            cache=self.memory.reports,
            progress=self.advance,
        )

    @property
    def team(self) -> Team:
        """The agents of the run, their environment and their reward."""
        return Team.of(self.config)

    def count_acting(self, turn: int) -> int:
        """The number of agents that act at ``turn``, counted from 0; 1 for a program, whose episodes are counted."""
        if isinstance(self.config.env, AgentProgram):
            return 1
        return self.config.count_acting()[turn]


Writer = Callable[[StageContext], Metrics]
"""Computes a step, writes its files into ``context.folder`` and returns its metrics."""
