"""Sessions alone: seeds, the order of calls, and what a call stores."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.gateway.sessions import EpisodeTask, SampledCall, Session
from magrpo.seeds import derive_seed
from magrpo.types import Action, Call, Episode, Problem
from tests.fakes import Clock
from tests.gateway.playing import AGENTS, SAMPLING


def make_session(index: int = 3, seed: int = 7, max_calls: int = 64, **fields: Any) -> Session:
    return Session(EpisodeTask(Problem("task/0", "prompt"), index, SAMPLING, seed), AGENTS, max_calls, **fields)


def seeds_of(calls: list[tuple[str, tuple[int, ...]]], session: Session | None = None) -> list[int]:
    """The seeds of calls, each an agent with a prompt, that arrive in this order."""
    session = session or make_session()
    return [session.begin_call(agent, prompt, None)[1] for agent, prompt in calls]


# -------------------------------------------------------------------------------------------------------------- seeds
@pytest.mark.parametrize("agent", AGENTS)
def test_the_first_seed_of_an_agent_is_that_of_a_built_in_environment(agent: str) -> None:
    # As stages.rollout derives it for the root node of a problem.
    others = [("planner", (1,)), ("planner", (2,))] if agent == "coder" else []
    assert seeds_of([*others, (agent, (5, 6))])[-1] == derive_seed(7, "task/0", (), agent, 3)
    assert seeds_of([(agent, (9,))]) == seeds_of([(agent, (5, 6))]), "whatever the prompt"


calls_of_agents = st.lists(
    st.tuples(st.sampled_from(AGENTS), st.lists(st.integers(0, 2), min_size=1, max_size=2).map(tuple)), max_size=8
)


@given(calls_of_agents, st.randoms(use_true_random=False))
def test_later_seeds_do_not_depend_on_the_order_of_arrival(
    calls: list[tuple[str, tuple[int, ...]]], rng: object
) -> None:
    first = [(agent, (8, 8)) for agent in AGENTS]
    shuffled = [*calls]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    found = [sorted(zip(order, seeds_of([*first, *order])[2:], strict=True)) for order in (calls, shuffled)]
    assert found[0] == found[1]


@given(calls_of_agents)
def test_seeds_do_not_depend_on_other_agents(calls: list[tuple[str, tuple[int, ...]]]) -> None:
    alone = [call for call in calls if call[0] == "coder"]
    together = zip(calls, seeds_of(calls), strict=True)
    assert [seed for call, seed in together if call[0] == "coder"] == seeds_of(alone)


@given(calls_of_agents)
def test_all_seeds_of_an_episode_differ(calls: list[tuple[str, tuple[int, ...]]]) -> None:
    assert len(set(seeds_of(calls))) == len(calls)


def test_seeds_differ_between_episodes_and_stages() -> None:
    calls = [("planner", (1,)), ("planner", (1,)), ("planner", (2,))]
    sessions = [make_session(), make_session(index=4), make_session(seed=8)]
    assert len({seed for session in sessions for seed in seeds_of(calls, session)}) == 9


def test_requested_seeds() -> None:
    plain, session = make_session(), make_session()
    requested = [session.begin_call("planner", (1,), seed)[1] for seed in (5, 5, 6, None)]
    assert len(set(requested)) == 4, "a repeated one gives another sample"
    assert requested[0] != plain.begin_call("planner", (1,), None)[1]
    other = make_session()
    assert [other.begin_call("planner", prompt, 6)[1] for prompt in ((2,), (1,))][1] == requested[2], (
        "the remedy for an agent whose first calls are concurrent: the seed does not depend on which is first"
    )


def test_calls_are_numbered_by_agent() -> None:
    session = make_session()
    order = ["planner", "coder", "planner"]
    assert [session.begin_call(agent, (1,), None)[0] for agent in order] == [0, 0, 1]
    assert session.num_asked == 3


# -------------------------------------------------------------------------------------------------------------- calls
def sampled(
    agent: str, number: int, batch: int, prompt: tuple[int, ...], completion: tuple[int, ...] = (9,), turns: int = 1
) -> SampledCall:
    messages = tuple({"role": "user", "content": str(turn)} for turn in range(turns))
    action = Action(agent, "", completion, (0.0,) * len(completion), "stop", 0)
    return SampledCall(agent, number, batch, prompt, messages, action, {})


def test_calls_of_a_batch_are_in_the_order_of_the_agents() -> None:
    session = make_session()
    session.calls = [
        sampled("coder", 1, 1, (4,)),
        sampled("coder", 0, 0, (1,)),
        sampled("planner", 1, 0, (3,)),
        sampled("planner", 0, 0, (2,)),
    ]
    calls = session.seal()
    assert [(call.agent, call.prompt_ids) for call in calls] == [
        ("planner", (2,)),
        ("planner", (3,)),
        ("coder", (1,)),
        ("coder", (4,)),
    ]
    assert session.is_sealed
    assert session.seal() == calls, "sealing changes nothing a second time"


def test_a_call_extends_the_longest_earlier_one_of_its_agent() -> None:
    session = make_session()
    session.calls = [
        sampled("planner", 0, 0, (1, 2), (9,)),
        sampled("coder", 0, 1, (1, 2, 9, 3), (9,), turns=2),
        sampled("planner", 1, 2, (1, 2, 9, 3), (8,), turns=2),
        sampled("planner", 2, 3, (1, 2, 9, 4), (8,), turns=2),  # another continuation of the first
        sampled("planner", 3, 4, (1, 2, 9, 3, 8, 5), (7,), turns=3),
        sampled("planner", 4, 5, (1, 2, 9, 3, 8, 5, 7), (7,), turns=2),  # tokens of three, messages of two
        sampled("planner", 5, 6, (1, 2, 8), (7,), turns=2),  # rewritten
    ]
    whole = [*session.calls]
    calls = session.seal()
    assert [call.extends for call in calls] == [-1, -1, 0, 0, 2, 2, -1]
    episode = Episode(calls, {})
    assert [episode.prompt_ids(n) for n in range(7)] == [call.prompt_ids for call in whole]
    assert [episode.messages(n) for n in range(7)] == [call.messages for call in whole]


@given(st.lists(st.tuples(st.sampled_from(AGENTS), st.lists(st.integers(0, 1), max_size=5).map(tuple)), max_size=8))
def test_whole_prompts_are_always_recovered(drawn: list[tuple[str, tuple[int, ...]]]) -> None:
    session = make_session()
    session.calls = [
        sampled(agent, n, n, (0, *prompt), (1,), turns=len(prompt) // 2) for n, (agent, prompt) in enumerate(drawn)
    ]
    whole = [*session.calls]
    episode = Episode(session.seal(), {})
    assert [episode.prompt_ids(n) for n in range(len(whole))] == [call.prompt_ids for call in whole]
    assert [episode.messages(n) for n in range(len(whole))] == [call.messages for call in whole]


def test_a_long_conversation_is_recovered_whole() -> None:
    """Longer than Python's limit of recursion."""
    calls = tuple(
        Call("planner", n - 1, (n,), ({"content": str(n)},), Action("planner", "", (-n,), (0.0,), "stop", 0))
        for n in range(2000)
    )
    episode = Episode(calls, {})
    assert episode.prompt_ids(1999) == tuple(i for n in range(2000) for i in (n, -n))[:-1]
    assert [message["content"] for message in episode.messages(1999)] == [str(n) for n in range(2000)]


def test_only_completions_that_ended_by_themselves_are_continued() -> None:
    session = make_session()
    cut = Action("planner", "", (8,), (0.0,), "length", 0)
    session.calls = [
        sampled("planner", 0, 0, (1,)),
        SampledCall("planner", 1, 1, (2,), (), cut, {}),
        sampled("coder", 0, 2, (3,)),
    ]
    assert session.list_earlier("planner") == [(1, 9)]


def test_time_with_a_request_waiting_counts_once() -> None:
    clock = Clock()
    session = make_session(get_time=clock.monotonic)
    with session.wait():
        clock.now = 1.0
        with session.wait():
            clock.now = 3.0
        assert session.num_waiting == 1
        clock.now = 4.0
    clock.now = 10.0
    assert (session.num_waiting, session.waited_s) == (0, 4.0)
    with session.wait():
        clock.now = 11.0
    assert session.waited_s == 5.0
