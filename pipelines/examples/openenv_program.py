"""An OpenEnv environment on a server: the agents take turns at writing its actions.

``OPENENV_URL`` in the environment of ``magrpo train`` is the address of the server. The episode is a session of
``/ws``, because the routes ``/reset`` and ``/step`` make a new environment for every request. ``/schema`` says what an
action consists of; this program fills its first required field, which must be a text. The reward is the mean reward of
a step, so ``reward.maxima`` must hold the largest reward of a step if that is not 1.

The client is aiohttp, which is a dependency of ``magrpo``. Start a server that allows as many sessions at once as
``env.concurrency``, and run with a configuration like this one::

    problems.kind = "pipelines.examples.numbered_tasks:NumberedTasks"
    env.kind = "program"
    env.run = "pipelines.examples.openenv_program:solve"
    reward.kind = "returned"
"""

import asyncio
import json
import os
from typing import Any

import aiohttp

from magrpo.gateway.agents import Agents
from magrpo.types import Problem

MAX_STEPS = 8


async def send(env: aiohttp.ClientWebSocketResponse, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Send a message of the OpenEnv protocol; returns the data of the answer: observation, reward, done."""
    await env.send_json({"type": kind, "data": data})
    answer = await env.receive_json()
    if answer["type"] == "error":
        raise RuntimeError(f"the environment refused {kind}: {answer['data']}")
    state: dict[str, Any] = answer["data"]
    return state


async def solve(problem: Problem, agents: Agents) -> float:
    """Play one episode, seeded with the number of the problem; returns the mean reward of a step."""
    url = os.environ["OPENENV_URL"].rstrip("/")
    rewards: list[float] = []
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/schema") as answer:
            field = (await answer.json())["action"]["required"][0]
        async with http.ws_connect(f"{url}/ws") as env:
            state = await send(env, "reset", {"seed": int(problem.prompt)})
            while not state["done"] and len(rewards) < MAX_STEPS:
                agent = agents[agents.names[len(rewards) % len(agents)]]
                text = await asyncio.to_thread(agent.ask, json.dumps(state["observation"]))
                state = await send(env, "step", {field: text})
                rewards.append(float(state["reward"] or 0.0))
    return sum(rewards) / len(rewards)
