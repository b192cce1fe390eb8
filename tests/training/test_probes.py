"""Dynamic sampling: which problems it keeps, what it counts, and a run with it that goes on bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from magrpo.algo.answers import list_actions
from magrpo.config.run import load_config
from magrpo.config.sections import RolloutConfig
from magrpo.errors import ConfigError
from magrpo.run.files import read_scored
from magrpo.run.steps import Step
from magrpo.stages.backend import Backend, Team
from magrpo.stages.prepare import draw_spare_problems
from magrpo.stages.rollout import Selection, rollout, root_nodes, select_problems
from magrpo.stages.score import score
from magrpo.training.keys import make_key
from magrpo.types import Execution, Problem, Request, RolloutGroup, ScoredTurn
from tests.fakes import LengthEnv, PassReward, ScriptedEngine, ScriptedSandbox, render
from tests.pipelines.micro import write_config
from tests.stages.test_rollout import AGENTS
from tests.training.test_resume import Runs

PROBLEMS = [Problem(f"t/{i}", f"p{i}", "f", "t") for i in range(12)]
TEAM = Team(AGENTS, LengthEnv(), PassReward())


def judge(execution: Execution) -> str:
    return "pass" if sha256(execution.source.encode()).digest()[0] % 3 == 0 else "wrong"


def open_backend(texts: int = 5) -> tuple[Backend, ScriptedEngine]:
    """A backend whose agents write one of so many texts; always the same one for the problems 0, 3, 6 and 9."""

    def write(request: Request) -> str:
        number = int(bytes(request.prompt_ids).rpartition(b"p")[2])
        return f"{request.agent}{request.seed % (texts if number % 3 else 1)}"

    engine = ScriptedEngine(write)
    return Backend(engine=engine, sandbox=ScriptedSandbox(judge), render=render), engine


def scored_groups(problems: Sequence[Problem], config: RolloutConfig) -> list[RolloutGroup[ScoredTurn]]:
    """Whole groups, sampled without probes."""
    backend, _ = open_backend()
    groups = rollout(root_nodes(problems, config), TEAM, backend, config, seed=3)
    return score(groups, TEAM, backend.sandbox, backend.cache)[0]


def select(config: RolloutConfig, texts: int = 5) -> tuple[Selection, ScriptedEngine]:
    backend, engine = open_backend(texts)
    return select_problems(PROBLEMS, TEAM, backend, config, seed=3), engine


@pytest.mark.parametrize("mode", ["aligned", "crossed"])
@pytest.mark.parametrize("probe_size", [2, 3])
def test_groups_are_the_whole_ones_of_problems_whose_probes_differ(mode: str, probe_size: int) -> None:
    config = RolloutConfig.model_validate(
        {"problems_per_iteration": 3, "group_size": 3, "joint_mode": mode, "probe_size": probe_size}
    )
    expected = []
    for group in scored_groups(PROBLEMS, config):
        rewards = {turn.reward.total for turn in group.turns if max(turn.picks.values()) < probe_size}
        if len(rewards) > 1:
            expected.append(group)
    selection, engine = select(config)
    assert len(expected) >= 3
    whole = {group.problem.task_id: group for group in expected[:3]}
    assert [group.problem.task_id for group in selection.groups] == list(whole)
    for selected in selection.groups:
        scored = whole[selected.problem.task_id]
        assert selected.actions == scored.actions
        assert [turn.picks for turn in selected.turns] == [turn.picks for turn in scored.turns]
    last = PROBLEMS.index(selection.groups[-1].problem)
    dropped = {group.problem.task_id for group in selection.dropped}
    assert dropped == {p.task_id for p in PROBLEMS[: last + 1]} - whole.keys()
    sampled = [*selection.groups, *selection.dropped]
    requested = [request.seed for batch in engine.batches for request in batch]
    assert len(requested) == len(set(requested)) == sum(len(list_actions(group)) for group in sampled), "none twice"


def test_fewer_informative_problems_make_fewer_groups() -> None:
    config = RolloutConfig(problems_per_iteration=12, group_size=3, probe_size=2)
    selection, _ = select(config)
    assert 0 < len(selection.groups) < 12
    assert len(selection.groups) + len(selection.dropped) == 12


def test_without_an_informative_problem_the_first_probes_are_the_groups() -> None:
    config = RolloutConfig(problems_per_iteration=4, group_size=3, probe_size=2)
    selection, engine = select(config, texts=1)
    assert [group.problem for group in selection.groups] == PROBLEMS[:4]
    assert {len(list_actions(group)) for group in selection.groups} == {2 * 2}
    assert len(selection.dropped) == 8
    assert len(engine.batches) == 3


def test_spare_problems_differ_from_the_drawn_ones_and_end_with_the_set() -> None:
    config = RolloutConfig(problems_per_iteration=4, group_size=3, probe_size=2, max_draws=2)
    spare = draw_spare_problems(PROBLEMS, PROBLEMS[:4], 1, config, seed=0)
    assert spare == draw_spare_problems(PROBLEMS, PROBLEMS[:4], 1, config, seed=0)
    assert spare != draw_spare_problems(PROBLEMS, PROBLEMS[:4], 2, config, seed=0)
    assert len(spare) == 4
    assert not {problem.task_id for problem in spare} & {problem.task_id for problem in PROBLEMS[:4]}
    many = config.model_copy(update={"max_draws": 100})
    assert len(draw_spare_problems(PROBLEMS, PROBLEMS[:4], 1, many, seed=0)) == 8


def test_the_reward_is_in_the_key_of_a_rollout_that_probes(tmp_path: Path) -> None:
    path = write_config(tmp_path)

    def key_of(*overrides: str) -> str:
        return make_key(load_config(path, overrides), Step("rollout", 1), [])

    assert key_of("penalty.copied=0.5") == key_of()
    probing = "rollout.probe_size=2"
    assert key_of("penalty.copied=0.5", probing) != key_of(probing)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.probe_size=5"], "probe_size = 5 exceeds group_size = 4"),
        (
            ["rollout.joint_mode=crossed", "rollout.crossed_pairs=8"],
            "rollout.crossed_pairs draws other pairs for a probe than for its group: probe whole groups",
        ),
        (["env.num_turns=2"], "env.num_turns must be 1"),
        (["train.lag=1", "algo.importance_cap=2"], "train.lag must be 0"),
        (["algo.loss=madpo"], "algo.loss must be"),
        (["algo.estimator=mareinforce"], "algo.estimator must have siblings as baseline"),
        (["agents.0.estimator=iac"], "algo.estimator must have siblings as baseline"),
    ],
)
def test_what_cannot_be_probed_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write_config(tmp_path), ["rollout.probe_size=2", *overrides])


def test_a_run_counts_all_tokens_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    overrides = ["rollout.probe_size=2", "rollout.max_draws=3", "tracking.traces=0"]
    runs = Runs(tmp_path, [str(write_config(tmp_path, iterations=2)), *overrides])
    runs.train_unrecorded("whole")
    metrics = runs.metrics("whole")
    for iteration in (1, 2):
        folder = runs.root / "whole" / "stages" / f"{iteration:05d}" / "score.0"
        kept = sum(len(action.token_ids) for group in read_scored(folder) for action in list_actions(group))
        found = metrics[f"{iteration:05d}/rollout.0"]
        assert found["rollout/tokens"] == kept + found["rollout/dropped_tokens"]
        assert found["rollout/groups"] <= found["rollout/probed_problems"] <= 6
    runs.assert_goes_on("00002/rollout.0", "rollout:2")
