"""The table of stages: what it names exists; and which steps take the output of which."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.run.steps import CHECKPOINT, STAGES, StageSpec, Step, steps
from magrpo.training.stages import load_writer


@pytest.mark.parametrize("spec", STAGES.values(), ids=STAGES)
def test_a_stage_names_a_writer_sections_and_inputs(spec: StageSpec) -> None:
    [parameter] = inspect.signature(load_writer(spec)).parameters.values()
    assert "StageContext" in str(parameter.annotation)
    assert set(spec.sections) <= RunConfig.model_fields.keys()
    assert set(spec.inputs) <= {*STAGES, CHECKPOINT}


def inputs_of(every: Sequence[Step], name: str) -> tuple[str, ...]:
    """The inputs of the step called ``name``, such as ``rollout.1:2``."""
    [step] = [step for step in every if str(step) == name]
    return step.inputs


def test_steps_take_the_outputs_of_earlier_ones() -> None:
    overrides = ["train.num_iterations=3", "train.lag=1", "algo.importance_cap=2", "eval.every=2"]
    every = steps(load_config("pipelines/configs/embedded_two_turns.toml", overrides))
    assert inputs_of(every, "rollout.0:3") == ("00000/prepare", "00001/update")
    assert inputs_of(every, "rollout.1:3") == ("00000/prepare", "00001/update", "00003/score.0")
    assert inputs_of(every, "score.1:3") == ("00003/rollout.1",)
    assert inputs_of(every, "credit:3") == ("00003/score.0", "00003/score.1")
    assert inputs_of(every, "update:3") == ("00003/credit", "00002/update")
    assert inputs_of(every, "update:1") == ("00001/credit", "00000/update")
    assert inputs_of(every, "evaluate:2") == ("00000/prepare", "00002/update")
    assert inputs_of(every, "report") == ("00000/evaluate", "00002/evaluate", "00003/evaluate")
    known: set[str] = set()
    for step in every:
        assert set(step.inputs) <= known, f"{step} is computed before its inputs"
        known.add(step.output)


def test_a_critic_goes_on_from_the_iteration_before_and_only_a_run_with_critics_has_one() -> None:
    path, overrides = "pipelines/configs/embedded_two_turns.toml", ["train.num_iterations=2"]
    every = steps(load_config(path, [*overrides, "agents.1.estimator=iac"]))
    assert inputs_of(every, "critic:1") == ("00001/score.0", "00001/score.1")
    assert inputs_of(every, "critic:2") == ("00002/score.0", "00002/score.1", "00001/critic")
    assert inputs_of(every, "credit:2") == ("00002/score.0", "00002/score.1", "00002/critic")
    assert not [step for step in steps(load_config(path, overrides)) if step.stage == "critic"]
