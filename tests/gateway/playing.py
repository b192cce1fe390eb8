"""What the tests of the gateway share: a fake model behind a real tokenizer, players of programs, an open gateway."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.envs.program import AgentProgram
from magrpo.gateway.batcher import Batcher
from magrpo.gateway.chat import Chat
from magrpo.gateway.player import EpisodePlayer, PlayedEpisode, Services
from magrpo.gateway.server import Gateway, LiveSession, Stage
from magrpo.gateway.sessions import EpisodeTask, Session
from magrpo.model.lineup import Lineup
from magrpo.types import (
    Action,
    Call,
    Case,
    Episode,
    Execution,
    ExecutionReport,
    Problem,
    Request,
    SamplingParams,
)
from tests.tiny import VOCAB_SIZE, tiny_config, tiny_tokenizer

AGENTS = ("planner", "coder")
MARKS = ["<|im_start|>", "<|im_end|>"]
PLAIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like SmolLM2's: knows nothing of tools."""
HERMES_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- "Answer with\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>\
<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Like Qwen's: describes tools, and writes their calls in the Hermes form."""
SAMPLING = SamplingParams(temperature=0.8, max_new_tokens=64)


def make_lineup(folder: Path, template: str = PLAIN_TEMPLATE, window: int = 4096) -> Lineup:
    """A lineup of :data:`AGENTS` without weights, whose tokenizer has a token for each byte and one for each mark."""
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.eos_token = MARKS[1]
    tokenizer.save_pretrained(folder)
    config = tiny_config(vocab_size=VOCAB_SIZE + len(MARKS), max_length=window)
    config.eos_token_id = tokenizer.eos_token_id
    config.save_pretrained(folder)
    return open_lineup(folder)


def open_lineup(folder: Path) -> Lineup:
    """The lineup of :data:`AGENTS` on the base in ``folder``."""
    agents = [AgentConfig(name=name, model=str(folder)) for name in AGENTS]
    return Lineup.open(agents, ModelConfig(device="cpu"), LoraConfig())


def tell_prompt(request: Request, prompt: str) -> str:
    """Answer with the agent and the end of the last message, so that an answer shows what it answers."""
    message = prompt.rpartition("<|im_end|>")[0] or prompt
    return f"{request.agent}: {message.rpartition(chr(10))[2][-20:]}"


@dataclass
class FakeModel:
    """Answers each request with ``reply(request, prompt)``; keeps every batch it was given."""

    lineup: Lineup
    reply: Callable[[Request, str], str] = tell_prompt
    batches: list[list[Request]] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        return [request for batch in self.batches for request in batch]

    def generate(self, requests: Sequence[Request]) -> list[Action]:
        self.batches.append([*requests])
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Action:
        tokenizer = self.lineup.tokenizer(request.agent)
        text = self.reply(request, str(tokenizer.decode([*request.prompt_ids])))
        token_ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
        limit = request.sampling.max_new_tokens
        finish: Any = "stop" if len(token_ids) <= limit else "length"
        token_ids = token_ids[:limit]
        logps = tuple(-0.25 * (place + 1) for place in range(len(token_ids)))
        text = str(tokenizer.decode([*token_ids], skip_special_tokens=True))
        return Action(request.agent, text, token_ids, logps, finish, 0)


def run_nothing(executions: Sequence[Execution]) -> list[ExecutionReport]:
    """A sandbox in which every program passes."""
    return [ExecutionReport("pass", (Case("pass", execution.source),), "none") for execution in executions]


def make_services(
    generate: Callable[[list[Request]], list[Action]], advance: Callable[[int], None] = lambda _: None
) -> Services:
    """What a stage provides to episodes of :data:`AGENTS`."""
    return Services({name: name for name in AGENTS}, generate, run_nothing, advance)


def make_tasks(*prompts: str, seed: int = 7) -> list[EpisodeTask]:
    """An episode for each prompt, which names what the program is to do. Each is of a problem of its own."""
    return [EpisodeTask(Problem(f"task/{i}", prompt), 0, SAMPLING, seed) for i, prompt in enumerate(prompts)]


