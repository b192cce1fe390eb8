from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magrpo.config.sections import AlgoConfig, RolloutConfig
from magrpo.stages.credit import CreditRules, prefer_joint_actions
from magrpo.stages.rollout import joint_actions
from magrpo.types import (
    PENDING,
    Action,
    JointReward,
    Observation,
    Problem,
    Prompt,
    RolloutGroup,
    Sample,
    ScoredTurn,
)
from tests.stages.crediting import credit_with

AGENTS = ("helper", "main")
ALGO = AlgoConfig()
FULL = RolloutConfig(group_size=2, tree="full")
CHAINS = RolloutConfig(group_size=2)


def group(
    task: str,
    turns: Sequence[tuple[tuple[int, ...], float | None]],
    size: int = 2,
    path: tuple[int, ...] = (),
    agents: Sequence[str] = AGENTS,
) -> RolloutGroup[ScoredTurn]:
    """A node; ``turns`` are (picks, reward), reward None for a joint action the sandbox failed on."""
    prompts = {agent: Prompt(Observation(()), (len(task), len(path) + 1)) for agent in agents}
    actions = {
        agent: tuple(Action(agent, "", (10 * a + i, 2), (-0.5, -0.25), "stop", 3) for i in range(size))
        for a, agent in enumerate(agents)
    }
    scored = tuple(
        ScoredTurn(
            dict(zip(agents, picks, strict=True)),
            JointReward(reward or 0.0, {} if reward is None else {"tests": reward / 2, "syntax": reward / 2}),
            {},
            masked=reward is None,
        )
        for picks, reward in turns
    )
    return RolloutGroup(Problem(task, ""), path, (), prompts, actions, scored)


def aligned(*rewards: float | None) -> list[tuple[tuple[int, ...], float | None]]:
    return [((i, i), reward) for i, reward in enumerate(rewards)]


def advantages(samples: Sequence[Sample]) -> list[float]:
    return [sample.advantage for sample in samples]


def test_one_turn_aligned() -> None:
    samples, metrics = credit_with([group("a", aligned(1.0, 3.0)), group("b", aligned(2.0, 2.0))], ALGO, AGENTS)
    for number, agent in enumerate(AGENTS):
        assert advantages(samples[agent]) == [-1.0, 1.0, 0.0, 0.0]
        first = samples[agent][0]
        assert (first.prompt_ids, first.completion_ids) == ((1, 1), (10 * number, 2))
        assert (first.sampling_logps, first.returns, first.policy_version) == ((-0.5, -0.25), 1.0, 3)
        assert [sample.group for sample in samples[agent]] == [0, 0, 1, 1]
        assert metrics[f"credit/{agent}/advantage_std"] == pytest.approx(0.5**0.5)
    assert metrics["reward/joint"] == 2.0
    assert metrics["reward/tests"] == metrics["reward/syntax"] == 1.0
    assert metrics["reward/frac_groups_equal"] == 0.5
    assert metrics["reward/masked_frac"] == 0.0
    assert not [key for key in metrics if "influence" in key or "turn" in key]


def test_two_turns() -> None:
    # Joint action 0 leads to rewards 3 and 5, joint action 1 to 0 and 1: returns 1 + 4 / 2 and 2 + 0.5 / 2.
    levels = [
        group("a", aligned(0.0, 1.0), path=(1,)),
        group("a", aligned(1.0, 2.0)),
        group("a", aligned(3.0, 5.0), path=(0,)),
    ]
    samples, metrics = credit_with(levels, AlgoConfig(gamma=0.5), AGENTS, rollout=FULL, num_turns=2)
    assert [sample.returns for sample in samples["main"]] == [3.0, 2.25, 0.0, 1.0, 3.0, 5.0]
    assert advantages(samples["main"]) == [0.375, -0.375, -0.5, 0.5, -1.0, 1.0]
    assert metrics["reward/return"] == (3.0 + 2.25) / 2
    assert metrics["reward/joint"] == 2.0
    assert (metrics["reward/joint_turn_1"], metrics["reward/joint_turn_2"]) == (1.5, 2.25)


