"""Two programmers as the nodes of a LangGraph graph: both start at once, and the graph ends when both have answered.

A whole program that knows nothing of ``magrpo``. It finds the gateway through the environment variables that OpenAI
clients read, and prints a text for each role as its last line. The nodes ask with OpenAI's client, which needs fewer
packages than ``langchain-openai``.

Run it in a virtual environment of its own::

    python -m venv graphs && graphs/bin/pip install --no-deps -r requirements/examples.txt
    magrpo train embedded_program env.concurrency=8 \\
        'env.run="graphs/bin/python pipelines/examples/coop_langgraph.py {problem_file}"'
"""

import asyncio
import json
import operator
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypedDict

from langgraph.graph import END, START, StateGraph
from openai import AsyncOpenAI

ROLES = ("helper", "main")


class State(TypedDict):
    """What the nodes read and write; the texts that they return are merged."""

    prompt: str
    texts: Annotated[dict[str, str], operator.or_]


def make_node(role: str, client: AsyncOpenAI) -> Callable[[State], Awaitable[dict[str, dict[str, str]]]]:
    """A node that asks one agent."""

    async def ask_agent(state: State) -> dict[str, dict[str, str]]:
        completion = await client.chat.completions.create(
            model=role, messages=[{"role": "user", "content": f"# {role}\n{state['prompt']}"}]
        )
        return {"texts": {role: completion.choices[0].message.content or ""}}

    return ask_agent


async def solve(prompt: str) -> dict[str, str]:
    """Run the graph; returns the text of each role."""
    graph = StateGraph(State)
    async with AsyncOpenAI() as client:
        for role in ROLES:
            graph.add_node(role, make_node(role, client))
            graph.add_edge(START, role)
            graph.add_edge(role, END)
        state = await graph.compile().ainvoke({"prompt": prompt, "texts": {}})
    texts: dict[str, str] = state["texts"]
    return texts


if __name__ == "__main__":
    problem = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps(asyncio.run(solve(problem["prompt"]))))