def play(player: EpisodePlayer, model: FakeModel, *prompts: str) -> list[PlayedEpisode]:
    """Play an episode for each prompt."""
    return player.play(make_tasks(*prompts), make_services(model.generate))


def as_episode(played: PlayedEpisode) -> Episode:
    """The calls of an episode as the other stages read them."""
    return Episode(played.calls, {})


def list_texts(calls: Sequence[Call]) -> list[str]:
    return [call.action.text for call in calls]


def find_marked(mark: object) -> list[psutil.Process]:
    """The running processes that have a text in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(mark) in word for word in words):
            found.append(process)
    return found


# ------------------------------------------------------------------------------------------------------ open gateway
class Answer(NamedTuple):
    """An answer of the gateway."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def error(self) -> str:
        """The message of an error in OpenAI's form."""
        return str(self.body["error"]["message"])

    @property
    def contents(self) -> list[str | None]:
        """The content of each choice of an answer to a chat request."""
        return [choice["message"]["content"] for choice in self.body["choices"]]


class OpenGateway:
    """A gateway with one session, whose fake model works on a thread of its own."""

    TOKEN = "secret"

    def __init__(self, env: AgentProgram, model: FakeModel, sampling: SamplingParams = SAMPLING) -> None:
        self.model = model
        self.gateway = Gateway(env, Chat(model.lineup, env.response_template))
        task = EpisodeTask(Problem("task/0", "prompt"), 0, sampling, 7)
        self.session = Session(task, AGENTS, env.max_calls)
        self.executions: list[Execution] = []
        completions: Batcher[Request, Action] = Batcher(self._generate, lambda: True, env.batch_wait_s)
        programs: Batcher[Execution, ExecutionReport] = Batcher(self._run_programs, lambda: True, env.batch_wait_s)
        self.batchers: list[Batcher[Any, Any]] = [completions, programs]
        roles = {name: name for name in AGENTS}
        self.live = LiveSession(self.session, Stage(roles, completions, programs, model.lineup.max_length))
        self.gateway.sessions[self.TOKEN] = self.live

    async def _generate(self, requests: list[Request]) -> list[Action]:
        return await asyncio.get_running_loop().run_in_executor(None, self.model.generate, requests)

    async def _run_programs(self, executions: list[Execution]) -> list[ExecutionReport]:
        self.executions += executions
        return run_nothing(executions)

    @property
    def url(self) -> str:
        """The address of the session."""
        return f"{self.gateway.url}/s/{self.TOKEN}"

    def connect(self) -> HTTPConnection:
        parts = urlsplit(self.gateway.url)
        return HTTPConnection(parts.hostname or "", parts.port)

    def send(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> Answer:
        """Send a request; ``body`` is sent as JSON unless it is bytes; a relative ``path`` is below the session."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        connection = self.connect()
        try:
            where = path if path.startswith("/") else f"/s/{self.TOKEN}/{path}"
            connection.request(method, where, data, dict(headers or {}))
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        return Answer(response.status, json.loads(content) if is_json else content.decode(), dict(response.headers))

    def chat(self, content: str = "hello", headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
        """Send a chat request with one message of a user."""
        body = {"model": "planner", "messages": [{"role": "user", "content": content}], **fields}
        return self.send("v1/chat/completions", body, headers)


@contextmanager
def open_gateway(model: FakeModel, sampling: SamplingParams = SAMPLING, **fields: Any) -> Iterator[OpenGateway]:
    """A gateway with one session. ``fields``: those of the environment."""
    env = AgentProgram(run="any:thing", batch_wait_s=0.001, **fields)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    opened = OpenGateway(env, model, sampling)

    async def start() -> list[asyncio.Task[None]]:
        await opened.gateway.start()
        return [asyncio.ensure_future(batcher.run()) for batcher in opened.batchers]

    async def stop(running: Sequence[asyncio.Task[None]]) -> None:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await opened.gateway.stop()

    running = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield opened
    finally:
        asyncio.run_coroutine_threadsafe(stop(running), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