def test_an_agents_own_part_is_added_to_its_returns_alone() -> None:
    """Two turns, gamma 0.5: main gets 1 for its completion 1 in the first turn, 4 for its completion 0 after that.

    Its own returns: 3.0 + 0.5 * 4 / 2 = 4.0 and 2.25 + 1; in the second turn 3 + 4 and 5.
    """
    joint = [group("a", aligned(1.0, 2.0)), group("a", aligned(3.0, 5.0), path=(0,))]
    joint.append(group("a", aligned(0.0, 1.0), path=(1,)))
    local: list[list[dict[str, float]]] = [[{}, {"main": 1.0}], [{"main": 4.0}, {"main": 0.0}], [{}, {}]]
    mixed = [
        replace(
            node,
            turns=tuple(
                replace(turn, reward=replace(turn.reward, local=own))
                for turn, own in zip(node.turns, owns, strict=True)
            ),
        )
        for node, owns in zip(joint, local, strict=True)
    ]
    algo = AlgoConfig(gamma=0.5)
    plain, plain_metrics = credit_with(joint, algo, AGENTS, rollout=FULL, num_turns=2)
    samples, metrics = credit_with(mixed, algo, AGENTS, rollout=FULL, num_turns=2)
    assert [sample.returns for sample in samples["main"]] == [4.0, 3.25, 7.0, 5.0, 0.0, 1.0]
    assert advantages(samples["main"]) == [0.375, -0.375, 1.0, -1.0, -0.5, 0.5]
    assert samples["helper"] == plain["helper"]
    assert {key: value for key, value in metrics.items() if "main" not in key} == {
        key: value for key, value in plain_metrics.items() if "main" not in key
    }


def test_a_child_belongs_to_its_problem() -> None:
    levels = [group(task, aligned(0.0, 0.0)) for task in ("a", "bb")]
    levels += [group("a", aligned(1.0, 1.0), path=(0,)), group("bb", aligned(2.0, 2.0), path=(1,))]
    levels += [group("a", aligned(3.0, 3.0), path=(1,)), group("bb", aligned(7.0, 7.0), path=(0,))]
    samples, _ = credit_with(levels, ALGO, AGENTS, rollout=FULL, num_turns=2)
    assert [sample.returns for sample in samples["main"][:4]] == [1.0, 3.0, 7.0, 2.0]


def test_a_child_without_its_parent_is_refused_by_name() -> None:
    orphan = group("a", aligned(1.0, 1.0), path=(0,))
    with pytest.raises(ValueError, match=r"credit: a: node \(0,\) has lost its parent"):
        credit_with([group("bb", aligned(0.0, 0.0)), orphan], ALGO, AGENTS, rollout=FULL, num_turns=2)


def test_an_episode_that_ended_earns_its_reward_at_the_turns_left() -> None:
    levels = [group("a", aligned(4.0, 4.5)), group("b", aligned(0.0, 4.0))]
    levels += [group("b", aligned(2.0, 2.0), path=(0,))]
    ends = FULL.model_copy(update={"termination_threshold": 3.9})
    samples, _ = credit_with(levels, ALGO, AGENTS, rollout=ends, num_turns=2)
    assert [sample.returns for sample in samples["main"]] == [8.0, 9.0, 2.0, 8.0, 2.0, 2.0]


def test_a_third_turn_does_not_punish_those_who_ended_before_it() -> None:
    """All earn 4 from the second turn on; one ends there, its sibling goes on."""
    levels = [group("a", aligned(1.0, 1.0))]
    levels += [group("a", aligned(4.0, 4.0), path=(0,)), group("a", aligned(3.0, 3.0), path=(1,))]
    levels += [group("a", aligned(5.0, 5.0), path=(1, i)) for i in range(2)]
    ends = FULL.model_copy(update={"termination_threshold": 3.9})
    samples, _ = credit_with(levels, ALGO, AGENTS, rollout=ends, num_turns=3)
    assert [sample.returns for sample in samples["main"][:2]] == [1.0 + 4.0 + 4.0, 1.0 + 3.0 + 5.0]
    assert advantages(samples["main"][:2]) == [0.0, 0.0]


