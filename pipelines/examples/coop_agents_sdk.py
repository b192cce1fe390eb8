"""Two programmers with the OpenAI Agents SDK: ``helper`` drafts a function and hands off to ``main``.

A whole program that knows nothing of ``magrpo``: it finds the gateway through the environment variables that OpenAI
clients read, and prints a text for each role as its last line. Chat completions are the form that the gateway speaks,
and tracing is off because it would send every episode to OpenAI.

The SDK makes a hand-off when the model writes the tool call ``transfer_to_main``. The embedded base model cannot write
tool calls, but it begins its drafts with ``def``: the response template ``hand_off.json`` reads such a draft as that
tool call, with the draft as its argument. Leave ``env.response_template`` out for a model that writes tool calls.

Run it in a virtual environment of its own::

    python -m venv sdk && sdk/bin/pip install --no-deps -r requirements/examples.txt
    magrpo train embedded_program env.concurrency=8 env.response_template=pipelines/examples/hand_off.json \\
        'env.run="sdk/bin/python pipelines/examples/coop_agents_sdk.py {problem_file}"'
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agents import Agent, HandoffInputData, OpenAIChatCompletionsModel, Runner, handoff, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel


class Draft(BaseModel):
    """The argument of the hand-off."""

    code: str


async def solve(prompt: str) -> dict[str, str]:
    """Run the agents; returns the text of each role, empty for one that was not asked."""
    texts = {"helper": "", "main": ""}

    def keep_draft(_: Any, draft: Draft) -> None:
        texts["helper"] = draft.code

    def ask_main(data: HandoffInputData) -> HandoffInputData:
        """What ``main`` sees: its own prompt instead of the conversation with ``helper``."""
        return data.clone(input_history=f"# main\n{prompt}", pre_handoff_items=(), new_items=())

    async with AsyncOpenAI() as client:
        main = Agent("main", model=OpenAIChatCompletionsModel("main", client))
        to_main = handoff(main, input_type=Draft, on_handoff=keep_draft, input_filter=ask_main)
        helper = Agent("helper", model=OpenAIChatCompletionsModel("helper", client), handoffs=[to_main])
        result = await Runner.run(helper, f"# helper\n{prompt}")
    texts[result.last_agent.name] = result.final_output
    return texts


if __name__ == "__main__":
    set_tracing_disabled(True)
    problem = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps(asyncio.run(solve(problem["prompt"]))))
