from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.config.agents import AgentConfig
from magrpo.config.sections import RolloutConfig
from magrpo.engines import PromptTooLong
from magrpo.sandboxes.none import NoSandbox
from magrpo.stages.backend import Backend, Team
from magrpo.stages.rollout import Node, child_nodes, joint_actions, rollout, root_nodes
from magrpo.types import PENDING, JointReward, Problem, Request, RolloutGroup, SamplingParams, ScoredTurn, Turn
from tests.fakes import LengthEnv, PassReward, ScriptedEngine, TurnsEnv, render

AGENTS = (AgentConfig(name="h", role="helper", model="m"), AgentConfig(name="m", role="main", model="m"))
PROBLEMS = [Problem("t/0", "zero"), Problem("t/1", "one")]


def sample(
    engine: ScriptedEngine,
    nodes: Sequence[Node],
    config: RolloutConfig,
    seed: int = 0,
    env: LengthEnv = LengthEnv(2),  # noqa: B008
) -> list[RolloutGroup[Turn]]:
    backend = Backend(engine=engine, sandbox=NoSandbox().open(), render=render)
    return rollout(nodes, Team(AGENTS, env, PassReward()), backend, config, seed)


def scored(
    groups: Sequence[RolloutGroup[Turn]], rewards: Sequence[Sequence[float]], masked: Sequence[int] = ()
) -> list[RolloutGroup[ScoredTurn]]:
    """Give the joint actions of each group the rewards listed for it."""
    out = []
    for group, values in zip(groups, rewards, strict=True):
        turns = tuple(
            ScoredTurn(turn.picks, JointReward(value, {}), {}, masked=index in masked)
            for index, (turn, value) in enumerate(zip(group.turns, values, strict=True))
        )
        out.append(RolloutGroup(group.problem, group.path, group.history, group.prompts, group.actions, turns))
    return out


def test_one_level_is_one_batch_with_a_seed_for_each_completion() -> None:
    engine = ScriptedEngine(lambda request: f"{request.agent}{request.seed % 7}")
    config = RolloutConfig(group_size=3, max_new_tokens=9, temperature=0.5)
    groups = sample(engine, root_nodes(PROBLEMS, config), config)
    (batch,) = engine.batches
    assert len(batch) == 2 * 2 * 3
    assert len({request.seed for request in batch}) == len(batch)
    assert {request.sampling.max_new_tokens for request in batch} == {9}
    assert bytes(batch[0].prompt_ids) == b"helper:zero"
    assert [turn.picks for turn in groups[0].turns] == [{"h": i, "m": i} for i in range(3)]
    assert groups[1].texts(groups[1].turns[2])["m"] == groups[1].actions["m"][2].text


def test_completions_hold_no_lone_surrogates() -> None:
    config = RolloutConfig(group_size=1)
    groups = sample(ScriptedEngine(lambda _: "a\ud800b"), root_nodes(PROBLEMS, config), config)
    assert {action.text for group in groups for (action,) in group.actions.values()} == {"a\ufffdb"}


def test_a_prompt_too_long_is_named_by_its_problem_and_turn() -> None:
    def refuse(request: Request) -> str:
        if bytes(request.prompt_ids) == b"main:one":
            raise PromptTooLong("agent 'm': a prompt of 8 tokens", request)
        return "x"

    config = RolloutConfig(group_size=3)
    with pytest.raises(PromptTooLong, match=r"^problem 't/1', turn 1: agent 'm': a prompt of 8 tokens"):
        sample(ScriptedEngine(refuse), root_nodes(PROBLEMS, config), config)


def test_training_says_how_it_samples_and_warns_of_truncation_whose_support_is_not_kept() -> None:
    with pytest.warns(UserWarning, match="biases the gradient; set rollout.keep_support = true"):
        root_nodes(PROBLEMS, RolloutConfig(top_p=0.9))
    with pytest.warns(UserWarning, match="biases the gradient"):
        root_nodes(PROBLEMS, RolloutConfig(top_k=5))
    root_nodes(PROBLEMS, RolloutConfig(keep_support=True))  # harmless: nothing is cut off
    (node, _) = root_nodes(PROBLEMS, RolloutConfig(temperature=0.8, top_p=0.9, top_k=7, keep_support=True))
    assert node.sampling == SamplingParams(0.8, 0.9, 7, 256, keep_support=True)


def test_a_problem_is_sampled_alike_whatever_else_is_in_the_batch() -> None:
    config = RolloutConfig(group_size=2)
    both, alone = ScriptedEngine(str), ScriptedEngine(str)
    sample(both, root_nodes(PROBLEMS, config), config, seed=5)
    sample(alone, root_nodes(PROBLEMS[1:], config), config, seed=5)
    assert both.batches[0][4:] == alone.batches[0]


