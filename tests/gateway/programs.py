"""Programs that tests play by name: the fork server imports this module, so it loads no library."""

from magrpo.gateway.agents import Agents
from magrpo.types import Problem


def ask_both(problem: Problem, agents: Agents) -> dict[str, str]:
    """Ask ``main`` what ``helper`` has answered."""
    helped = agents["helper"].ask(problem.task_id)
    return {"helper": helped, "main": agents["main"].ask(f"{problem.task_id} {helped}")}
