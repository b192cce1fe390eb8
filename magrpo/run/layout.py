"""Where everything lies in a run directory, and the steps of a run in their order.

A run directory, ``<root>/<run_id>``::

    config.json                       the resolved configuration
    lock                              held by the process that works on the run
    stages/00007/rollout.0/           one folder for each step; :mod:`magrpo.run.store` commits it
        groups.jsonl.gz  _SUCCESS     its files and their manifest
    config.copy.json                  a copy of it, with its digest
    set-aside/1/00007/rollout.0/      outputs taken out of the run by ``--from-stage``, or because they are damaged
    report.html                       the page for people; :mod:`magrpo.reports.publish` writes it when the run ends
    tracking.jsonl                    records for MLflow, and when each attempt began and ended
    agents/                           the trained agents for others to use; :mod:`magrpo.export` writes it
    place.json                        where the run runs, if not in one process; may change at every resume
    start.json                        the registered version the run started from, if it asked for the champion
"""

import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal, get_args

from magrpo.config.place import Place
from magrpo.config.run import RunConfig
from magrpo.files.writing import atomic_write
from magrpo.plugins import ConfigError, list_choices, validate_config
from magrpo.run.store import Pointer, RunStore, read_json, read_records, write_records
from magrpo.text import decode_json
from magrpo.types import EvalReport, NodeScores, Problem, RolloutGroup, ScoredTurn, Split, Turn

StageName = Literal[
    "prepare", "start", "rollout", "score", "credit", "update", "evaluate", "baseline", "report", "tables"
]
"""``start`` writes the untrained checkpoint, ``tables`` the report of a run of baselines."""
TRAINING_STAGES: tuple[StageName, ...] = ("rollout", "score", "credit", "update")
"""The stages of a training iteration, in their order."""
SAMPLING_STAGES: tuple[StageName, ...] = TRAINING_STAGES[:-1]
"""The stages of an iteration that make its samples; in a run with a lag they run beside earlier updates."""

GROUPS = "groups.jsonl.gz"
SCORES = "scores.jsonl.gz"
"""The scored joint actions of the nodes whose completions are in the rollout's :data:`GROUPS`."""
EVALUATION = "report.json"
TRAJECTORIES = "trajectories.jsonl.gz"
TIMED_ANSWERS = "timed.jsonl.gz"
NOTABLE_EXECUTIONS = "remarkable.json"
WEIGHTS = "weights"
AGENTS = "agents"
START = "start.json"
PLACE = "place.json"
LOCK = "lock"
REGISTER, PROMOTE = "register", "promote"
"""Folders beside those of the last iteration's steps: the team as a registered version, and the gate's decision."""
OPTIMIZER = "optimizer.pt"
"""Optimizer state of a checkpoint, which the next update needs; kept for the newest ``optim.keep`` and for evaluated
checkpoints."""
OPTIMIZER_SHARDS = "optimizer"
"""Folder beside :data:`OPTIMIZER`, with the same fate: for each agent whose weights were spread over ranks its state,
in the form of ``torch.distributed.checkpoint``."""

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


# ---------------------------------------------------------------------------------------------------- files of a stage
def split_file(split: Split) -> str:
    """File of ``prepare`` with the problems of a split."""
    return f"{split}.jsonl.gz"


def samples_file(agent: str) -> str:
    """File of ``credit`` with the samples of an agent."""
    return f"{agent}.jsonl.gz"


def read_problems(folder: Path) -> dict[Split, list[Problem]]:
    """The problems committed by ``prepare``, by split."""
    return {split: read_records(path, Problem) for split, path in split_files(folder).items()}


def split_files(folder: Path) -> dict[Split, Path]:
    """The files of ``prepare`` by split, in alphabetical order."""
    found = {split: folder / split_file(split) for split in sorted(get_args(Split))}
    return {split: path for split, path in found.items() if path.exists()}


def read_held_out(store: RunStore) -> dict[str, Problem]:
    """The problems a run does not train on, by id."""
    splits = read_problems(store.stage_folder(Step("prepare", 0).folder))
    return {problem.task_id: problem for split, problems in splits.items() if split != "train" for problem in problems}


def read_groups(folder: Path) -> list[RolloutGroup[Turn]]:
    """The nodes committed by ``rollout``."""
    return read_records(folder / GROUPS, RolloutGroup[Turn])


def read_scored(folder: Path) -> list[RolloutGroup[ScoredTurn]]:
    """The nodes committed by ``score``, with the completions of the rollout beside it.

    Raises ConfigError if that rollout is another one: it was sampled again and is not scored yet.
    """
    rollout = folder.with_name(folder.name.replace("score", "rollout"))
    groups, scores = read_groups(rollout), read_records(folder / SCORES, NodeScores)
    sampled = [(group.problem.task_id, group.path, [turn.picks for turn in group.turns]) for group in groups]
    if sampled != [(node.task_id, node.path, [turn.picks for turn in node.turns]) for node in scores]:
        raise ConfigError(f"{folder}: {rollout} was sampled again and is not scored yet; resume the run first")
    return [group.with_scores(node.turns) for group, node in zip(groups, scores, strict=True)]


def write_scores(folder: Path, groups: Iterable[RolloutGroup[ScoredTurn]]) -> None:
    """Write the output of ``score`` for :func:`read_scored`: rewards and reports, without the completions."""
    nodes = (NodeScores(group.problem.task_id, group.path, group.turns) for group in groups)
    write_records(folder / SCORES, nodes)


