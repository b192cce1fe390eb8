"""A run with critics in groups of one: what it writes and reports, and that it goes on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from magrpo.config.place import Place
from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.planning.place_check import find_misfits
from magrpo.run.files import CRITICS, read_scored, read_values, samples_file
from magrpo.run.store import read_records
from magrpo.types import Sample
from tests.pipelines.micro import run_locally, write_config
from tests.training.test_resume import Runs

CRITIC = ["rollout.group_size=1", "agents.0.estimator=iac", "agents.1.estimator=maac"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With an uninterrupted run, ``whole``."""
    folder = tmp_path_factory.mktemp("critics")
    runs = Runs(folder, [str(write_config(folder, iterations=2)), *CRITIC, "tracking.traces=0"])
    runs.train_unrecorded("whole")
    return runs


def test_advantages_are_distances_to_the_values(runs: Runs) -> None:
    stages = runs.root / "whole" / "stages" / "00002"
    nodes = read_values(stages / "critic")
    assert [set(node.values) for node in nodes] == [{"helper", ""}] * 2
    for agent, critic in (("helper", "helper"), ("main", "")):
        samples = read_records(stages / "credit" / samples_file(agent), Sample)
        assert [sample.returns - sample.advantage for sample in samples] == pytest.approx(
            [node.values[critic] for node in nodes]
        )
    states = torch.load(stages / "critic" / CRITICS, weights_only=True)
    widths = {name: state["head"]["weight"].shape[1] for name, state in states.items()}
    assert widths[""] == 2 * widths["helper"]


def test_metrics(runs: Runs) -> None:
    metrics = runs.metrics("whole")["00002/critic"]
    assert {"critic/value_loss", "critic/helper/value_loss"} <= metrics.keys()
    assert "critic/main/value_loss" not in metrics


def test_an_untrained_agent_needs_no_critic(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), [*CRITIC, "agents.0.trained=false", "tracking.traces=0"])
    store, _, _ = run_locally(config)
    valued, credited = (store.manifest_of(f"00001/{stage}")["metrics"] for stage in ("critic", "credit"))
    assert "critic/value_loss" in valued
    assert "critic/helper/value_loss" not in valued
    assert credited["credit/helper/advantage_std"] == 0, "a group of 1 has no siblings"


def test_two_turns_hold_values_of_the_second(tmp_path: Path) -> None:
    """A chain of two turns: with lambda 0 the first turn's return is its reward and the value of the second."""
    overrides = ["env.num_turns=2", "critic.gae_lambda=0", "algo.gamma=0.5", "tracking.traces=0"]
    config = load_config(write_config(tmp_path, iterations=2), [*CRITIC, *overrides])
    store, _, _ = run_locally(config)
    folder = store.stage_folder("00002/credit")
    values = {(node.task_id, node.path): node.values for node in read_values(folder.with_name("critic"))}
    assert sorted({len(path) for _, path in values}) == [0, 1]
    expected, found = [], []
    groups = read_scored(folder.with_name("score.0"))
    samples = {sample.prompt_ids: sample for sample in read_records(folder / samples_file("main"), Sample)}
    for group in groups:
        next_value = values[group.problem.task_id, (0,)][""]
        expected.append(group.turns[0].reward.total + 0.5 * next_value)
        found.append(samples[group.prompts["main"].token_ids].returns)
    assert found == pytest.approx(expected)


def test_a_stopped_run_goes_on_bit_for_bit_and_so_does_one_from_its_critic(runs: Runs) -> None:
    runs.assert_goes_on("00002/critic", "critic:2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lag=1", "algo.importance_cap=2"], "train.lag = 1 samples several iterations at once, but a critic"),
        (["algo.normalize=std"], "a group of 1 has no siblings"),
        (["critic.epochs=0"], "critic.epochs"),
    ],
)
def test_what_does_not_fit_critics_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    path = write_config(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_config(path, [*CRITIC, *overrides])


def test_ranks_on_ray_are_refused(tmp_path: Path) -> None:
    place = Place.model_validate({"ranks": {"count": 1}})
    config = load_config(write_config(tmp_path), CRITIC)
    assert any("critics" in misfit for misfit in find_misfits(config, place))
    plain = load_config(write_config(tmp_path))
    assert not any("critics" in misfit for misfit in find_misfits(plain, place))
