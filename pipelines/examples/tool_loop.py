"""An agent that uses a tool by itself: it asks for a multiplication, reads the result, and answers.

The model writes tool calls in the form that its chat template describes, and the gateway reads them. The chat template
of Qwen2.5-Coder describes the Hermes form, but the small models write the JSON of the call without its tags, bare or in
a Markdown block; the response template ``qwen_coder.json`` reads all three. Run it with a configuration like this one::

    problems.kind = "pipelines.examples.numbered_tasks:NumberedTasks"
    [[agents]]
    name = "clerk"
    model = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    [env]
    kind = "program"
    run = "pipelines.examples.tool_loop:solve"
    response_template = "pipelines/examples/qwen_coder.json"
    [reward]
    kind = "returned"
    maxima = {called = 0.5, correct = 1.0}
"""

import json
import random
from typing import Any

from magrpo.gateway.agents import Agents
from magrpo.types import Problem

MULTIPLY: Any = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
MAX_CALLS = 3


def multiply(arguments: str) -> str:
    """The result of the tool as the model reads it."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) * int(given["b"]))
    except (KeyError, TypeError, ValueError):
        return "error: a and b must be integers"


def solve(problem: Problem, agents: Agents) -> dict[str, dict[str, float]]:
    """Let the agent call the tool until it answers without a call; price the call and the product in the answer."""
    numbers = random.Random(int(problem.prompt))
    a, b = numbers.randrange(100, 10_000), numbers.randrange(100, 10_000)
    messages: list[Any] = [
        {"role": "user", "content": f"What is {a} * {b}? Call the tool multiply, then say the product."}
    ]
    client = agents["clerk"].client()
    has_called, answer = False, ""
    for _ in range(MAX_CALLS):
        message = client.chat.completions.create(model="clerk", messages=messages, tools=[MULTIPLY]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            answer = message.content or ""
            break
        has_called = True
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)})
    is_correct = str(a * b) in answer.replace(",", "")
    return {"parts": {"called": 0.5 if has_called else 0.0, "correct": float(is_correct)}}
