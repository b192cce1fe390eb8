from __future__ import annotations

from pathlib import Path

import pytest

from magrpo.config.run import load_config
from magrpo.envs.coding import SoloEnv
from magrpo.envs.diagnosis import BARE_LINES
from magrpo.types import Case, ExecutionReport, JointReward, Message, PastTurn, Problem

CONFIGS = Path(__file__).parents[2] / "pipelines" / "configs"
PROBLEM = Problem("t/0", 'def f(xs):\n    """Sum."""\n', "f", "def check(candidate): ...", "    return sum(xs)\n")
TEXT = "def f(xs): return 0"


def past(structure: float, syntax: float, tests: float, *cases: Case) -> PastTurn:
    parts = {"structure": structure, "syntax": syntax, "tests": tests}
    reports = {"program": ExecutionReport(cases[-1].status, cases, "namespaces")} if cases else {}
    return PastTurn({"ada": TEXT}, JointReward(sum(parts.values()), parts), reports)


NOTHING, BROKEN = past(0.0, 0.0, 0.0), past(1.0, 0.0, 0.0)
HALF = past(1.0, 0.5, 0.5, Case("pass"), Case("wrong", "f([1]) == 1, got 0"))
GOOD = past(1.0, 0.5, 1.0, Case("pass"), Case("pass"))


def test_the_first_turn_is_the_problem() -> None:
    assert SoloEnv().roles() == ("solo",)
    bare = SoloEnv(prompt="bare").observe(PROBLEM, "solo", [], "ada")
    assert bare.messages == (Message("user", f"# main\n{PROBLEM.prompt}"),)
    system, user = SoloEnv().observe(PROBLEM, "solo", [], "ada").messages
    assert (system.role, user.role) == ("system", "user")
    assert PROBLEM.prompt.rstrip() in user.content


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (NOTHING, "Your answer holds no complete function `f` that returns a value."),
        (BROKEN, "does not compile"),
        (HALF, "1 of 2 tests passed.\n- wrong: f([1]) == 1, got 0"),
        (GOOD, "2 of 2 tests passed."),
    ],
)
def test_level_feedback_speaks_of_the_program_alone(turn: PastTurn, said: str) -> None:
    messages = SoloEnv(num_turns=2).observe(PROBLEM, "solo", [turn], "ada").messages
    assert messages[-2] == Message("assistant", TEXT)
    assert said in messages[-1].content
    assert not [word for word in ("aux", "partner", "divide") if word in messages[-1].content]


def test_tests_can_be_kept_out_of_the_feedback() -> None:
    said = SoloEnv(feedback_tests=0).observe(PROBLEM, "solo", [HALF], "ada").messages[-1].content
    assert "got 0" not in said
    assert "got 0" in SoloEnv(feedback_tests="all").observe(PROBLEM, "solo", [HALF], "ada").messages[-1].content


@pytest.mark.parametrize("feedback", ["level_feedback", "passed", "plain"])
@pytest.mark.parametrize("turn", [NOTHING, BROKEN, HALF, GOOD])
def test_bare_feedback_keeps_to_the_closed_vocabulary(feedback: str, turn: PastTurn) -> None:
    env = SoloEnv.model_validate({"prompt": "bare", "feedback": feedback})
    (message,) = env.observe(PROBLEM, "solo", [turn], "ada").messages
    head, _, said = message.content.partition("# feedback\n")
    assert head == f"# main\n{PROBLEM.prompt}\n# previous\n{TEXT}\n"
    assert said.splitlines()
    assert set(said.splitlines()) <= {*BARE_LINES}
    assert "aux" not in said


def test_its_configuration_differs_from_that_of_two_agents_in_who_writes_only() -> None:
    solo, pair = (load_config(CONFIGS / name) for name in ("embedded_grpo.toml", "embedded.toml"))
    assert [agent.role for agent in solo.agents] == ["solo"]
    for section in ("problems", "sandbox", "engine", "model", "lora", "algo", "optim", "train", "eval"):
        assert getattr(solo, section) == getattr(pair, section), section
    assert solo.rollout == pair.rollout.model_copy(update={"joint_mode": "aligned"}), "one agent has nobody to cross"
