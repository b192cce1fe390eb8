from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from magrpo.config.agents import AgentConfig
from magrpo.errors import ConfigError
from magrpo.stages import backend
from magrpo.stages.backend import Cache, ScoreStats, Team
from magrpo.stages.score import score, score_texts
from magrpo.types import (
    PENDING,
    Action,
    Case,
    CaseStatus,
    Execution,
    ExecutionReport,
    JointReward,
    PastTurn,
    Problem,
    RolloutGroup,
    Turn,
)
from tests.fakes import LengthEnv, PassReward, ScriptedSandbox

AGENTS = [AgentConfig(name=name, role=role, model="m") for name, role in (("alice", "helper"), ("bob", "main"))]
PROBLEM = Problem("t/0", "p", "f", "test")
NOTHING = {"first": 0.0, "second": 0.0}
"""The parts of a joint action that earned nothing."""


def test_the_reward_is_asked_until_it_wants_nothing_more() -> None:
    sandbox = ScriptedSandbox(lambda execution: "pass" if "good" in execution.source else "wrong")
    items = [(PROBLEM, {"helper": "a", "main": "good"}), (PROBLEM, {"helper": "a", "main": "bad"})]
    (good, bad), stats = score_texts(items, reward=PassReward(), sandbox=sandbox, cache={})
    assert (good.reward.total, bad.reward.total) == (2.0, 0.0)
    assert [len(batch) for batch in sandbox.batches] == [2, 1]
    assert set(good.reports) == {"first", "second"}
    assert stats.metrics()["sandbox/executions"] == 3


def test_identical_programs_run_once_in_a_run() -> None:
    sandbox = ScriptedSandbox(lambda _: "pass")
    cache: Cache = {}
    items = [(PROBLEM, {"helper": "", "main": "x"})] * 3
    for _ in range(2):
        priced, stats = score_texts(items, reward=PassReward(), sandbox=sandbox, cache=cache)
        assert [p.reward.total for p in priced] == [2.0] * 3
    # The helper is empty, so both executions of the reward are the same program.
    assert [len(batch) for batch in sandbox.batches] == [1]
    assert stats.metrics()["sandbox/reused_frac"] == 1.0


def test_a_run_keeps_so_many_reports_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MAX_REPORTS", 4)
    sandbox = ScriptedSandbox(lambda _: "wrong")
    cache: Cache = {}
    items = [(PROBLEM, {"helper": "", "main": str(number)}) for number in range(10)]
    for _ in range(2):
        priced, _ = score_texts(items, reward=PassReward(), sandbox=sandbox, cache=cache)
        assert [report.status for one in priced for report in one.reports.values()] == ["wrong"] * 10
        assert len(cache) == 2, "the newest, half as many, so that it is not done each time"
    assert [len(batch) for batch in sandbox.batches] == [10, 8]


def test_a_failure_of_the_sandbox_masks_and_is_tried_again_next_time() -> None:
    statuses = iter(["infra_error", "pass", "pass"])
    sandbox = ScriptedSandbox(lambda _: next(statuses))
    cache: Cache = {}
    items = [(PROBLEM, {"helper": "h", "main": "m"})]
    (failed,), stats = score_texts(items, reward=PassReward(), sandbox=sandbox, cache=cache)
    assert failed.masked
    assert stats.metrics()["sandbox/infra_error_frac"] == 1.0
    (fine,), _ = score_texts(items, reward=PassReward(), sandbox=sandbox, cache=cache)
    assert not fine.masked
    assert fine.reward.total == 2.0


