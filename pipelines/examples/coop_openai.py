"""Two programmers at once, asked by OpenAI's own client.

Does what ``coop.py`` does with the client that most existing programs use. Every agent comes with a base URL, a key and
a model name, which is all that an OpenAI client needs. The client asks again after a failed request; the gateway
answers such a retry with the first completion, so that no completion is counted twice.

Run it with the extra ``openai``::

    magrpo train embedded_program env.run=pipelines.examples.coop_openai:solve
"""

import asyncio

from magrpo.gateway.agents import Agent, Agents
from magrpo.types import Problem

ROLES = ("helper", "main")


async def ask_agent(agent: Agent, prompt: str) -> str:
    """The text of the agent's answer to one user message."""
    async with agent.async_client() as client:
        completion = await client.chat.completions.create(
            model=agent.model, messages=[{"role": "user", "content": prompt}]
        )
    text: str | None = completion.choices[0].message.content
    return text or ""


async def solve(problem: Problem, agents: Agents) -> dict[str, str]:
    """Ask both agents at the same time; the reward joins their texts to one program and tests it."""
    texts = await asyncio.gather(*(ask_agent(agents[role], f"# {role}\n{problem.prompt}") for role in ROLES))
    return dict(zip(ROLES, texts, strict=True))