def test_every_turn_weighs_the_same_whatever_the_tree() -> None:
    levels = [group("a", aligned(1.0, 2.0))]
    levels += [group("a", aligned(3.0, 5.0), path=(i,)) for i in range(2)]
    samples, _ = credit_with(levels, ALGO, AGENTS, rollout=FULL, num_turns=2)
    assert [sample.weight for sample in samples["main"]] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    samples, _ = credit_with(levels, AlgoConfig(gamma=0.5), AGENTS, rollout=FULL, num_turns=2)
    assert [sample.weight for sample in samples["main"]] == [1.0, 1.0, 0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("rollout", [CHAINS, FULL], ids=["chains", "full"])
@pytest.mark.parametrize(
    ("root", "child"), [((1.0, None, None, 2.0), (1.0, 2.0, 3.0, 4.0)), ((1.0, 2.0, 3.0, 4.0), (1.0, None, None, 2.0))]
)
def test_every_turn_weighs_the_same_whatever_is_masked(
    rollout: RolloutConfig, root: tuple[float | None, ...], child: tuple[float | None, ...]
) -> None:
    """Of four joint actions two may be masked at the root, or below each of them."""
    size = 1 if rollout is CHAINS else 4
    levels = [group("a", aligned(*root), size=4)]
    levels += [group("a", aligned(*child[:size]), size, (i,)) for i, reward in enumerate(root) if reward is not None]
    rollout = rollout.model_copy(update={"group_size": 4})
    samples, _ = credit_with(levels, ALGO, AGENTS, rollout=rollout, num_turns=2)
    by_turn = {1: 0.0, 2: 0.0}
    for sample in samples["main"]:
        by_turn[sample.prompt_ids[1]] += sample.weight  # the prompt ends with the number of the turn
    assert by_turn[1] == by_turn[2] == sum(reward is not None for reward in root)


@pytest.mark.parametrize(("root", "child"), [((1.0, 2.0, None), (1.0, 2.0, 3.0)), ((1.0, 2.0, 3.0), (1.0, None, 3.0))])
def test_preferences_weigh_every_turn_alike_whatever_is_masked(
    root: tuple[float | None, ...], child: tuple[float | None, ...]
) -> None:
    levels = [group("a", aligned(*root), size=3)]
    levels += [group("a", aligned(*child), 3, (i,)) for i, reward in enumerate(root) if reward is not None]
    rules = CreditRules(AlgoConfig(loss="madpo"), {}, FULL.model_copy(update={"group_size": 3}), 2)
    samples, _, _ = prefer_joint_actions(levels, AGENTS, rules)
    by_turn = {1: 0.0, 2: 0.0}
    for sample in samples["main"]:
        by_turn[sample.prompt_ids[1]] += sample.counts or 0.0
    assert by_turn == pytest.approx({1: 1.0, 2: 1.0}), "a node is a mean over its pairs, however many there are"


def test_returns_that_differ_by_rounding_teach_nothing_once_they_are_divided() -> None:
    levels = [group("a", aligned(0.1 + 0.2, 0.3))]
    _, metrics = credit_with(levels, AlgoConfig(normalize="std"), AGENTS)
    assert metrics["reward/frac_groups_equal"] == 1


def test_lost_futures_leave_turns_their_weight() -> None:
    levels = [group("a", aligned(1.0, 2.0, 3.0, 4.0), size=4)]
    futures = (None, 1.0, None, 2.0)
    levels += [group("a", aligned(reward), size=1, path=(i,)) for i, reward in enumerate(futures)]
    samples, _ = credit_with(levels, ALGO, AGENTS, rollout=RolloutConfig(group_size=4), num_turns=2)
    assert [sample.weight for sample in samples["main"]] == [1.0] * 4


def chains() -> list[RolloutGroup[ScoredTurn]]:
    """Two episodes of two turns: rewards 1 and 3, and 2 and 0."""
    levels = [group("a", aligned(1.0, 2.0))]
    return [*levels, *(group("a", aligned(r), size=1, path=(i,)) for i, r in enumerate((3.0, 0.0)))]


def test_chains_are_compared_with_those_of_the_same_problem_and_turn() -> None:
    other = replace(chains()[0], problem=Problem("b", ""))
    levels = [*chains(), other, *(replace(node, problem=Problem("b", "")) for node in chains()[1:])]
    samples, metrics = credit_with(levels, ALGO, AGENTS, rollout=CHAINS, num_turns=2)
    assert [s.returns for s in samples["main"]] == [4.0, 2.0, 4.0, 2.0, 3.0, 0.0, 3.0, 0.0]
    assert advantages(samples["main"]) == [1.0, -1.0, 1.0, -1.0, 1.5, -1.5, 1.5, -1.5]
    assert [s.group for s in samples["main"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {s.weight for s in samples["main"]} == {1.0}
    assert metrics["reward/return"] == 3.0


def test_an_episode_that_ended_stays_among_its_siblings() -> None:
    """It is worth 5 in the second turn, too, where it has no completion of its own."""
    levels = [group("a", aligned(5.0, 2.0)), group("a", aligned(3.0), size=1, path=(1,))]
    ends = CHAINS.model_copy(update={"termination_threshold": 4.0})
    samples, metrics = credit_with(levels, ALGO, AGENTS, rollout=ends, num_turns=2)
    assert [s.returns for s in samples["main"]] == [10.0, 5.0, 3.0]
    assert advantages(samples["main"]) == [2.5, -2.5, 3.0 - 4.0]
    assert [s.weight for s in samples["main"]] == [1.0, 1.0, 1.0]
    assert metrics["credit/main/frac_groups_equal"] == 0.0


def test_crossed_credit_is_the_mean_over_partners() -> None:
    pairs = [((0, 0), 1.0), ((0, 1), 3.0), ((1, 0), 5.0), ((1, 1), 9.0)]
    samples, metrics = credit_with([group("a", pairs)], ALGO, AGENTS)
    assert [sample.returns for sample in samples["helper"]] == [2.0, 7.0]
    assert [sample.returns for sample in samples["main"]] == [3.0, 6.0]
    assert advantages(samples["main"]) == [-1.5, 1.5]
    assert metrics["credit/helper/influence"] == pytest.approx(25 / 35)
    assert metrics["credit/main/influence"] == pytest.approx(9 / 35)


@pytest.mark.parametrize("pairs", [None, 32, 16])
def test_an_agent_without_effect_has_no_influence_however_few_pairs_are_scored(pairs: int | None) -> None:
    nodes = []
    for number in range(60):
        earned = random.Random(number)
        rewards = [earned.choice((0.0, 1.0, 2.0, 4.0)) for _ in range(8)]
        picks = joint_actions(2, 8, "crossed", pairs, number)
        nodes.append(group(f"t{number}", [((h, m), rewards[m]) for h, m in picks], size=8))
    _, metrics = credit_with(nodes, ALGO, AGENTS)
    assert metrics["credit/helper/influence"] == pytest.approx(0.0, abs=0.05)
    assert metrics["credit/main/influence"] == pytest.approx(1.0)


def test_a_part_differs_in_chains_where_it_differs_between_the_chains_of_a_problem() -> None:
    """Two agents in turn: the first one's answers are not priced, and each of the second one's is alone at its node."""
    levels = [pending("a"), pending("b")]
    levels += [group("a", [((0,), float(i))], size=1, path=(i,), agents=("main",)) for i in range(2)]
    levels += [group("b", [((0,), 3.0)], size=1, path=(i,), agents=("main",)) for i in range(2)]
    _, metrics = credit_with(levels, ALGO, AGENTS, rollout=CHAINS, num_turns=2)
    assert metrics["signal/tests"] == 0.5
    _, metrics = credit_with(levels, ALGO, AGENTS, rollout=FULL, num_turns=2)
    assert "signal/tests" not in metrics, "in a tree, the nodes of a turn are not compared"


def test_returns_without_siblings_as_baseline_teach_though_they_are_equal() -> None:
    alone = [group("a", aligned(2.0), size=1), group("b", aligned(2.0, 2.0)), group("c", aligned(0.0, 0.0))]
    samples, metrics = credit_with(alone, AlgoConfig(estimator="mareinforce"), AGENTS)
    assert advantages(samples["main"]) == [2.0, 2.0, 2.0, 0.0, 0.0]
    assert metrics["reward/frac_groups_equal"] == pytest.approx(1 / 3), "all but the group that earned nothing"


def test_lenient_credit_is_that_with_the_better_partners() -> None:
    pairs = [((0, 0), 1.0), ((0, 1), 3.0), ((1, 0), 5.0), ((1, 1), None)]
    samples, metrics = credit_with([group("a", pairs)], AlgoConfig(lenience=0.5), AGENTS)
    assert [sample.returns for sample in samples["helper"]] == [3.0, 5.0]
    assert [sample.returns for sample in samples["main"]] == [5.0, 3.0]
    assert advantages(samples["main"]) == [1.0, -1.0]
    assert metrics["reward/joint"] == 3.0, "the reward itself is the mean over all"


def test_masked_joint_actions_count_for_nothing() -> None:
    samples, metrics = credit_with([group("a", aligned(1.0, None, 3.0), size=3)], ALGO, AGENTS)
    assert [sample.completion_ids for sample in samples["main"]] == [(10, 2), (12, 2)]  # the second is dropped
    assert advantages(samples["main"]) == [-1.0, 1.0]
    assert metrics["reward/joint"] == 2.0
    assert metrics["reward/tests"] == 1.0
    assert metrics["reward/masked_frac"] == pytest.approx(1 / 3)


def test_masked_pairs_leave_the_other_pairs_of_a_completion() -> None:
    pairs = [((0, 0), 1.0), ((0, 1), None), ((1, 0), 5.0), ((1, 1), 9.0)]
    samples, _ = credit_with([group("a", pairs)], ALGO, AGENTS)
    assert [sample.returns for sample in samples["helper"]] == [1.0, 7.0]
    assert [sample.returns for sample in samples["main"]] == [3.0, 9.0]


def test_an_index_in_a_path_counts_masked_joint_actions_too() -> None:
    levels = [group("a", aligned(None, 1.0), size=2), group("a", aligned(2.0, 2.0), path=(1,))]
    samples, _ = credit_with(levels, ALGO, AGENTS, rollout=FULL, num_turns=2)
    assert [sample.returns for sample in samples["main"]] == [3.0, 2.0, 2.0]


def test_nothing_but_masked_joint_actions_gives_no_samples() -> None:
    samples, metrics = credit_with([group("a", aligned(None, None))], ALGO, AGENTS)
    assert samples == {"helper": [], "main": []}
    assert metrics["reward/masked_frac"] == 1.0


def test_a_joint_action_whose_future_the_sandbox_lost_counts_for_nothing() -> None:
    levels = [group("a", aligned(1.0, 2.0)), group("a", aligned(None, None), path=(0,))]
    levels += [group("a", aligned(3.0, 3.0), path=(1,))]
    samples, _ = credit_with(levels, ALGO, AGENTS, rollout=FULL, num_turns=2)
    assert [sample.returns for sample in samples["main"]] == [5.0, 3.0, 3.0]


def test_one_agent_is_grpo() -> None:
    alone = group("a", [((i,), reward) for i, reward in enumerate((0.0, 1.0, 5.0))], size=3, agents=("solo",))
    samples, _ = credit_with([alone], ALGO, ("solo",))
    assert advantages(samples["solo"]) == [-2.0, -1.0, 3.0]
    # Equation 1 of GRPO, arXiv 2402.03300: the mean subtracted and the deviation, sqrt(14 / 3), divided by.
    samples, _ = credit_with([alone], AlgoConfig(normalize="std"), ("solo",))
    assert advantages(samples["solo"]) == pytest.approx([r / (14 / 3) ** 0.5 for r in (-2.0, -1.0, 3.0)], rel=1e-5)


def test_an_agent_may_have_an_estimator_of_its_own() -> None:
    samples, _ = credit_with([group("a", aligned(1.0, 3.0))], ALGO, AGENTS, {"main": "mareinforce"})
    assert advantages(samples["helper"]) == [-1.0, 1.0]
    assert advantages(samples["main"]) == [1.0, 3.0]


def pending(task: str, size: int = 2) -> RolloutGroup[ScoredTurn]:
    """A node at which the helper alone has acted: nothing is priced yet."""
    node = group(task, [((i,), 0.0) for i in range(size)], size=size, agents=("helper",))
    return replace(node, turns=tuple(replace(turn, reward=PENDING) for turn in node.turns))


def test_an_agent_has_samples_of_the_turns_in_which_it_acts() -> None:
    # Helper's completion 0 is followed by main's worth 1 and 3, its completion 1 by main's worth 4 and 8.
    levels = [pending("a")]
    levels += [group("a", [((0,), 1.0), ((1,), 3.0)], path=(0,), agents=("main",))]
    levels += [group("a", [((0,), 4.0), ((1,), 8.0)], path=(1,), agents=("main",))]
    samples, metrics = credit_with(levels, AlgoConfig(gamma=0.5), AGENTS, rollout=FULL, num_turns=2)
    assert [sample.returns for sample in samples["helper"]] == [1.0, 3.0]
    assert advantages(samples["helper"]) == [-1.0, 1.0]
    assert [sample.returns for sample in samples["main"]] == [1.0, 3.0, 4.0, 8.0]
    assert advantages(samples["main"]) == [-1.0, 1.0, -2.0, 2.0]
    assert [sample.group for sample in samples["main"]] == [0, 0, 1, 1]
    assert metrics["reward/joint"] == metrics["reward/tests"] * 2 == 4.0  # the helper's turn has no price of its own
    assert metrics["reward/return"] == 2.0
    assert metrics["reward/masked_frac"] == 0.0


def test_two_of_three_act_and_then_the_third() -> None:
    # Crossed: four pairs of the first two, one completion of the third after each; worth 0, 1, 2 and 5.
    first = group("a", [((i, j), 0.0) for i in range(2) for j in range(2)], agents=("x", "y"))
    levels = [replace(first, turns=tuple(replace(turn, reward=PENDING) for turn in first.turns))]
    for pair, reward in enumerate((0.0, 1.0, 2.0, 5.0)):
        levels.append(group("a", [((0,), reward)], size=1, path=(pair,), agents=("z",)))
    samples, metrics = credit_with(levels, ALGO, ("x", "y", "z"), rollout=FULL, num_turns=2)
    assert [sample.returns for sample in samples["x"]] == [0.5, 3.5]
    assert [sample.returns for sample in samples["y"]] == [1.0, 3.0]
    assert advantages(samples["y"]) == [-1.0, 1.0]
    assert advantages(samples["z"]) == [0.0] * 4  # each is alone in its group
    assert metrics["credit/x/influence"] == pytest.approx(9 / 14)
    assert metrics["credit/y/influence"] == pytest.approx(4 / 14)
    assert "credit/z/influence" not in metrics


def test_an_agent_whose_turn_never_came_has_no_samples() -> None:
    samples, metrics = credit_with([pending("a")], ALGO, AGENTS)
    assert (advantages(samples["helper"]), samples["main"]) == ([0.0, 0.0], [])
    assert metrics["credit/main/advantage_std"] == metrics["reward/joint"] == 0.0


rewards = st.floats(-4, 4, allow_nan=False, width=32)


@settings(max_examples=40, deadline=None)
@given(st.lists(rewards, min_size=9, max_size=9), st.permutations(range(9)))
def test_the_order_of_groups_and_pairs_changes_nothing(values: list[float], order: list[int]) -> None:
    pairs = [((i // 3, i % 3), value) for i, value in enumerate(values)]
    one = [group("a", pairs, size=3), group("bb", aligned(1.0, 2.0))]
    two = [group("bb", aligned(1.0, 2.0)), group("a", [pairs[i] for i in order], size=3)]
    for agent in AGENTS:
        first, second = (credit_with(levels, ALGO, AGENTS)[0][agent] for levels in (one, two))
        assert [(s.returns, s.advantage) for s in first] == [(s.returns, s.advantage) for s in second[2:] + second[:2]]
