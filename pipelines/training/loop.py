"""The loop of a run: every step in its order, from the first one that is not committed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magrpo.config import RunConfig
from magrpo.layout import Step, steps
from magrpo.store import Pointer, RunStore
from pipelines.training.recorder import RunRecorder

RunStep = Callable[[Step, Sequence[Pointer]], Pointer]
"""Computes a step from its committed inputs, or finds its output committed. Clock, observers and tasks wrap it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run leaves."""

    problems: Pointer
    checkpoint: Pointer
    evaluations: dict[int, Pointer]
    """By iteration, ascending; a run of baselines has none: its rows are in the report."""
    report: Pointer


def run_steps(config: RunConfig, store: RunStore, run_step: RunStep, recorder: RunRecorder) -> Outcome:
    """Run the steps of ``config`` in their order and record each."""
    outputs: dict[str, Pointer] = {}
    checkpoint, evaluations = "", {}
    ended = 0  # the iteration in which every episode has ended early
    every = steps(config)
    for step in every:
        if step.stage in ("rollout", "score") and step.iteration == ended:
            continue
        pointer = outputs[step.folder] = run_step(step, [outputs[name] for name in step.inputs if name in outputs])
        if step.stage == "rollout" and not store.metrics(pointer)["rollout/groups"]:
            ended = step.iteration
        elif step.stage in ("start", "update"):
            checkpoint = step.folder
        elif step.stage == "evaluate":
            evaluations[step.iteration] = pointer
        recorder.record_step(step, pointer)
    return Outcome(outputs[every[0].folder], outputs[checkpoint], evaluations, outputs[every[-1].folder])
