"""``relay``: what each programmer sees, what every convention earns, and the rows that bound the worth of messages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from magrpo.config.run import load_config
from magrpo.envs.relay import RelayEnv, RelayInTurnEnv, SoloRelayEnv
from magrpo.errors import ConfigError
from magrpo.experiments.baselines import RunTeam, Teams, with_baselines
from magrpo.interfaces import Sandbox
from magrpo.problems.coopcode import is_kept_out
from magrpo.problems.operations import Composition, parse_composition
from magrpo.problems.relay import Relay
from magrpo.rewards.relay import RelayReward, chain_functions
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.stages.evaluate import TrajectoryStart, shuffle_texts
from magrpo.stages.rollout import Node
from magrpo.stages.score import score_texts
from magrpo.types import PENDING, PastTurn, Problem, SamplingParams, Split

CONFIGS = Path(__file__).parents[2] / "pipelines" / "configs"


@pytest.fixture(scope="module")
def splits() -> Mapping[Split, list[Problem]]:
    return Relay(kind="relay", num_train=240, num_test=16, num_ood=16, apart_frac=0.5).load()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    opened = PoolSandbox(test_s=5.0, total_s=10.0).open()
    yield opened
    opened.close()


def see(problem: Problem, role: str) -> str:
    env = SoloRelayEnv(prompt="bare") if role == "solo" else RelayEnv(prompt="bare")
    [message] = env.observe(problem, role, [], role).messages
    return message.content


def write_part(problem: Problem, begin: int, end: int) -> str:
    return Composition(parse_composition(problem).steps[begin:end]).write_function("aux")


@pytest.mark.parametrize("role", ["first", "second"])
@pytest.mark.parametrize("prompt", ["bare", "instruct"])
def test_a_view_hides_the_steps_at_the_other_end(role: str, prompt: str, splits: Mapping[Split, list[Problem]]) -> None:
    """Problems that differ only in what the partner sees give the same prompt, whatever their number of steps."""
    env = RelayEnv(prompt=prompt)
    by_prompt: dict[object, list[Problem]] = {}
    for problem in splits["train"]:
        by_prompt.setdefault(env.observe(problem, role, [], role), []).append(problem)
    alike = [problems for problems in by_prompt.values() if len(problems) > 1]
    assert len(alike) > 5
    assert any(len({problem.tags["level"] for problem in problems}) == 2 for problems in alike)
    for one, other in itertools.chain.from_iterable(itertools.pairwise(problems) for problems in alike):
        mine, theirs = (slice(0, 2), slice(2, None)) if role == "first" else (slice(-2, None), slice(0, -2))
        steps, others = parse_composition(one).steps, parse_composition(other).steps
        assert steps[mine] == others[mine]
        assert steps[theirs] != others[theirs] or len(steps) != len(others)
        assert one.test != other.test


def test_what_each_role_is_shown(splits: Mapping[Split, list[Problem]]) -> None:
    problem = next(one for one in splits["train"] if one.tags["level"] == "3")
    composition = parse_composition(problem)
    names = [step.operation.name for step in composition.steps]
    first, second = see(problem, "first"), see(problem, "second")
    assert first.startswith(f"# helper\ndef {names[0]}_{names[1]}(")
    assert second.startswith(f"# helper\ndef {names[1]}_{names[2]}(")
    assert see(problem, "solo") == f"# helper\n{problem.prompt}"
    last = composition.steps[2]
    phrases = [phrase.format(k=last.constant) for phrase in last.operation.phrases]
    assert any(phrase in second for phrase in phrases)
    assert not any(phrase in first for phrase in phrases)


def test_every_convention_earns_what_it_should(sandbox: Sandbox, splits: Mapping[Split, list[Problem]]) -> None:
    problems = [*splits["train"][::25], *splits["ood"]]
    items, expected = [], []
    for problem in problems:
        length = len(parse_composition(problem).steps)
        shared = length == 3
        for end, begin, right in ((1, 1, shared), (2, 2, True), (2, 1, not shared), (1, 2, False)):
            begin = length - 3 + begin
            texts = {"first": write_part(problem, 0, end), "second": write_part(problem, begin, length)}
            if not shared:
                right = (end, begin) == (2, 2)
            items.append((problem, texts))
            expected.append(right)
        items.append((problem, {"solo": write_part(problem, 0, length)}))
        expected.append(True)
    scored, _ = score_texts(items, reward=RelayReward(), sandbox=sandbox, cache={})
    assert not any(one.masked for one in scored)
    for (problem, texts), one, right in zip(items, scored, expected, strict=True):
        assert (one.reward.total == 1.0) == right, (problem.task_id, texts)
        assert RelayReward().passed(one.reports) == right


def test_parts_have_namespaces_of_their_own(sandbox: Sandbox) -> None:
    problem = Problem("p", "def f(n):\n", "f", "def check(candidate):\n    assert candidate(3) == 106\n")
    first = "K = 100\n\n\ndef aux(n):\n    return n + aux(n - 1) if n else 0\n"
    texts = {"first": first, "second": "K = 7\n\n\ndef aux(n):\n    return n + 100"}
    [scored], _ = score_texts([(problem, texts)], reward=RelayReward(), sandbox=sandbox, cache={})
    assert scored.reward.total == 1.0
    assert chain_functions("f", ("def aux(n):\n    return n", "no code")) == ""
    assert RelayReward().price(problem, {"first": "no code", "second": ""}, {}).total == 0.0


def test_held_out_compositions(splits: Mapping[Split, list[Problem]]) -> None:
    keys = {split: {problem.tags["steps"] for problem in problems} for split, problems in splits.items()}
    assert [len(splits[split]) for split in ("train", "test", "ood")] == [240, 16, 16]
    assert not keys["train"] & (keys["test"] | keys["ood"])
    for split, problems in splits.items():
        for problem in problems:
            names = [step.operation.name for step in parse_composition(problem).steps]
            kept_out = any(is_kept_out(one, following) for one, following in itertools.pairwise(names))
            assert kept_out == (split == "ood")
    assert {problem.tags["level"] for problem in splits["test"]} == {"3", "4"}


@pytest.mark.slow
def test_a_split_larger_than_the_problems_there_are() -> None:
    with pytest.raises(ConfigError, match=r"problems.num_test: there are \d+ problems of one kind"):
        Relay(kind="relay", num_train=4, num_test=10**6, num_ood=4).load()


def past(problem: Problem) -> tuple[PastTurn, ...]:
    return (PastTurn({"first": f"text of {problem.task_id}"}, PENDING, {}),)


def test_the_second_agent_sees_the_message_of_its_partner(splits: Mapping[Split, list[Problem]]) -> None:
    problem = splits["train"][0]
    for prompt in ("bare", "instruct"):
        env = RelayInTurnEnv(prompt=prompt)
        [message] = env.observe(problem, "second", past(problem), "second").messages
        assert f"text of {problem.task_id}\n" in message.content
        silent = env.model_copy(update={"message": "none"})
        assert silent.observe(problem, "second", past(problem), "second") == RelayEnv(prompt=prompt).observe(
            problem, "second", [], "second"
        )
    assert (env.acting(0), env.acting(1)) == (("first",), ("second",))


def test_a_shuffled_message_is_never_that_of_the_own_problem(splits: Mapping[Split, list[Problem]]) -> None:
    env = RelayInTurnEnv(prompt="bare")
    starts = [
        TrajectoryStart(split, "sampled", Node(problem, (index,), past(problem), SamplingParams(), 1))
        for split in ("test", "ood")
        for problem in splits[split]
        for index in range(2)
    ]
    shuffled = shuffle_texts(starts, 3)
    assert {(start.node.problem.task_id, start.node.path) for start in shuffled} == {
        (start.node.problem.task_id, start.node.path) for start in starts
    }
    for start in shuffled:
        node = start.node
        assert node.history == past(node.problem)
        [message] = env.observe(node.problem, "second", node.seen_by("second"), "second").messages
        assert f"text of {node.problem.task_id}\n" not in message.content
        assert any(f"text of {other.task_id}\n" in message.content for other in splits[start.split])
        assert node.seen_by("first") == node.history, "an agent sees its own text"
    assert [start.node.shown for start in shuffle_texts(starts, 3)] == [start.node.shown for start in shuffled]
    assert shuffle_texts(starts[:2], 3)[0].node.seen_by("second") == starts[0].node.history


def test_a_problem_without_parts_is_refused_with_the_remedy() -> None:
    problem = Problem("yours", "def f(x):\n", "f", "")
    with pytest.raises(ConfigError, match=r"problem yours: has no part for the role 'first'.* --problem ID"):
        RelayEnv().observe(problem, "first", [], "a")


def test_rows_that_bound_a_run() -> None:
    config = load_config(str(CONFIGS / "relay_two_turns.toml"), [])
    trained = tuple(agent.model_copy(update={"start_from": Path("run") / agent.name}) for agent in config.agents)
    solo = load_config(str(CONFIGS / "relay_solo.toml"), []).agents
    single = RunTeam("solo", tuple(agent.model_copy(update={"start_from": Path("solo")}) for agent in solo))
    teams = Teams("run", RunTeam("the run", config.agents), RunTeam("run", trained), single, ())
    names = ["single_grpo", "sequential", "magrpo", "no_message", "shuffled_message"]
    table = with_baselines(config, names, teams).baselines
    rows = {row.name: row for row in table.rows}
    assert list(rows) == names
    assert not table.left_out
    assert {name: row.env.kind for name, row in rows.items()} == dict.fromkeys(names, "relay_in_turn") | {
        "single_grpo": "relay_solo"
    }
    assert rows["no_message"].env.model_dump()["message"] == "none"
    assert [name for name, row in rows.items() if row.shuffled] == ["shuffled_message"]
    one_turn = load_config(str(CONFIGS / "relay.toml"), [])
    left_out = with_baselines(one_turn, names, teams).baselines.left_out
    assert json.loads(json.dumps(left_out)) == {
        "no_message": "env 'relay' has no field 'message'",
        "shuffled_message": "the run has a single turn, so no agent sees what its partner wrote",
    }
