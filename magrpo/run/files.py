"""The layout of a run directory: the names of its files, and their readers.

A run directory, ``<root>/<run_id>``::

    config.json                       the resolved configuration
    ended.json                        the last iteration, if ``train.max_tokens`` ended training before the planned one
    lock                              held by the process that works on the run
    stages/00007/rollout.0/           one folder for each step; :mod:`magrpo.run.store` commits it
        groups.jsonl.gz  _SUCCESS     its files and their manifest
    set-aside/1/00007/rollout.0/      outputs taken out of the run by ``--from-stage`` or an edit of prompts
    report.html                       the page for people; :mod:`magrpo.reports.publish` writes it when the run ends
    tracking.jsonl                    records for MLflow, and when each attempt began and ended
    agents/                           the trained agents for others to use; :mod:`magrpo.export` writes it
    place.json                        where the run runs, if not in one process; may change at every resume
    start.json                        the registered version the run started from, if it asked for the champion
    sources.txt                       the files that the command of a program (``env.run``) named when the run began
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from magrpo.config.place import Place
from magrpo.config.run import RunConfig
from magrpo.config.validate import validate_config
from magrpo.errors import ConfigError
from magrpo.files.writing import atomic_write
from magrpo.run.lock import hold_run
from magrpo.run.manifest import check_files
from magrpo.run.steps import Step, steps
from magrpo.run.store import Pointer, RunStore, read_json, read_records, write_records
from magrpo.types import (
    Comparison,
    EvalReport,
    NodeScores,
    NodeValues,
    Problem,
    RolloutGroup,
    Sample,
    ScoredTurn,
    Split,
    Turn,
)

GROUPS = "groups.jsonl.gz"
SCORES = "scores.jsonl.gz"
"""The scored joint actions of the nodes whose completions are in the rollout's :data:`GROUPS`."""
VALUES = "values.jsonl.gz"
CRITICS = "critics.pt"
"""The critics of a run with their optimizers, as an iteration left them."""
COMPARISONS = "_comparisons.jsonl.gz"
"""The joint actions that preferences compare, beside the samples; no agent's name begins with an underscore."""
EVALUATION = "report.json"
TRAJECTORIES = "trajectories.jsonl.gz"
TIMED_ANSWERS = "timed.jsonl.gz"
WEIGHTS = "weights"
BASES = "base.json"
"""File of checkpoint 0: the fingerprint of each agent's base model, by the agent's name."""
AGENTS = "agents"
START = "start.json"
PLACE = "place.json"
SOURCES = "sources.txt"
REGISTER, PROMOTE = "register", "promote"
"""Folders beside the steps of the last iteration: the registered version of the team, and the gate's decision."""
OPTIMIZER = "optimizer.pt"
"""Optimizer state of a checkpoint, which the next update needs; kept for the newest checkpoint and for evaluated
ones."""
OPTIMIZER_SHARDS = "optimizer"
"""Folder beside :data:`OPTIMIZER`, kept and pruned with it: the state of each agent whose weights were spread over
ranks, in the format of ``torch.distributed.checkpoint``."""


# ---------------------------------------------------------------------------------------------------- files of a stage
def split_file(split: Split) -> str:
    """Name the file of ``prepare`` that holds the problems of a split."""
    return f"{split}.jsonl.gz"


def samples_file(agent: str) -> str:
    """Name the file of ``credit`` that holds the samples of an agent."""
    return f"{agent}.jsonl.gz"


def read_problems(folder: Path) -> dict[Split, list[Problem]]:
    """Read the problems committed by ``prepare``, by split."""
    return {split: read_records(path, Problem) for split, path in split_files(folder).items()}


def split_files(folder: Path) -> dict[Split, Path]:
    """Return the files of ``prepare`` by split, in alphabetical order."""
    found = {split: folder / split_file(split) for split in sorted(get_args(Split))}
    return {split: path for split, path in found.items() if path.exists()}


def read_held_out(store: RunStore) -> dict[str, Problem]:
    """Read the problems that the run does not train on, by id."""
    splits = read_problems(store.stage_folder(Step("prepare", 0).output))
    return {problem.task_id: problem for split, problems in splits.items() if split != "train" for problem in problems}


def read_groups(folder: Path) -> list[RolloutGroup[Turn]]:
    """Read the nodes committed by ``rollout``."""
    return read_records(folder / GROUPS, RolloutGroup[Turn])


def read_scored(folder: Path) -> list[RolloutGroup[ScoredTurn]]:
    """Read the scored nodes committed by ``score``, or by a later stage of the turn that drops some.

    The completions come from the turn's rollout. Raises ConfigError if it was sampled again and is not scored yet.
    """
    _, _, turn = folder.name.partition(".")
    rollout = folder.with_name(f"rollout.{turn}")
    sampled = {(group.problem.task_id, group.path): group for group in read_groups(rollout)}
    scored = []
    for node in read_records(folder / SCORES, NodeScores):
        group = sampled.get((node.task_id, node.path))
        if group is None or [turn.picks for turn in group.turns] != [turn.picks for turn in node.turns]:
            raise ConfigError(f"{folder}: {rollout} was sampled again and is not scored yet; resume the run first")
        scored.append(group.with_scores(node.turns))
    return scored


def write_scores(folder: Path, groups: Iterable[RolloutGroup[ScoredTurn]]) -> None:
    """Write scored nodes for :func:`read_scored`: rewards and reports without the completions."""
    nodes = (NodeScores(group.problem.task_id, group.path, group.turns) for group in groups)
    write_records(folder / SCORES, nodes)