def read_evaluation(folder: Path) -> EvalReport:
    """The report committed by ``evaluate`` or ``baseline``."""
    return decode_json((folder / EVALUATION).read_bytes(), EvalReport)


# --------------------------------------------------------------------------------------------- checkpoints, evaluations
def committed_iterations(store: RunStore, stage: StageName) -> list[int]:
    """The iterations for which ``stage`` is committed, ascending."""
    paths = store.path.glob(f"stages/[0-9]*/{_FOLDER_NAMES.get(stage, stage)}")
    return sorted(
        int(path.parent.name)
        for path in paths
        if path.parent.name.isdecimal() and store.is_committed(f"{path.parent.name}/{path.name}")
    )


def find_evaluations(store: RunStore) -> dict[int, Pointer]:
    """The undamaged committed evaluations by iteration, ascending."""
    iterations = committed_iterations(store, "evaluate")
    return {i: pointer for i in iterations if (pointer := store.find(Step("evaluate", i).folder))}


def read_evaluations(store: RunStore) -> list[EvalReport]:
    """The undamaged committed evaluations in their order."""
    return [read_evaluation(store.folder(pointer)) for pointer in find_evaluations(store).values()]


def keeps_weights(store: RunStore, checkpoint: str) -> bool:
    """Whether the weights of a committed checkpoint, by the name of its step's folder, were not pruned."""
    return not any(Path(file).is_relative_to(WEIGHTS) for file in store.pruned_files(checkpoint))


def kept_iterations(store: RunStore) -> list[int]:
    """The iterations after which the weights are kept, ascending."""
    committed = committed_iterations(store, "update")
    return [i for i in committed if keeps_weights(store, Step("update", i).folder)]


def list_iterations(iterations: Sequence[int]) -> str:
    """``0 to 7``, or with gaps ``0, 5, 7``."""
    first, last = iterations[0], iterations[-1]
    return f"{first} to {last}" if last - first + 1 == len(iterations) else ", ".join(map(str, iterations))


def checkpoint_weights(store: RunStore, iteration: int) -> Path:
    """The folder with a subfolder of weights for each agent, after ``iteration``."""
    return store.stage_folder(Step("update", iteration).folder) / WEIGHTS


def locate_weights(checkpoint: Path, agents: Iterable[str]) -> dict[str, Path]:
    """The folders of trained weights in the folder of a checkpoint, by agent."""
    return {agent: checkpoint / WEIGHTS / agent for agent in agents}


def checkpoint_iteration(checkpoint: Pointer) -> int:
    """The number of updates that the weights of a committed checkpoint have seen."""
    return int(Path(checkpoint["dir"]).parent.name)


def run_of_weights(weights: Path) -> str:
    """The id of the run whose checkpoint holds ``weights``, the folder of one agent."""
    return weights.parents[4].name


def describe_start(store: RunStore) -> str:
    """The weights a run started from, in words."""
    path = store.path / START
    if not path.exists():
        given = [f"{agent.name}: {agent.start_from}" for agent in store.config().agents if agent.start_from is not None]
        return "; ".join(given) or "the base models"
    facts = read_json(path)
    if not (isinstance(facts, dict) and {"version", "model"} <= facts.keys()):
        raise ConfigError(f"{path} is damaged: restore it from a backup")
    if facts["version"] is None:
        return f"the base models: {facts['model']} had no champion"
    return f"version {facts['version']} of {facts['model']}, the champion at that time"


def has_samples(store: RunStore) -> bool:
    """Whether any step but ``prepare`` and ``start`` is committed."""
    return any(store.is_committed(step.folder) for step in steps(store.config())[2:])


def is_finished(store: RunStore) -> bool:
    """Whether the run's report is committed."""
    return store.exists() and store.is_committed(steps(store.config())[-1].folder)


# --------------------------------------------------------------------------------------------------------------- place
def read_place(store: RunStore) -> Place:
    """Where the run runs: the place given last, or one process on this machine if none was given."""
    path = store.path / PLACE
    if not path.exists():
        return Place()
    return validate_config(
        Place, read_json(path, "name the cluster file (place) again: --place FILE or --place none"), (), str(path)
    )


def keep_place(store: RunStore, place: Place | None) -> None:
    """Let the next attempts at the run run at ``place``; None leaves its place as it is."""
    if place is None:
        return
    if place.is_default:
        (store.path / PLACE).unlink(missing_ok=True)
    else:
        atomic_write(store.path / PLACE, place.model_dump_json(indent=1).encode())


# ---------------------------------------------------------------------------------------------------------------- lock
@contextmanager
def hold_run(store: RunStore) -> Iterator[None]:
    """Hold the lock of a run directory; ConfigError if another process holds it.

    A POSIX lock, not a lock file: the kernel releases it however the process ends, children do not inherit it, and
    :func:`is_held` can ask for it without taking it.
    """
    with (store.path / LOCK).open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ConfigError(f"run {store.run_id}: process {file.read() or '?'} is working on it already") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_held(folder: Path) -> bool:
    """Whether another process holds the run directory ``folder``."""
    try:
        with (folder / LOCK).open("rb") as file:
            # struct flock of Linux: type, whence, start, length, process
            question = struct.pack("hhlli", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            answer = struct.unpack("hhlli", fcntl.fcntl(file, fcntl.F_GETLK, question))
    except FileNotFoundError:
        return False
    return bool(answer[0] != fcntl.F_UNLCK)
