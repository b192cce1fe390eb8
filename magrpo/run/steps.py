"""The steps of a run, in their order, and where a run is among them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from magrpo.config.run import RunConfig
from magrpo.run.store import RunStore

StageName = Literal[
    "prepare", "start", "rollout", "score", "credit", "update", "evaluate", "baseline", "report", "tables"
]
"""``start`` writes the untrained checkpoint, ``tables`` the report of a run of baselines."""
TRAINING_STAGES: tuple[StageName, ...] = ("rollout", "score", "credit", "update")
"""The stages of a training iteration, in their order."""
SAMPLING_STAGES: tuple[StageName, ...] = TRAINING_STAGES[:-1]
"""The stages of an iteration that make its samples; in a run with a lag they run beside earlier updates."""

_FOLDER_NAMES = {"start": "update", "tables": "report"}


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of one iteration."""

    stage: StageName
    iteration: int
    part: str = ""
    """The turn of a rollout or score, the row of a baseline."""
    inputs: tuple[str, ...] = ()
    """Folders of the steps whose outputs it takes."""

    @property
    def name(self) -> str:
        """Name of its folder within the iteration: ``rollout.0``."""
        return _FOLDER_NAMES.get(self.stage, self.stage) + (f".{self.part}" if self.part else "")

    @property
    def folder(self) -> str:
        """Name of its output in the store: ``00007/rollout.0``."""
        return f"{self.iteration:05d}/{self.name}"

    @property
    def title(self) -> str:
        """Its name without the iteration, as users write it: ``rollout.0``, ``start``."""
        return self.stage if self.stage == "start" else self.name

    @property
    def happens_once(self) -> bool:
        """Whether the stage belongs to no iteration."""
        return self.stage in ("prepare", "start", "report", "tables")

    def __str__(self) -> str:
        return self.title if self.happens_once else f"{self.title}:{self.iteration}"


# --------------------------------------------------------------------------------------------------------------- steps
def steps(config: RunConfig) -> list[Step]:
    """The steps of a run in order; the loop skips later turns of an iteration whose episodes have all ended."""
    return list(_baseline_steps(config) if config.baselines.rows else _training_steps(config))


def evaluates_after(config: RunConfig, iteration: int) -> bool:
    """Whether the checkpoint of ``iteration`` is evaluated."""
    return iteration % config.eval.every == 0 or iteration == config.train.num_iterations


def _training_steps(config: RunConfig) -> Iterator[Step]:
    problems, checkpoint = Step("prepare", 0), Step("start", 0)
    yield from (problems, checkpoint)
    checkpoints = [checkpoint.folder]
    evaluations: list[str] = []
    for iteration in range(config.train.num_iterations + 1):
        if iteration > 0:
            sampled_from = checkpoints[max(iteration - 1 - config.train.lag, 0)]
            scored: list[str] = []
            for turn in map(str, range(config.env.num_turns)):
                rollout = Step("rollout", iteration, turn, (problems.folder, sampled_from, *scored[-1:]))
                score = Step("score", iteration, turn, (rollout.folder,))
                yield from (rollout, score)
                scored.append(score.folder)
            credit = Step("credit", iteration, inputs=tuple(scored))
            checkpoint = Step("update", iteration, inputs=(credit.folder, checkpoint.folder))
            yield from (credit, checkpoint)
            checkpoints.append(checkpoint.folder)
        if evaluates_after(config, iteration):
            evaluation = Step("evaluate", iteration, inputs=(problems.folder, checkpoint.folder))
            yield evaluation
            evaluations.append(evaluation.folder)
    yield Step("report", config.train.num_iterations, inputs=tuple(evaluations))


def _baseline_steps(config: RunConfig) -> Iterator[Step]:
    """One step for each row; a row that votes takes the earlier rows that do not, to learn their cost."""
    first = (Step("prepare", 0), Step("start", 0))
    yield from first
    rows: list[Step] = []
    without_votes: list[Step] = []
    for row in config.baselines.rows:
        earlier = without_votes if row.votes != "none" else []
        rows.append(Step("baseline", 0, row.name, tuple(step.folder for step in (*first, *earlier))))
        if row.votes == "none":
            without_votes.append(rows[-1])
    yield from rows
    yield Step("tables", config.train.num_iterations, inputs=tuple(step.folder for step in rows))


def makes_tables(config: RunConfig) -> bool:
    """Whether the run compares baselines instead of training."""
    return steps(config)[-1].stage == "tables"


def first_missing(config: RunConfig, store: RunStore) -> int:
    """Position in :func:`steps` of the first step that is left to compute; a run with a lag may have later outputs."""
    every = steps(config)
    return next((i for i, step in enumerate(every) if not _is_past(step, store)), len(every))


def _is_past(step: Step, store: RunStore) -> bool:
    """Whether ``step`` is committed, or was left out because the iteration's episodes had all ended."""
    if store.is_committed(step.folder):
        return True
    return step.stage in ("rollout", "score") and store.is_committed(Step("credit", step.iteration).folder)
