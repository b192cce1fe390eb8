"""A run with old partners: which pairs it makes, what they weigh and earn, and that it goes on bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from magrpo.config.place import Place
from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.planning.place_check import find_misfits
from magrpo.run.files import read_drawn, read_groups, read_pairs, read_scored, samples_file
from magrpo.run.store import read_records
from magrpo.types import Action, Sample
from pipelines.cli import main
from tests.pipelines.micro import write_config
from tests.training.test_resume import Runs

OLD = ["rollout.joint_mode=crossed", "rollout.old_partners=6"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With an uninterrupted run, ``whole``, in which every iteration draws the same problems."""
    folder = tmp_path_factory.mktemp("partners")
    repeating = ["problems.size=2", "penalty.cut_off=0.1", "tracking.traces=0", "train.keep_weights=evaluated"]
    runs = Runs(folder, [str(write_config(folder, iterations=3)), *OLD, *repeating])
    assert main(runs.arguments("whole")) == 0
    return runs


def passes(source: str) -> bool:
    return hashlib.sha256(source.encode()).digest()[0] % 2 == 1


def earned(helper: Action, chief: Action) -> float:
    """What the reward of the tests pays for a joint action, less the costs of both answers, a share of 2 each."""
    total = passes(helper.text + chief.text) * (1.0 + passes(chief.text))
    return total - 0.1 * 2 * sum(action.finish_reason == "length" for action in (helper, chief))


def test_a_completion_earns_with_old_partners_what_it_would_have_earned_with_them_then(runs: Runs) -> None:
    stages = runs.root / "whole" / "stages"
    earlier = [
        {node.problem.task_id: node.actions for node in read_groups(stages / f"0000{iteration}" / "rollout.0")}
        for iteration in (2, 1)
    ]
    today = {node.problem.task_id: node.actions for node in read_groups(stages / "00003" / "rollout.0")}
    pairs = read_pairs(stages / "00003" / "partners")
    assert {(pair.task_id, pair.agent) for pair in pairs} == {(name, agent) for name in today for agent in today[name]}
    for pair in pairs:
        other = "main" if pair.agent == "helper" else "helper"
        old = [action for actions in earlier for action in actions[pair.task_id][other]][:6]
        assert len(pair.weights) == 6, "four of the last iteration, two of the one before"
        assert all(0 < weight <= 1 for weight in pair.weights)
        for partner, rewards in zip(old, pair.rewards, strict=True):
            for action, reward in zip(today[pair.task_id][pair.agent], rewards, strict=True):
                both = {pair.agent: action, other: partner}
                assert reward == pytest.approx(earned(both["helper"], both["main"]))


def test_returns_are_weighted_means(runs: Runs) -> None:
    stages = runs.root / "whole" / "stages" / "00003"
    pairs = {(pair.task_id, pair.agent): pair for pair in read_pairs(stages / "partners")}
    for agent in ("helper", "main"):
        expected = []
        for group in read_scored(stages / "score.0"):
            pair = pairs[group.problem.task_id, agent]
            for i in range(4):
                now = [turn.reward.total for turn in group.turns if turn.picks[agent] == i]
                old = sum(w * (rewards[i] or 0.0) for w, rewards in zip(pair.weights, pair.rewards, strict=True))
                expected.append((sum(now) + old) / (len(now) + sum(pair.weights)))
        samples = read_records(stages / "credit" / samples_file(agent), Sample)
        assert [sample.returns for sample in samples] == pytest.approx(expected)


def test_metrics_and_memory(runs: Runs) -> None:
    metrics = runs.metrics("whole")
    assert metrics["00001/partners"]["partners/used"] == 0
    assert "partners/weight" not in metrics["00001/partners"]
    assert metrics["00002/partners"]["partners/used"] == 2 * 2 * 4
    assert metrics["00003/partners"]["partners/used"] == 2 * 2 * 6
    assert 0 < metrics["00003/partners"]["partners/weight"] < 1
    drawn = read_drawn(runs.root / "whole" / "stages" / "00003" / "partners")
    assert drawn == {"train/0": (3, 2), "train/1": (3, 2)}


def test_a_stopped_run_goes_on_bit_for_bit_and_so_does_one_from_its_partners(runs: Runs) -> None:
    runs.assert_goes_on("00002/partners", "partners:2")  # which needs the weights of checkpoint 1, deleted since


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.joint_mode=aligned"], 'rollout.joint_mode must be "crossed"'),
        (["env.num_turns=2"], "env.num_turns must be 1"),
        (["rollout.probe_size=2"], "rollout.probe_size must be removed"),
        (["train.lag=1", "algo.importance_cap=2"], "train.lag must be 0"),
        (["algo.loss=madpo"], "algo.loss must be"),
        (["agents.0.estimator=iac"], "algo.estimator must have no critic"),
        (["rollout.old_partners=-1"], "rollout.old_partners"),
    ],
)
def test_what_does_not_fit_old_partners_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write_config(tmp_path), [*OLD, *overrides])


def test_a_single_agent_has_no_partner() -> None:
    with pytest.raises(ConfigError, match="a single agent has no partner; or set old_partners to 0"):
        load_config("pipelines/configs/embedded_grpo.toml", OLD)


def test_programs_have_no_pairs(tmp_path: Path) -> None:
    program = 'env={kind = "program", run = "tests.gateway.programs:ask_both", writes = ["helper", "main"]}'
    with pytest.raises(ConfigError, match="completions in an episode of a program depend on each other"):
        load_config(write_config(tmp_path), [program, "rollout.old_partners=1"])


def test_ranks_on_ray_are_refused(tmp_path: Path) -> None:
    place = Place.model_validate({"ranks": {"count": 1}})
    assert any("old partners" in misfit for misfit in find_misfits(load_config(write_config(tmp_path), OLD), place))
    assert not any("old partners" in misfit for misfit in find_misfits(load_config(write_config(tmp_path)), place))
