"""Credit for the calls of programs: exact games, then examples worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.algo.episodes import Siblings
from magrpo.config.sections import AlgoConfig
from magrpo.types import Action, JointReward, Observation, Problem, Prompt, RolloutGroup, Sample, ScoredTurn
from tests.stages.crediting import credit_with
from tests.stages.program_game import GROUP_SIZE, Played, Policies, Step, ask_coder, choose_length, make_group
from tests.stages.test_exact_game import agrees

DRAWS = 4000
MARLOO = AlgoConfig(estimator="marloo")
GROUPINGS: tuple[Siblings, ...] = ("agent", "agent_turn")


def per_episode(sample: Sample, members: Sequence[Sample]) -> float:
    """What the loss does: it divides by the number of episodes."""
    return 1 / GROUP_SIZE


def per_calls_of_the_batch(sample: Sample, members: Sequence[Sample]) -> float:
    return 1 / len(members)


def num_calls_of_episode(sample: Sample) -> float:
    """In games in which each episode has calls of the agent."""
    assert sample.counts is not None
    return round(1 / sample.counts)


def per_call_of_the_episode(sample: Sample, members: Sequence[Sample]) -> float:
    return 1 / GROUP_SIZE / num_calls_of_episode(sample)


# -------------------------------------------------------------------------------------------------------- exact games
@pytest.fixture(scope="module")
def lengths() -> tuple[Policies, list[RolloutGroup[ScoredTurn]]]:
    game = Policies(choose_length, uniform=0)
    return game, game.draw_groups(DRAWS, seed=1)


@pytest.fixture(scope="module")
def coder() -> tuple[Policies, list[RolloutGroup[ScoredTurn]]]:
    game = Policies(ask_coder)
    return game, game.draw_groups(DRAWS // 2, seed=0)


Drawn = tuple[Policies, list[RolloutGroup[ScoredTurn]]]


@pytest.mark.parametrize("siblings", GROUPINGS)
def test_episodes_of_different_lengths(lengths: Drawn, siblings: Siblings) -> None:
    game, groups = lengths
    exact = game.exact_gradient("planner")
    assert exact[game.rows["planner", (0,)]] == pytest.approx([-1 / 18, -1 / 45, 7 / 90])  # (R - 2/3) / 3
    found = game.gradients(groups, "planner", per_episode, MARLOO, siblings)
    agrees(found, exact.flatten())


@pytest.mark.slow
def test_dividing_by_all_calls_would_not_be_the_gradient(lengths: Drawn) -> None:
    game, groups = lengths
    found = game.gradients(groups, "planner", per_calls_of_the_batch, MARLOO)
    with pytest.raises(AssertionError):
        agrees(found, game.exact_gradient("planner").flatten())


@pytest.mark.slow
def test_dividing_by_the_calls_of_an_episode_would_raise_the_second_best_action(lengths: Drawn) -> None:
    game, groups = lengths
    found = game.gradients(groups, "planner", per_call_of_the_episode, MARLOO)
    with pytest.raises(AssertionError):
        agrees(found, game.exact_gradient("planner").flatten())
    first = found.reshape(DRAWS, -1, 3)[:, game.rows["planner", (0,)]]
    errors = first.std(axis=0, ddof=1) / np.sqrt(DRAWS)
    # Of the expectation of (R - 2/3) / N: (-1/6, -1/30, 7/240), less their mean, over 3.
    expected = np.array([-0.0366, 0.0079, 0.0287])
    assert (np.abs(first.mean(axis=0) - expected) < 4 * errors + 1e-4).all()
    assert first.mean(axis=0)[1] > 2 * errors[1]


@pytest.mark.parametrize("siblings", GROUPINGS)
@pytest.mark.parametrize("agent", ["planner", "coder"])
def test_an_agent_that_is_asked_never_once_or_twice(coder: Drawn, agent: str, siblings: Siblings) -> None:
    game, groups = coder
    found = game.gradients(groups, agent, per_episode, MARLOO, siblings)
    agrees(found, game.exact_gradient(agent).flatten())


@pytest.mark.slow
def test_dividing_by_the_calls_of_the_coder_would_not_be_the_gradient(coder: Drawn) -> None:
    game, groups = coder
    found = game.gradients(groups, "coder", per_calls_of_the_batch, MARLOO)
    with pytest.raises(AssertionError):
        agrees(found, game.exact_gradient("coder").flatten())


def test_the_plain_mean_shrinks_the_gradient_of_every_draw(coder: Drawn) -> None:
    """By a quarter in groups of four: of :func:`test_an_agent_that_is_asked_never_once_or_twice`, exact without it."""
    game, groups = coder
    for agent in ("planner", "coder"):
        plain, shrunk = (game.gradients(groups[:100], agent, per_episode, algo) for algo in (MARLOO, AlgoConfig()))
        np.testing.assert_allclose(shrunk, plain * (GROUP_SIZE - 1) / GROUP_SIZE, atol=1e-12)
        assert plain.any()


# ------------------------------------------------------------------------------------------------- worked out by hand
def play(reward: float, **num_calls: int) -> Played:
    """An episode in which agents are asked so often; every prompt is one of its own."""
    steps: list[tuple[Step, int]] = [
        ((agent, (place, turn)), turn) for place, (agent, n) in enumerate(num_calls.items()) for turn in range(n)
    ]
    return steps, JointReward(reward, {})


def summarise(samples: Sequence[Sample]) -> list[tuple[float, float, int, float | None]]:
    return [(sample.returns, sample.advantage, sample.group, sample.counts) for sample in samples]


def test_by_agent_all_episodes_are_the_baseline() -> None:
    group = make_group("task", [play(1.0, planner=2), play(3.0, planner=1), play(8.0)])
    samples, metrics = credit_with([group], AlgoConfig(), ["planner", "coder"])
    # The mean is 4; three episodes, of which two ask the planner.
    assert summarise(samples["planner"]) == [(1.0, -3.0, 0, 0.75), (3.0, -1.0, 0, 1.5), (1.0, -3.0, 0, 0.75)]
    assert [sample.weight for sample in samples["planner"]] == [1.0] * 3
    assert samples["coder"] == []
    assert metrics["credit/planner/calls"] == 1.0
    assert metrics["credit/planner/acting_frac"] == pytest.approx(2 / 3)
    assert metrics["credit/coder/calls"] == metrics["credit/coder/acting_frac"] == 0.0
    assert metrics["credit/coder/advantage_std"] == 0.0
    assert metrics["reward/frac_groups_equal"] == 0.0


def test_by_turn_those_that_were_asked_as_often_are_the_baseline() -> None:
    group = make_group("task", [play(1.0, planner=3), play(3.0, planner=2), play(8.0)])
    samples, _ = credit_with([group], MARLOO.model_copy(update={"siblings": "agent_turn"}), ["planner"])
    assert summarise(samples["planner"]) == [
        (1.0, -2.0, 0, 0.5),  # 1 - 3
        (3.0, 2.0, 0, 0.75),
        (1.0, -2.0, 1, 0.5),
        (3.0, 2.0, 1, 0.75),
        (1.0, -4.5, 2, 0.5),  # alone: 1 - (3 + 8) / 2
    ]


@pytest.mark.parametrize("siblings", GROUPINGS)
def test_masked_episodes_do_not_exist(siblings: Siblings) -> None:
    valid = [play(1.0, planner=2), play(3.0, planner=1)]
    masked = make_group("task", [valid[0], play(100.0, planner=5), valid[1]], masked=[1])
    nothing = make_group("other", [play(5.0, planner=1)], masked=[0])
    expected = credit_with([make_group("task", valid)], MARLOO.model_copy(update={"siblings": siblings}), ["planner"])
    samples, metrics = credit_with([masked, nothing], MARLOO.model_copy(update={"siblings": siblings}), ["planner"])
    assert samples["planner"] == expected[0]["planner"]
    assert metrics["credit/planner/calls"] == 1.5


def test_local_rewards_are_the_agents_own() -> None:
    first, second = play(1.0, planner=1, coder=1), play(3.0, planner=1, coder=1)
    local = JointReward(1.0, {}, {"coder": 10.0})
    samples, _ = credit_with([make_group("task", [(first[0], local), second])], MARLOO, ["planner", "coder"])
    assert [sample.returns for sample in samples["planner"]] == [1.0, 3.0]
    assert [(sample.returns, sample.advantage) for sample in samples["coder"]] == [(11.0, 8.0), (3.0, -8.0)]


def test_agents_may_have_estimators_of_their_own() -> None:
    group = make_group("task", [play(1.0, planner=1, coder=1), play(3.0, planner=1, coder=1)])
    samples, _ = credit_with([group], MARLOO, ["planner", "coder"], {"coder": "mareinforce"})
    assert [[sample.advantage for sample in samples[agent]] for agent in samples] == [[-2.0, 2.0], [1.0, 3.0]]


def test_whole_prompts_are_trained() -> None:
    group = make_group("task", [play(1.0, planner=2), play(2.0, planner=1)])
    calls = group.episodes[0].calls
    extended = replace(calls[1], extends=0, prompt_ids=(7, 7))
    episode = replace(group.episodes[0], calls=(calls[0], extended))
    samples, _ = credit_with([replace(group, episodes=(episode, group.episodes[1]))], MARLOO, ["planner"])
    whole = (*calls[0].prompt_ids, *calls[0].action.token_ids, 7, 7)
    assert [sample.prompt_ids for sample in samples["planner"]][-1] == whole


episodes = st.builds(
    lambda reward, planner, coder: play(reward, planner=planner, coder=coder),
    st.floats(-2, 2, allow_nan=False),
    st.integers(0, 4),
    st.integers(0, 2),
)
problems = st.lists(st.tuples(st.lists(episodes, min_size=1, max_size=4), st.sets(st.integers(0, 3))), max_size=3)


@given(problems, st.sampled_from(GROUPINGS))
def test_the_loss_is_divided_by_the_number_of_valid_episodes(
    drawn: list[tuple[list[Played], set[int]]], siblings: Siblings
) -> None:
    groups = [make_group(str(n), played, masked=[*masked]) for n, (played, masked) in enumerate(drawn)]
    valid = [
        episode
        for group in groups
        for turn, episode in zip(group.turns, group.episodes, strict=True)
        if not turn.masked
    ]
    if not groups:
        return
    samples, _ = credit_with(groups, MARLOO.model_copy(update={"siblings": siblings}), ["planner", "coder"])
    for agent, members in samples.items():
        num_calls = sum(call.agent == agent for episode in valid for call in episode.calls)
        assert len(members) == num_calls, "one sample for each call"
        if members:
            assert sum(sample.counts or 0.0 for sample in members) == pytest.approx(len(valid))
        groups_of_samples = {sample.group for sample in members}
        assert groups_of_samples <= set(range(sum(1 + 4 * (siblings == "agent_turn") for _ in groups)))


@given(
    st.lists(st.tuples(st.floats(-2, 2, allow_nan=False), st.floats(-1, 1), st.booleans()), min_size=1, max_size=5),
    st.sampled_from(GROUPINGS),
    st.sampled_from(["magrpo", "marloo", "maremax", "mareinforce"]),
    st.sampled_from(["none", "std"]),
)
def test_one_call_in_every_episode_is_the_built_in_environment(
    drawn: list[tuple[float, float, bool]], siblings: Siblings, estimator: str, normalize: str
) -> None:
    agents = ("planner", "coder")
    turns = [
        ScoredTurn(dict.fromkeys(agents, n), JointReward(reward, {}, {"coder": local}), {}, masked=masked)
        for n, (reward, local, masked) in enumerate(drawn)
    ]
    actions = {agent: tuple(Action(agent, "", (n,), (-0.5,), "stop", 0) for n in range(len(drawn))) for agent in agents}
    prompts = {agent: Prompt(Observation(()), (place,)) for place, agent in enumerate(agents)}
    built_in = RolloutGroup(Problem("task", ""), (), (), prompts, actions, tuple(turns))
    played: list[Played] = [
        ([((agent, (place,)), n) for place, agent in enumerate(agents)], turn.reward) for n, turn in enumerate(turns)
    ]
    program = make_group("task", played, masked=[n for n, turn in enumerate(turns) if turn.masked])
    algo = AlgoConfig(estimator=estimator, normalize=normalize)
    expected, expected_metrics = credit_with([built_in], algo, agents)
    samples, metrics = credit_with([program], algo.model_copy(update={"siblings": siblings}), agents)
    assert {sample.counts for members in samples.values() for sample in members} <= {1.0}
    assert {agent: [replace(one, counts=None) for one in members] for agent, members in samples.items()} == expected
    shared = {name: value for name, value in expected_metrics.items() if not name.startswith("signal/")}
    assert {name: metrics[name] for name in shared if name in metrics} == {
        name: value for name, value in shared.items() if name in metrics
    }