def read_values(folder: Path) -> list[NodeValues]:
    """Read the values committed by ``critic``."""
    return read_records(folder / VALUES, NodeValues)


def read_samples(folder: Path, config: RunConfig) -> tuple[dict[str, list[Sample]], list[Comparison]]:
    """Read what ``credit`` committed for an update: samples of the trained agents, comparisons if the loss has any."""
    samples = {
        agent.name: read_records(folder / samples_file(agent.name), Sample) for agent in config.agents if agent.trained
    }
    return samples, read_records(folder / COMPARISONS, Comparison) if config.algo.loss == "madpo" else []


def list_outputs(pointers: Iterable[Pointer], stage: str) -> list[Pointer]:
    """Return those outputs among ``pointers`` that a stage has committed, in any part and iteration."""
    return [pointer for pointer in pointers if Path(pointer["dir"]).name.partition(".")[0] == stage]


def read_evaluation(folder: Path) -> EvalReport:
    """Read the report committed by ``evaluate`` or ``baseline``; ConfigError if it is damaged."""
    check_files(folder, EVALUATION)
    return msgspec.json.decode((folder / EVALUATION).read_bytes(), type=EvalReport)


# --------------------------------------------------------------------------------------------- checkpoints, evaluations
def committed_iterations(store: RunStore, stage: str) -> list[int]:
    """Return the iterations for which ``stage`` is committed, ascending."""
    paths = store.path.glob(f"stages/[0-9]*/{stage}")
    return sorted(
        int(path.parent.name)
        for path in paths
        if path.parent.name.isdecimal() and store.is_committed(f"{path.parent.name}/{path.name}")
    )


def find_evaluations(store: RunStore) -> dict[int, Pointer]:
    """Return the committed evaluations by iteration, ascending."""
    iterations = committed_iterations(store, "evaluate")
    return {i: pointer for i in iterations if (pointer := store.find(Step("evaluate", i).output))}


def read_evaluations(store: RunStore) -> list[EvalReport]:
    """Read the committed evaluations in order of iteration."""
    return [read_evaluation(store.folder(pointer)) for pointer in find_evaluations(store).values()]


def keeps_weights(store: RunStore, checkpoint: str) -> bool:
    """Whether a committed checkpoint, given by its name, still has its weights."""
    return not any(Path(file).is_relative_to(WEIGHTS) for file in store.pruned_files(checkpoint))


def kept_iterations(store: RunStore) -> list[int]:
    """Return the iterations whose weights are kept, ascending."""
    committed = committed_iterations(store, "update")
    return [i for i in committed if keeps_weights(store, Step("update", i).output)]


def choose_checkpoint(store: RunStore, iteration: int | None) -> int:
    """Return ``iteration`` if its weights are kept, by default the last one whose weights are; else ConfigError."""
    known = kept_iterations(store)
    if not known:
        raise ConfigError(f"run {store.run_id} has no checkpoint yet; resume it: {store.format_command('resume')}")
    if iteration is not None and iteration not in known:
        raise ConfigError(
            f"run {store.run_id} has no weights of checkpoint {iteration}; choose one of {_list_iterations(known)}"
        )
    return known[-1] if iteration is None else iteration


def _list_iterations(iterations: Sequence[int]) -> str:
    """Format iterations: ``0 to 7``, or with gaps ``0, 5, 7``."""
    first, last = iterations[0], iterations[-1]
    return f"{first} to {last}" if last - first + 1 == len(iterations) else ", ".join(map(str, iterations))


def checkpoint_weights(store: RunStore, iteration: int) -> Path:
    """Locate the folder that holds the weights of each agent after ``iteration``, one subfolder per agent."""
    return store.stage_folder(Step("update", iteration).output) / WEIGHTS


def run_of_weights(weights: Path) -> str:
    """The id of the run whose checkpoint holds the folder ``weights`` of an agent; see :func:`checkpoint_weights`."""
    return weights.parents[4].name


def locate_weights(checkpoint: Path, agents: Iterable[str]) -> dict[str, Path]:
    """Locate the trained weights in the folder of a checkpoint, by agent."""
    return {agent: checkpoint / WEIGHTS / agent for agent in agents}


def checkpoint_iteration(checkpoint: Pointer) -> int:
    """Return the number of updates behind the weights of a committed checkpoint."""
    return int(Path(checkpoint["dir"]).parent.name)


def describe_start(store: RunStore) -> str:
    """Describe the weights from which the run started."""
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
    """Whether any step other than ``prepare`` and ``start`` is committed."""
    return any(store.is_committed(step.output) for step in steps(store.config())[2:])


def is_finished(store: RunStore) -> bool:
    """Whether the run's report is committed."""
    return store.exists() and store.is_committed(steps(store.config())[-1].output)


# --------------------------------------------------------------------------------------------------------------- place
def read_place(store: RunStore) -> Place:
    """Read where the run is executed: the place given last, or one process on this machine if none was given."""
    path = store.path / PLACE
    if not path.exists():
        return Place()
    return validate_config(
        Place, read_json(path, "name the cluster file (place) again: --place FILE or --place none"), (), str(path)
    )


def keep_place(store: RunStore, place: Place | None) -> None:
    """Make ``place`` the place of the next attempts at the run; None leaves it as it is.

    Raises ConfigError if another process works on the run.
    """
    if place is None:
        return
    with hold_run(store):
        if place.is_default:
            (store.path / PLACE).unlink(missing_ok=True)
        else:
            atomic_write(store.path / PLACE, place.model_dump_json(indent=1).encode())
