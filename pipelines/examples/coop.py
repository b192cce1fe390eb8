"""Two programmers at once: ``helper`` writes a function ``aux``, ``main`` the function that the problem asks for."""

from concurrent.futures import ThreadPoolExecutor

from magrpo.gateway.agents import Agents
from magrpo.types import Problem

ROLES = ("helper", "main")


def solve(problem: Problem, agents: Agents) -> dict[str, str]:
    """Ask both agents at the same time; the reward joins their texts to one program and tests it."""
    with ThreadPoolExecutor(len(ROLES)) as pool:
        texts = pool.map(lambda role: agents[role].ask(f"# {role}\n{problem.prompt}"), ROLES)
        return dict(zip(ROLES, texts, strict=True))
