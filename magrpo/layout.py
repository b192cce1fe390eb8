"""The stages of a run in the order in which they are done, by the names that a person uses for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from magrpo.config import RunConfig
from magrpo.plugins import ConfigError, list_choices
from magrpo.store import RunStore

OPTIMIZER = "optimizer.pt"
"""The file of an update that the next one needs; of all but the newest and the evaluated ones it is deleted."""

ONCE = ("prepare", "start", "report")
"""Stages without an iteration."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of one iteration."""

    stage: str
    """``rollout.0``; the folder's name, except for ``start``, which writes the first ``update``."""
    iteration: int

    @property
    def folder(self) -> str:
        """Name of its output in the run's store."""
        return f"{self.iteration:05d}/{'update' if self.stage == 'start' else self.stage}"

    def __str__(self) -> str:
        return self.stage if self.stage in ONCE else f"{self.stage}:{self.iteration}"


def steps(config: RunConfig) -> list[Step]:
    """What :func:`pipelines.training.loop.run` does, in its order, if no tree of an iteration ends early."""
    return list(_steps(config))


def _steps(config: RunConfig) -> Iterator[Step]:
    last = config.train.num_iterations
    yield from (Step("prepare", 0), Step("start", 0))
    if config.baselines.rows:
        yield from (Step(f"baseline.{row.name}", 0) for row in config.baselines.rows)
        yield Step("report", 0)
        return
    for iteration in range(last + 1):
        if iteration > 0:
            for turn in range(config.env.num_turns):
                yield from (Step(f"rollout.{turn}", iteration), Step(f"score.{turn}", iteration))
            yield from (Step("credit", iteration), Step("update", iteration))
        if iteration % config.eval.every == 0 or iteration == last:
            yield Step("evaluate", iteration)
    yield Step("report", last)


def rerun(store: RunStore, config: RunConfig, name: str) -> list[Step]:
    """The committed steps that must be done again to go on from ``name``, ``STAGE[:ITERATION]``, in their order.

    Those are the named step and all that follow it. An update whose optimizer state was deleted to save space cannot
    be gone on from; it is done again from the state before it, which leaves the stages between as they are wherever
    computing is deterministic. Without ``ITERATION`` the newest one that the stage is committed for is meant.

    Raises:
        ConfigError: no stage has this name, or the run has not come that far.
    """
    every = steps(config)
    position = _position(name, every, [store.committed(step.folder) for step in every])
    again = [step for step in every[position:] if store.committed(step.folder)]
    before = [step for step in every[:position] if step.stage in ("start", "update")]
    while before and OPTIMIZER in store.pruned(before[-1].folder):
        again.insert(0, before.pop())
    return again


def _position(name: str, every: Sequence[Step], committed: Sequence[bool]) -> int:
    """Where ``name`` is in ``every``: a committed step, or the one after the last of them."""
    stage, colon, number = name.partition(":")
    stage = f"{stage}.0" if stage in ("rollout", "score") else stage
    known = list(dict.fromkeys(step.stage for step in every))
    if stage not in known:
        raise ConfigError(f"--from-stage {name}: no stage {stage!r}; {list_choices(stage, known)}")
    last = max((i for i, done in enumerate(committed) if done), default=-1)
    possible = [i for i, step in enumerate(every[: last + 2]) if step.stage == stage]
    if not possible:
        raise ConfigError(f"--from-stage {name}: the run has not come that far; it has come to {every[last + 1]}")
    if not colon:
        return max((i for i in possible if committed[i]), default=possible[0])
    for i in possible:
        if str(every[i].iteration) == number:
            return i
    listed = _ranges([every[i].iteration for i in possible])
    raise ConfigError(f"--from-stage {name}: no iteration {number!r} of {stage} so far; possible: {listed}")


def _ranges(numbers: Sequence[int]) -> str:
    """``1-5`` for neighbours, else ``0, 20, 40``."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
