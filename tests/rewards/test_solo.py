from __future__ import annotations

import pytest

from magrpo.interfaces import Sandbox
from magrpo.problems.coopcode import make_problem
from magrpo.problems.operations import Composition, parse_operation
from magrpo.rewards.coding import SOLO_MAXIMA, SoloReward
from magrpo.stages.score import score_texts
from magrpo.types import Case, CaseStatus, ExecutionReport, Problem

PROBLEM = Problem("t/0", 'import math\n\ndef f(xs):\n    """Sum."""\n', "f", "def check(candidate): ...")
REWARD = SoloReward()


def parts(
    text: str,
    passed: int | None = None,
    forgeable: bool = False,
    compiles: bool = True,
    reward: SoloReward = REWARD,
) -> list[float]:
    """The parts under a report of four cases; ``passed`` None: nothing may be run."""
    reports: dict[str, ExecutionReport] = {}
    wanted = reward.executions(PROBLEM, {"solo": text}, reports)
    assert list(wanted) == ([] if passed is None else ["program"])
    if passed is not None:
        cases = (Case("pass"),) * passed + (Case("wrong"),) * (4 - passed)
        status: CaseStatus = "pass" if passed == 4 else "wrong"
        reports["program"] = ExecutionReport(status, cases, "none", forgeable=forgeable, compiles=compiles)
        assert not reward.executions(PROBLEM, {"solo": text}, reports)
        assert reward.passed(reports) == (passed == 4 and not (forgeable and reward.refuse_forgeable))
    price = reward.price(PROBLEM, {"solo": text}, reports)
    assert price.total == reward.scale * sum(price.parts.values()) + reward.shift
    return [price.parts[name] for name in SOLO_MAXIMA]


def test_each_part_by_hand() -> None:
    assert parts("no code") == [0.0, 0.0, 0.0]
    assert parts("def g(xs):\n    return 1") == [0.0, 0.0, 0.0]
    assert parts("def f(xs):\n    pass") == [0.0, 0.0, 0.0]
    assert parts("def f(xs):\n    return 1\nbreak", passed=0, compiles=False) == [1.0, 0.0, 0.0]
    assert parts("def f(xs):\n    return 1", passed=0) == [1.0, 0.5, 0.0]
    assert parts("def f(xs):\n    return 1", passed=3) == [1.0, 0.5, 0.75]
    assert parts("def aux(xs):\n    return 1\ndef f(xs):\n    return aux(xs)", passed=4) == [1.0, 0.5, 1.0]
    assert parts("    return sum(xs)", passed=4) == [1.0, 0.5, 1.0]
    assert parts("f = sum", passed=4) == [0.0, 0.5, 1.0]


def test_maxima_scale_and_forgeable_reports() -> None:
    assert REWARD.fraction(2.5) == 1.0
    assert parts("def f(xs):\n    return 1", 4, reward=SoloReward(scale=2.0, shift=-1.0)) == [1.0, 0.5, 1.0]
    assert parts("def f(xs):\n    return 1", 4, forgeable=True) == [1.0, 0.5, 0.0]
    trusting = SoloReward(refuse_forgeable=False)
    assert parts("def f(xs):\n    return 1", 4, forgeable=True, reward=trusting) == [1.0, 0.5, 1.0]


def test_the_program_holds_the_preamble_and_the_helpers_of_the_text() -> None:
    text = "def aux(xs):\n    return math.fsum(xs)\n\ndef f(xs):\n    return aux(xs)"
    (program,) = REWARD.executions(PROBLEM, {"solo": text}, {}).values()
    assert program.source.startswith("import math")
    assert "def aux" in program.source
    assert program.test.startswith("import math")
    assert (program.entry_point, program.watch) == ("f", "")


def test_a_failed_sandbox_has_no_price() -> None:
    reports = {"program": ExecutionReport("infra_error", (), "none")}
    with pytest.raises(AssertionError, match="mask the turn"):
        REWARD.price(PROBLEM, {"solo": "def f(xs):\n    return 1"}, reports)


def test_the_canonical_solution_gets_everything_in_the_sandbox(sandbox: Sandbox) -> None:
    problem = make_problem(Composition((parse_operation("above:3"), parse_operation("total"))), "train")
    assert problem is not None
    texts = {"solo": problem.prompt + problem.canonical_solution}
    (scored,), _ = score_texts([(problem, texts)], reward=REWARD, sandbox=sandbox, cache={})
    assert scored.reward.parts == SOLO_MAXIMA


def test_an_example_below_the_signature_does_not_hinder_a_right_answer(sandbox: Sandbox) -> None:
    prompt = 'def add(a, b):\n    """Add."""\n\nresult = add(1, 2)\n'
    problem = Problem("t/1", prompt, "add", "def check(candidate):\n    assert candidate(1, 2) == 3")
    texts = {"solo": "def add(a, b):\n    return a + b"}
    (scored,), _ = score_texts([(problem, texts)], reward=REWARD, sandbox=sandbox, cache={})
    assert scored.reward.parts["tests"] == 1.0
