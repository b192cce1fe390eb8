"""An environment of ``verifiers``, with as many roles as it has: each role is an agent of that name.

``verifiers`` pins other versions of libraries than ``magrpo`` does, so it lives in a virtual environment of its own,
together with the package of the environment. The problem is the position of a task in the task set, and the reward the
mean reward of the traces that have one. An episode with an error has no reward: it counts as failed. Harnesses run as
processes of this machine, so choose an environment whose harness executes no code that a model wrote.

Run it with a configuration like this one, for which a task set of one role needs an agent named ``agent``::

    python -m venv verifying && verifying/bin/pip install --no-deps -r requirements/examples-verifiers.txt

    problems.kind = "pipelines.examples.numbered_tasks:NumberedTasks"
    reward.kind = "returned"
    [env]
    kind = "program"
    run = "verifying/bin/python pipelines/examples/verifiers_program.py TASK_SET {problem_file}"
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def configure_roles(taskset: str) -> vf.EnvConfig:
    """The configuration of the environment, in which the agent of the same name acts in each role."""
    client = {"type": "eval", "base_url": os.environ["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}
    config: dict[str, Any] = {"taskset": {"id": taskset}}
    for role in agent_config_fields(resolve_env_config(config)):
        config[role] = {"model": role, "client": client, "runtime": {"type": "subprocess"}}
    return resolve_env_config(config)


async def play_episode(taskset: str, number: int) -> float:
    """Play one episode of a task; returns its reward."""
    env = load_environment(configure_roles(taskset))
    [task] = env.taskset.include(idx=[number])
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="", client=vf.EvalClientConfig()))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"the episode failed: {errors[-1].message}")
    return fmean(trace.reward for trace in episode.traces if trace.rewards)


if __name__ == "__main__":
    problem = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    print(json.dumps(asyncio.run(play_episode(sys.argv[1], int(problem["prompt"])))))