def test_every_joint_action_opens_a_node_that_knows_its_path_and_its_own_history() -> None:
    config = RolloutConfig(group_size=2)
    engine = ScriptedEngine(lambda request: f"{request.agent}{request.seed % 97}")
    first = scored(sample(engine, root_nodes(PROBLEMS, config), config), [[1.0, 2.0], [0.0, 0.0]])
    nodes = child_nodes(first, config)
    assert [(node.problem.task_id, node.path) for node in nodes] == [
        ("t/0", (0,)),
        ("t/0", (1,)),
        ("t/1", (0,)),
        ("t/1", (1,)),
    ]
    second = sample(engine, nodes, config)
    seen = second[1].prompts["m"].observation.messages[0].content
    assert seen == f"main:zero|{first[0].actions['m'][1].text}"
    assert second[1].history[0].reward.total == 2.0


def test_threshold_and_masking_bound_the_tree() -> None:
    config = RolloutConfig(group_size=4, termination_threshold=2.0, tree="full")
    groups = sample(ScriptedEngine(lambda r: "x"), root_nodes(PROBLEMS, config), config)
    assert len(child_nodes(scored(groups, [[4.0] * 4, [1.0] * 4]), config)) == 4
    assert len(child_nodes(scored(groups, [[2.0] * 4, [1.0] * 4]), config)) == 8
    mixed = child_nodes(scored(groups, [[4.0, 4.0, 4.0, 1.0]] * 2), config)
    assert [node.path for node in mixed] == [(3,), (3,)], "what is perfect already is left alone, its siblings are not"
    nodes = child_nodes(scored(groups, [[0.0] * 4] * 2, masked=(0, 1, 2)), config)
    assert [node.path for node in nodes] == [(3,), (3,)]
    assert child_nodes(scored(groups, [[0.0] * 4] * 2, masked=range(4)), config) == []


def test_what_follows_a_joint_action() -> None:
    chains = RolloutConfig(group_size=4)
    groups = scored(
        sample(ScriptedEngine(lambda r: "x"), root_nodes(PROBLEMS, chains), chains), [[0.0, 3.0, 1.0, 2.0]] * 2
    )
    nodes = child_nodes(groups, chains)
    assert [(node.path, node.group_size) for node in nodes] == [((j,), 1) for j in range(4)] * 2
    full = child_nodes(groups, chains.model_copy(update={"tree": "full"}))
    assert [(node.path, node.group_size) for node in full] == [((j,), 4) for j in range(4)] * 2


def test_crossed_golden() -> None:
    assert joint_actions(2, 2, "crossed", None, 0) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert joint_actions(1, 3, "crossed", None, 0) == [(0,), (1,), (2,)]
    assert joint_actions(3, 2, "aligned", None, 0) == [(0, 0, 0), (1, 1, 1)]


@given(
    num_agents=st.integers(1, 3),
    group_size=st.integers(1, 5),
    rounds=st.integers(1, 25),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_subset_of_pairs_is_balanced(num_agents: int, group_size: int, rounds: int, seed: int) -> None:
    pairs = rounds * group_size
    picks = joint_actions(num_agents, group_size, "crossed", pairs, seed)
    assert len(picks) == len(set(picks)) == min(pairs, group_size**num_agents)
    for agent in range(num_agents):
        counts = Counter(pick[agent] for pick in picks)
        assert set(counts) == set(range(group_size))
        assert len(set(counts.values())) == 1


def test_only_those_whose_turn_it_is_are_asked() -> None:
    config = RolloutConfig(group_size=2, joint_mode="crossed", termination_threshold=-1.0)
    engine = ScriptedEngine(lambda request: f"{request.agent}{request.seed % 97}")
    first: list[RolloutGroup[Any]] = sample(engine, root_nodes(PROBLEMS, config), config, env=TurnsEnv(2))
    assert {request.agent for request in engine.batches[0]} == {"h"}
    assert [turn.picks for turn in first[0].turns] == [{"h": 0}, {"h": 1}]
    assert first[0].prompts.keys() == first[0].actions.keys() == {"h"}
    waiting = [
        replace(group, turns=tuple(ScoredTurn(turn.picks, PENDING, {}) for turn in group.turns)) for group in first
    ]
    nodes = child_nodes(waiting, config)
    assert len(nodes) == 4, "what is not priced yet is not above any threshold"
    second = sample(engine, nodes, config, env=TurnsEnv(2))
    assert {request.agent for request in engine.batches[1]} == {"m"}
    seen = second[1].prompts["m"].observation.messages[0].content
    assert seen == f"main:zero|{first[0].actions['h'][1].text}"
    last = second[1].turns[0]
    assert second[1].latest(last) == {"h": first[0].actions["h"][1].text, "m": second[1].actions["m"][0].text}
