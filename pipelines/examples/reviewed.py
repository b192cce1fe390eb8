"""Two programmers whose work another model reviews before they revise it.

The reviewer is no agent: it is any model behind an OpenAI-compatible address, and is not trained.

    REVIEWER_URL=http://127.0.0.1:8000/v1 REVIEWER_MODEL=wise magrpo train mine.toml     # env.run as below
    run = "pipelines.examples.reviewed:solve"
"""

import os
from concurrent.futures import ThreadPoolExecutor

from magrpo.gateway.agents import Agent, Agents
from magrpo.types import Problem

TASKS = {"helper": "a helper function `aux`", "main": "the function that the problem asks for; it may call `aux`"}
REVIEW = """\
The problem:
{problem}

The helper's answer:
{helper}

The other's answer:
{main}

Propose edits to both functions, as a short list of changes. Do not write whole functions."""


def solve(problem: Problem, agents: Agents) -> dict[str, str]:
    """Ask both agents, have the reviewer read what they wrote, and ask them again."""
    messages = {
        role: [{"role": "user", "content": f"{problem.prompt}\nWrite {task}. Python code only."}]
        for role, task in TASKS.items()
    }

    def ask(role: str) -> str:
        return agents[role].ask(messages[role])

    with ThreadPoolExecutor(len(TASKS)) as pool:
        texts = dict(zip(TASKS, pool.map(ask, TASKS), strict=True))
        reviewer = Agent(os.environ["REVIEWER_URL"], os.environ.get("REVIEWER_KEY", ""), os.environ["REVIEWER_MODEL"])
        review = reviewer.ask(REVIEW.format(problem=problem.prompt, **texts), temperature=0)
        for role, text in texts.items():
            request = f"A reviewer proposes:\n{review}\nRevise your function. Python code only."
            messages[role] += [{"role": "assistant", "content": text}, {"role": "user", "content": request}]
        return dict(zip(TASKS, pool.map(ask, TASKS), strict=True))
