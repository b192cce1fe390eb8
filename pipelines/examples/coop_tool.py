"""Two programmers, one of whom has a tool: ``main`` sees its draft run in the sandbox, and may write it once more.

``agents.run_code`` runs code in the sandbox of the training run, under the same limits as the reward's programs, so a
program never runs what a model wrote in its own process. Here the program calls the tool whenever ``main`` has written
a draft. A model that writes tool calls may decide for itself: pass ``tools`` to ``chat.completions.create`` and call
``agents.run_code`` for each of the ``tool_calls`` in its answer.

``main`` is asked once or twice, so the number of calls differs from episode to episode. Run it::

    magrpo train embedded_program env.run=pipelines.examples.coop_tool:solve
"""

from magrpo.gateway.agents import Agents
from magrpo.types import Problem

MAX_DRAFTS = 2


def run_tests(problem: Problem, texts: dict[str, str], agents: Agents) -> bool:
    """Whether the program of both texts passes the tests that agents may see."""
    source = f"{texts['helper']}\n\n{texts['main']}"
    report = agents.run_code(source, problem.entry_point, problem.test)
    return bool(report["status"] == "pass")


def solve(problem: Problem, agents: Agents) -> dict[str, str]:
    """Ask ``helper``, then ``main`` until its draft passes the tests, at most twice; the last draft counts."""
    texts = {"helper": agents["helper"].ask(f"# helper\n{problem.prompt}")}
    for _ in range(MAX_DRAFTS):
        texts["main"] = agents["main"].ask(f"# main\n{problem.prompt}")
        if run_tests(problem, texts, agents):
            break
    return texts
