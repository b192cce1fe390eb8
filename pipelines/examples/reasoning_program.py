"""Two agents answer questions of reasoning-gym: ``solver`` answers, and ``checker`` corrects the answer.

The reward is the verdict of the task's own checker, from 0 to 1, on the last line that ``checker`` writes. Run it with
the extra ``reasoning``, a chat model and a configuration like this one::

    problems.kind = "reasoning_gym"
    problems.tasks = ["chain_sum", "letter_counting", "syllogism"]
    env.kind = "program"
    env.run = "pipelines.examples.reasoning_program:solve"
    reward.kind = "returned"
"""

from magrpo.gateway.agents import Agents
from magrpo.problems.reasoning_gym import score_answer
from magrpo.types import Problem

SOLVE = """{question}

Think step by step. Write the answer alone on the last line."""
CHECK = """{question}

A colleague answers:
{draft}

Check the answer and correct it if it is wrong. Write the final answer alone on the last line."""


def solve(problem: Problem, agents: Agents) -> float:
    """Ask ``solver``, then ``checker``; returns the score of the final answer."""
    draft = agents["solver"].ask(SOLVE.format(question=problem.prompt))
    final = agents["checker"].ask(CHECK.format(question=problem.prompt, draft=draft))
    answer = final.strip().rpartition("\n")[2].strip()
    return score_answer(problem, answer)
