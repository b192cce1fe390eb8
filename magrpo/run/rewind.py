"""Rewinding a run: the steps to compute again, and the pruned checkpoints that these steps need."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile

from magrpo.config.run import RunConfig
from magrpo.errors import ConfigError, list_choices
from magrpo.run.files import keeps_weights
from magrpo.run.steps import STAGES, Step, is_past, steps
from magrpo.run.store import RunStore


def steps_to_repeat(store: RunStore, config: RunConfig, name: str) -> list[Step]:
    """List the committed steps to compute again in order to resume from ``name``, ``STAGE[:ITERATION]``.

    The list holds the named step (without ``ITERATION`` the newest committed one of the stage), every later step, and
    earlier checkpoints that a later step needs but whose files were pruned. These are recomputed from the newest whole
    checkpoint before them, with equal results where computation is deterministic. Raises ConfigError if no stage has
    this name, or the run has not reached it.
    """
    every = steps(config)
    position = _find_position(name, every, store)
    repeated = [step for step in every[position:] if store.is_committed(step.output)]
    return _list_pruned_checkpoints(store, every, position) + repeated


def list_remaining_steps(config: RunConfig, store: RunStore | None, from_stage: str | None) -> list[Step]:
    """List the steps that are left to compute: all of a new run, which has no ``store``.

    Raises ConfigError if the run cannot be resumed from ``from_stage``.
    """
    if store is None:
        return steps(config)
    repeated = [] if from_stage is None else steps_to_repeat(store, config, from_stage)
    return [step for step in steps(config) if step in repeated or not is_past(step, store)]


def _list_pruned_checkpoints(store: RunStore, every: Sequence[Step], position: int) -> list[Step]:
    """List the checkpoints before ``position`` to compute again, because later steps need files pruned from them.

    Computing a checkpoint takes a whole one before it, so the pruned checkpoints in between are listed, too.
    """
    users = defaultdict[str, list[Step]](list)
    for step in every[position:]:
        for name in step.inputs:
            users[name].append(step)
    checkpoints = [step for step in every[:position] if step.writes_checkpoint]
    checkpoints = [step for step in checkpoints if store.is_committed(step.output)]
    listed: set[Step] = set()
    for number, checkpoint in enumerate(checkpoints, start=1):
        if any(_lacks_files(store, step, checkpoint.output) for step in users[checkpoint.output]):
            newest_first = reversed(checkpoints[:number])
            listed.update(takewhile(lambda step: bool(store.pruned_files(step.output)), newest_first))
    return [step for step in checkpoints if step in listed]


def check_kept(store: RunStore, step: Step) -> None:
    """Raise ConfigError, with the command that helps, if ``step`` needs files that were pruned from a checkpoint."""
    for name in step.inputs:
        if store.is_committed(name) and _lacks_files(store, step, name):
            files = "the optimizer state" if step.stage == "update" else "the weights"
            raise ConfigError(
                f"{step.output} needs {files} of {name}, deleted to save space; to compute them again: "
                f"{store.format_command('resume')} --from-stage {step}"
            )


def _lacks_files(store: RunStore, step: Step, output: str) -> bool:
    """Whether files that ``step`` needs were pruned from ``output``, one of its inputs."""
    if step.stage == "rollout":
        return not keeps_weights(store, output)
    return step.stage == "update" and bool(store.pruned_files(output))


def _find_position(name: str, every: Sequence[Step], store: RunStore) -> int:
    """Return the position of ``name`` among all steps, at most one past the last committed step."""
    newest = 1 + max((i for i, step in enumerate(every) if store.is_committed(step.output)), default=-1)
    label, colon, number = name.partition(":")
    if label in STAGES and STAGES[label].when == "turn":
        label = f"{label}.0"
    known = list(dict.fromkeys(step.label for step in every))
    if label not in known:
        raise ConfigError(f"--from-stage {name}: no stage {label!r}; {list_choices(label, known)}")
    positions = {step.iteration: i for i, step in enumerate(every[: newest + 1]) if step.label == label}
    if not positions:
        raise ConfigError(f"--from-stage {name}: the run has only reached {every[newest]}")
    if not colon:
        committed = (i for i in reversed(positions.values()) if store.is_committed(every[i].output))
        return next(committed, min(positions.values()))
    for iteration, position in positions.items():
        if str(iteration) == number:
            return position
    first = min(positions)
    last = max(positions)
    is_range = 1 < len(positions) == last - first + 1
    listed = f"{first}-{last}" if is_range else ", ".join(map(str, positions))
    raise ConfigError(f"--from-stage {name}: no iteration {number!r} of {label} so far; possible: {listed}")
