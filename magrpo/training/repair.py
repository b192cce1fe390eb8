"""Damage to the outputs of a run: found by their digests, set aside, and left for the loop to compute again.

An update needs the optimizer state of the checkpoint before it. Where that was pruned, the updates since the newest
checkpoint that is whole are set aside, too.
"""

import logging
import os
from collections.abc import Sequence

from magrpo.config.run import RunConfig
from magrpo.process.environment import shorten_path
from magrpo.run.files import PROMOTE, REGISTER, keeps_weights
from magrpo.run.steps import Step, pruned_tail, steps
from magrpo.run.store import Pointer, RunStore

log = logging.getLogger(__name__)


class CheckpointPruned(Exception):
    """A step needs files of the checkpoint in ``folder`` that were already pruned."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"{folder} was pruned")
        self.folder = folder


def check_kept(store: RunStore, step: Step, inputs: Sequence[Pointer]) -> None:
    """Raise CheckpointPruned if ``step`` needs optimizer states or weights that were pruned from its ``inputs``."""
    if step.stage not in ("update", "rollout"):
        return
    checkpoint = inputs[1]["dir"].removeprefix("stages/")
    is_kept = keeps_weights(store, checkpoint) if step.stage == "rollout" else not store.pruned_files(checkpoint)
    if not is_kept:
        raise CheckpointPruned(checkpoint)


def find_damage(store: RunStore, config: RunConfig) -> dict[str, str]:
    """What is wrong with each damaged output of a run, in words, by folder in the order of steps; reads every file."""
    last = f"{config.train.num_iterations:05d}"
    names = [*(step.folder for step in steps(config)), f"{last}/{REGISTER}", f"{last}/{PROMOTE}"]
    return {name: words for name in names if (words := store.verify(name))}


def find_lost(store: RunStore, config: RunConfig) -> list[Step]:
    """The steps whose output is gone, though one that was made from it is there."""
    every = {step.folder: step for step in steps(config)}
    committed = [step for step in every.values() if store.is_committed(step.folder)]
    used = dict.fromkeys(name for step in committed for name in step.inputs)
    ended = {step.iteration for step in committed if step.stage == "credit"}  # whose later turns were left out
    lost = (every[name] for name in used if not store.is_committed(name))
    gone = [step for step in lost if not os.path.lexists(store.stage_folder(step.folder))]  # else it is damaged
    return [step for step in gone if step.part in ("", "0") or step.iteration not in ended]


def set_aside_damage(store: RunStore, config: RunConfig) -> None:
    """Set aside every damaged output, with a warning each, and the updates to repeat for those that are missing."""
    damage = find_damage(store, config)
    if damage:
        folder = store.set_aside(list(damage))
        for name, words in damage.items():
            log.warning("%s: %s; set aside in %s and computed again", name, words, shorten_path(folder))
    checkpoints = [step for step in steps(config) if step.writes_checkpoint]
    committed = [store.is_committed(step.folder) for step in checkpoints]
    for number in range(1, len(checkpoints)):
        if committed[number - 1] and not committed[number]:
            _set_aside_tail(store, checkpoints[:number])


def set_aside_pruned(store: RunStore, config: RunConfig, folder: str) -> None:
    """Set aside the checkpoint in ``folder``, and those before it, back to the newest one that is whole."""
    checkpoints = [step for step in steps(config) if step.writes_checkpoint]
    _set_aside_tail(store, [step for step in checkpoints if step.folder <= folder])


def _set_aside_tail(store: RunStore, checkpoints: Sequence[Step]) -> None:
    tail = pruned_tail(store, checkpoints)
    if tail:
        folder = store.set_aside([step.folder for step in tail])
        names = " to ".join(dict.fromkeys((tail[0].folder, tail[-1].folder)))
        log.warning(
            "%s: files that the next update needs were pruned; set aside in %s and computed again",
            names,
            shorten_path(folder),
        )
