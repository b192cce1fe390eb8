from __future__ import annotations

import pytest

from magrpo.envs.coding import TeamEnv
from magrpo.types import Message, Problem

PROBLEM = Problem("t/0", 'def f(xs):\n    """Sum."""\n', "f")


def test_all_act_at_once_and_once() -> None:
    env = TeamEnv(num_helpers=3)
    assert env.roles() == env.acting(0) == ("helper1", "helper2", "helper3", "main")
    assert env.num_turns == 1


@pytest.mark.parametrize(("role", "heading"), [("helper1", "helper"), ("helper2", "helper"), ("main", "main")])
def test_bare_prompts_are_those_of_two_agents(role: str, heading: str) -> None:
    seen = TeamEnv(prompt="bare").observe(PROBLEM, role, [], "ada")
    assert seen.messages == (Message("user", f"# {heading}\n{PROBLEM.prompt}"),)


def test_instructions_name_the_own_function() -> None:
    env = TeamEnv()
    system, task = env.observe(PROBLEM, "helper2", [], "ada").messages
    assert "one of 3 programmers" in system.content
    assert "You are helper 2." in system.content
    assert task.content.endswith("Write the function `aux`.")
    system, task = env.observe(PROBLEM, "main", [], "bob").messages
    assert "You write the function `f`." in system.content
    assert task.content.endswith("Write the function `f`.")
