"""The steps of a run, in their order, and where a run is among them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from magrpo.config.run import RunConfig
from magrpo.plugins import ConfigError, list_choices
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


def steps_to_repeat(store: RunStore, config: RunConfig, name: str) -> list[Step]:
    """The committed steps to compute again in order to resume from ``name``, ``STAGE[:ITERATION]``.

    These are the named step (without ``ITERATION`` the newest committed one of the stage) and every later one. If the
    optimizer state before it was pruned, they start at the newest update whose state is kept, with equal results where
    computation is deterministic. Raises ConfigError if no stage has this name, or the run has not reached it.
    """
    every = steps(config)
    position = _find_position(name, config, store)
    repeated = [step for step in every[position:] if store.is_committed(step.folder)]
    earlier = [step for step in every[:position] if store.is_committed(step.folder)]
    checkpoints = [step for step in earlier if step.stage in ("start", "update")]
    return pruned_tail(store, checkpoints) + repeated


def pruned_tail(store: RunStore, checkpoints: Sequence[Step]) -> list[Step]:
    """The last of ``checkpoints``, in their order, from which files were pruned; none if the last one is whole."""

    def is_pruned(step: Step) -> bool:
        return store.is_committed(step.folder) and bool(store.pruned_files(step.folder))

    return list(takewhile(is_pruned, reversed(checkpoints)))[::-1]


def _find_position(name: str, config: RunConfig, store: RunStore) -> int:
    """Position of ``name`` in :func:`steps`: at most that of the step after the last committed one."""
    every = steps(config)
    newest = 1 + max((i for i, step in enumerate(every) if store.is_committed(step.folder)), default=-1)
    title, colon, number = name.partition(":")
    title = f"{title}.0" if title in ("rollout", "score") else title
    known = list(dict.fromkeys(step.title for step in every))
    if title not in known:
        raise ConfigError(f"--from-stage {name}: no stage {title!r}; {list_choices(title, known)}")
    positions = {step.iteration: i for i, step in enumerate(every[: newest + 1]) if step.title == title}
    if not positions:
        raise ConfigError(f"--from-stage {name}: the run has only reached {every[newest]}")
    if not colon:
        committed = (i for i in reversed(positions.values()) if store.is_committed(every[i].folder))
        return next(committed, min(positions.values()))
    for iteration, position in positions.items():
        if str(iteration) == number:
            return position
    first, last = min(positions), max(positions)
    is_range = 1 < len(positions) == last - first + 1
    listed = f"{first}-{last}" if is_range else ", ".join(map(str, positions))
    raise ConfigError(f"--from-stage {name}: no iteration {number!r} of {title} so far; possible: {listed}")
