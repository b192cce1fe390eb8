from __future__ import annotations

import pytest
from pydantic import ValidationError

from magrpo.envs.coding import SequentialEnv
from magrpo.types import PENDING, Case, ExecutionReport, JointReward, Message, PastTurn, Problem

PROBLEM = Problem("t/0", 'def f(xs):\n    """Sum."""\n', "f")
AUX, MAIN = "def aux(xs): return 1", "def f(xs): return aux(xs)"
PARTS = {"structure": 1.0, "syntax": 0.5, "tests": 0.0, "cooperation": 0.0}
REPORT = ExecutionReport("wrong", (Case("wrong", "f([]) == 0, got 1"),), "none", watched_calls=1)
ROUND = [PastTurn({"ada": AUX}, PENDING, {}), PastTurn({"bob": MAIN}, JointReward(1.5, PARTS), {"program": REPORT})]


def test_the_helper_begins_and_they_take_turns() -> None:
    env = SequentialEnv(num_turns=4)
    assert [env.acting(turn) for turn in range(4)] == [("helper",), ("main",)] * 2
    assert SequentialEnv().num_turns == 2
    with pytest.raises(ValidationError, match="multiple of 2"):
        SequentialEnv(num_turns=3)


def test_main_sees_the_helpers_code_and_the_helper_nothing() -> None:
    env = SequentialEnv(prompt="bare")
    assert env.observe(PROBLEM, "helper", [], "ada").messages == (Message("user", f"# helper\n{PROBLEM.prompt}"),)
    (message,) = env.observe(PROBLEM, "main", ROUND[:1], "bob").messages
    assert message.content == f"# partner\n{AUX}\n# main\n{PROBLEM.prompt}"


def test_in_the_second_round_both_get_feedback_and_main_sees_the_newest_code() -> None:
    env = SequentialEnv(prompt="bare", num_turns=4)
    (message,) = env.observe(PROBLEM, "helper", ROUND, "ada").messages
    feedback = "# feedback\nno tests pass\nwrong answer\n"
    assert message.content == f"# helper\n{PROBLEM.prompt}\n# previous\n{AUX}\n{feedback}"
    newer = [*ROUND, PastTurn({"ada": "def aux(xs): return 0"}, JointReward(0.0, PARTS), {})]
    (message,) = env.observe(PROBLEM, "main", newer, "bob").messages
    expected = f"# partner\ndef aux(xs): return 0\n# main\n{PROBLEM.prompt}\n# previous\n{MAIN}\n{feedback}"
    assert message.content == expected


def test_instructions() -> None:
    system, task = SequentialEnv().observe(PROBLEM, "main", ROUND[:1], "bob").messages
    assert "one after the other" in system.content
    assert "`f`" in system.content
    assert task.content.endswith(f"Your partner wrote:\n```python\n{AUX}\n```")
    system, task = SequentialEnv().observe(PROBLEM, "helper", [], "ada").messages
    assert "You begin" in system.content
    assert "partner wrote" not in task.content
