"""An environment of ``verifiers`` with two roles, as a package of its own would hold it; see ``test_environments``."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["OneRequest", "PairEnv", "PairTasks"]


class PairTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Write a function."""

    @vf.reward
    async def writes_function(self, trace: vf.Trace) -> float:
        """Whether the reply begins a function."""
        return float(trace.last_reply.startswith("def "))


class PairTasks(vf.Taskset[PairTask, vf.TasksetConfig]):
    """A hundred tasks that differ in a constant."""

    def load(self) -> Iterator[PairTask]:
        for k in range(100):
            yield PairTask(vf.TaskData(prompt=f'def f(n):\n    """Add {k}, then double."""\n'), self.config.task)


class PairConfig(vf.EnvConfig):
    """The roles."""

    helper: vf.AgentConfig = vf.AgentConfig()
    main: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    """``helper`` and ``main`` each write their part."""

    async def run(self, task: PairTask, agents: vf.Agents) -> None:
        for role in ("helper", "main"):
            await agents.__getattr__(role).run(task.with_data(prompt=f"# {role}\n{task.data.prompt}"))


class OneRequest(vf.Harness[vf.HarnessConfig]):
    """Sends the prompt in this process, and ends with the answer."""

    APPENDS_SYSTEM_PROMPT = EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": data.prompt}])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
