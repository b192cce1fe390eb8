"""Programs that tests play by name: the fork server imports this module, so it loads no library."""

import json
import os
import time
from contextlib import suppress
from http.client import HTTPConnection
from urllib.parse import urlsplit

from magrpo.gateway.agents import Agents, GatewayRefused
from magrpo.types import Problem


def ask_both(problem: Problem, agents: Agents) -> dict[str, str]:
    """Ask ``main`` what ``helper`` has answered."""
    helped = agents["helper"].ask(problem.task_id)
    return {"helper": helped, "main": agents["main"].ask(f"{problem.task_id} {helped}")}


FAULTS = ("crash", "hang", "malformed", "drop", "retry")


def plan_fault(number: int) -> str:
    """The fault of an episode, by the number of its problem: one in twenty has one, each kind in turn."""
    return FAULTS[number // 20 % len(FAULTS)] if number % 20 == 0 else ""


def misbehave(problem: Problem, agents: Agents) -> dict[str, str]:
    """Ask both agents; one episode in twenty first does what :func:`plan_fault` says."""
    fault = plan_fault(int(problem.task_id.rpartition("/")[2]))
    agent = agents["helper"]
    parts = urlsplit(f"{agent.base_url}/chat/completions")
    body = json.dumps({"model": "helper", "messages": [{"role": "user", "content": "again"}], "stream": True})
    if fault == "crash":
        os.abort()
    if fault == "hang":
        time.sleep(3600)
    if fault == "malformed":
        with suppress(GatewayRefused):
            agent.ask("text", max_tokens="many")
    if fault == "drop":
        connection = HTTPConnection(parts.hostname or "", parts.port)
        connection.request("POST", parts.path, body)
        connection.getresponse().read(10)
        connection.close()
    if fault == "retry":
        for count in range(2):
            connection = HTTPConnection(parts.hostname or "", parts.port)
            connection.request("POST", parts.path, body, {"x-stainless-retry-count": str(count)})
            connection.getresponse().read()
            connection.close()
    return ask_both(problem, agents)