def test_a_test_that_cannot_be_run_masks_is_not_tried_again_and_names_the_problem(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sandbox = ScriptedSandbox(lambda execution: "test_error" if execution.test == "import pytest" else "pass")
    cache: Cache = {}
    faulty = [replace(PROBLEM, task_id=f"faulty/{k}", test="import pytest") for k in range(2)]
    items = [(problem, {"helper": "h", "main": "m"}) for problem in (*faulty, PROBLEM)]
    priced, stats = score_texts(items, reward=PassReward(), sandbox=sandbox, cache=cache)
    assert [price.masked for price in priced] == [True, True, False]
    assert stats.metrics()["sandbox/infra_error_frac"] == 0.0
    assert stats.metrics()["sandbox/test_error_frac"] > 0.0
    assert "faulty/0" in caplog.text
    assert "(and 1 more problems)" in caplog.text
    number = len(sandbox.batches)
    score_texts(items, reward=PassReward(), sandbox=sandbox, cache=cache)
    assert len(sandbox.batches) == number


@pytest.mark.parametrize(
    ("price", "message"),
    [
        (JointReward(math.nan, NOTHING), "total = nan"),
        (JointReward(1.0, NOTHING | {"second": math.inf}), "second = inf"),
        (JointReward(1.0, NOTHING, {"helper": -math.inf}), "helper = -inf"),
        (JointReward(1e300, NOTHING), r"total = 1e\+300"),
    ],
)
def test_a_reward_that_is_not_finite_is_refused_with_its_problem(price: JointReward, message: str) -> None:
    class Priced(PassReward):
        def price(self, problem: Problem, *_: object) -> JointReward:
            return price if problem.task_id == "t/1" else JointReward(0.0, NOTHING)

    problems = [PROBLEM, replace(PROBLEM, task_id="t/1")]
    items = [(problem, {"helper": "h", "main": "m"}) for problem in problems]
    with pytest.raises(ConfigError, match=f"reward: {message} for problem 't/1'"):
        score_texts(items, reward=Priced(), sandbox=ScriptedSandbox(lambda _: "pass"), cache={})


def test_statistics_count_a_program_once_for_each_status_among_its_cases_and_no_faults_of_variants() -> None:
    cases: list[tuple[CaseStatus, ...]] = [("pass",), ("wrong", "timeout", "timeout"), ("crash", "timeout")]
    cases.append(("memory",))
    ran = {
        Execution(str(k), "f", ""): ExecutionReport(statuses[0], tuple(map(Case, statuses)), level, forgeable=k == 3)
        for k, (statuses, level) in enumerate(zip(cases, ["namespaces"] * 3 + ["landlock"], strict=True))
    }
    cases_of_variant = tuple(map(Case, ("timeout", "crash", "memory")))
    ran[Execution("v", "f", "", variant_of="0")] = ExecutionReport(
        "timeout", cases_of_variant, "namespaces", forgeable=True
    )
    stats = ScoreStats(wanted=4, seconds=1.0, ran=dict(list(ran.items())[:2]))
    assert stats.metrics()["sandbox/level"] == 3.0
    stats.add(ScoreStats(wanted=6, seconds=1.5, ran=dict(list(ran.items())[2:])))
    assert stats.metrics() == pytest.approx(
        {
            "sandbox/executions": 5.0,
            "sandbox/reused_frac": 0.5,
            "sandbox/candidates_per_s": 2.0,
            "sandbox/timeout_frac": 0.5,
            "sandbox/crash_frac": 0.25,
            "sandbox/memory_frac": 0.25,
            "sandbox/infra_error_frac": 0.0,
            "sandbox/test_error_frac": 0.0,
            "sandbox/forgeable_frac": 0.25,
            "sandbox/level": 1.0,
        }
    )
    assert "sandbox/level" not in ScoreStats().metrics(), "nothing ran at any level"


class LocalReward(PassReward):
    """Gives main something beside the joint reward."""

    def price(self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]) -> JointReward:
        return replace(super().price(problem, texts, reports), local={"main": 0.25})


def test_groups_keep_their_order_and_texts_go_by_role() -> None:
    def action(agent: str, text: str) -> Action:
        return Action(agent, text, (1,), (0.0,), "stop", 0)

    actions = {
        "alice": (action("alice", "h0"), action("alice", "h1")),
        "bob": (action("bob", "m0"), action("bob", "m1")),
    }
    group = RolloutGroup(PROBLEM, (), (), {}, actions, (Turn({"alice": 0, "bob": 1}), Turn({"alice": 1, "bob": 0})))
    sandbox = ScriptedSandbox(lambda execution: "pass" if execution.source == "h0m1" else "wrong")
    (out,), _ = score([group], Team(AGENTS, LengthEnv(), LocalReward()), sandbox, cache={})
    assert [turn.reward.parts["first"] for turn in out.turns] == [1.0, 0.0]
    assert [turn.reward.local for turn in out.turns] == [{"bob": 0.25}] * 2
    assert [turn.picks for turn in out.turns] == [turn.picks for turn in group.turns]


def test_the_reward_sees_what_every_role_wrote_last_and_nothing_before_all_have() -> None:
    sandbox = ScriptedSandbox(lambda execution: "pass" if execution.source in ("h1m0", "m0") else "wrong")

    def node(agent: str, texts: tuple[str, ...], *history: PastTurn) -> RolloutGroup[Turn]:
        actions = {agent: tuple(Action(agent, text, (1,), (0.0,), "stop", 0) for text in texts)}
        turns = tuple(Turn({agent: i}) for i in range(len(texts)))
        return RolloutGroup(PROBLEM, (0,) * len(history), history, {}, actions, turns)

    groups = [node("alice", ("h0", "h1")), node("bob", ("m0", "m1"), PastTurn({"alice": "h1"}, PENDING, {}))]
    (waiting, whole), stats = score(groups, Team(AGENTS, LengthEnv(), PassReward()), sandbox, cache={})
    assert [(turn.reward, turn.reports, turn.masked) for turn in waiting.turns] == [(PENDING, {}, False)] * 2
    assert [turn.reward.total for turn in whole.turns] == [2.0, 0.0]
    assert stats.wanted == 3
