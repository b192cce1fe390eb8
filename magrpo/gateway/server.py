"""The HTTP side of the gateway: OpenAI's routes for the agents of an episode, and one for programs in the sandbox.

    POST /s/TOKEN/v1/chat/completions    POST /s/TOKEN/v1/completions    GET /s/TOKEN/v1/models    POST /s/TOKEN/run

The token is that of an episode. A client that drops the path of its base URL may send the token as its API key instead,
to the same routes without ``/s/TOKEN``. Any other path is refused, with the names of these. A completion is recorded
when it was sampled, whether or not its client still listens. The server listens on the loopback address only.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, starmap
from typing import Any

import msgspec
from aiohttp import web

from magrpo.envs.program import AgentProgram
from magrpo.errors import ConfigError
from magrpo.gateway.batcher import Batcher
from magrpo.gateway.chat import CannotParse, Chat, decode_pieces
from magrpo.gateway.sessions import Messages, SampledCall, Session
from magrpo.gateway.wire import (
    Answered,
    ChatRequest,
    RequestRefused,
    TextRequest,
    clamp_sampling,
    cut_text,
    make_chat_answer,
    make_text_answer,
    read_chat_request,
    read_code_request,
    read_text_request,
    stream_events,
    wants_usage,
)
from magrpo.types import Action, Execution, ExecutionReport, Request, SamplingParams

_MAX_BODY = 64 * 2**20
_BACKLOG = 4096
_RETRY_HEADER = "x-stainless-retry-count"
"""OpenAI's clients say in it how often they sent a request before."""
_SHUTDOWN_S = 0.1
"""Time to wait for requests in progress when the server stops; 0 would be without limit."""
_SEALED = RequestRefused(409, "the episode has ended", "sealed")
_FINAL = {"x-should-retry": "false"}
"""Tells OpenAI's clients that sending the request again would not help; they would wait seconds before they did."""


@dataclass
class Stage:
    """What the sessions of one stage share: the agents, the engine and the sandbox."""

    roles: Mapping[str, str]
    """The agent that answers for each role."""
    completions: Batcher[Request, Action]
    programs: Batcher[Execution, ExecutionReport]
    window: Callable[[str], int]
    """The context window of an agent, in tokens."""


@dataclass
class LiveSession:
    """A session that its program may use, and the answers that it has been given, for retries."""

    session: Session
    stage: Stage
    answers: list[asyncio.Future[dict[str, Any]]] = field(default_factory=list)
    """The answers to all requests, also those that are not sampled yet."""
    answered: dict[bytes, list[asyncio.Future[dict[str, Any]]]] = field(default_factory=dict)
    """The answers to each body, for requests that are sent again."""
    given_again: set[tuple[asyncio.Future[dict[str, Any]], str]] = field(default_factory=set)
    """The answers that requests sent again have got, each with the retry count of the request."""


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Gateway:
    """Serves sessions, each under a token that nobody can guess."""

    env: AgentProgram
    chat: Chat
    sessions: dict[str, LiveSession] = field(default_factory=dict)
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port of the loopback address."""
        app = web.Application(client_max_size=_MAX_BODY)
        for prefix in ("/s/{token}", ""):  # the first route that matches answers
            app.router.add_post(f"{prefix}/v1/chat/completions", self._guard(self._answer_chat))
            app.router.add_post(f"{prefix}/v1/completions", self._guard(self._answer_text))
            app.router.add_get(f"{prefix}/v1/models", self._guard(self._list_models))
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._guard(self._show_model))
            app.router.add_post(f"{prefix}/run", self._guard(self._run_code))
            app.router.add_route("*", f"{prefix}/{{path:.*}}", self._guard(self._refuse_path))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=_BACKLOG).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _guard(self, handle: Callable[[web.Request, LiveSession], Awaitable[web.StreamResponse]]) -> Handler:
        """The handler that finds the session of a request, and turns refusals into OpenAI's errors."""

        async def handle_request(http: web.Request) -> web.StreamResponse:
            try:
                return await handle(http, self._find_session(http))
            except RequestRefused as error:
                refusal = error
            except ConnectionAbortedError as error:  # the stage ended
                refusal = RequestRefused(503, str(error), "stage_ended")
            except web.HTTPRequestEntityTooLarge:
                refusal = RequestRefused(413, f"the request is longer than {_MAX_BODY} bytes", "too_large")
            return web.Response(
                body=refusal.body, status=refusal.status, headers=_FINAL, content_type="application/json"
            )

        return handle_request

    def _find_session(self, http: web.Request) -> LiveSession:
        token = http.match_info.get("token") or http.headers.get("Authorization", "").removeprefix("Bearer ")
        live = self.sessions.get(token)
        if live is None:
            raise RequestRefused(
                401, "unknown session: use the base URL or the API key that the program was given", "auth"
            )
        if live.session.is_sealed:
            raise _SEALED
        return live

    # --------------------------------------------------------------------------------------------------- completions
    async def _answer_chat(self, http: web.Request, live: LiveSession) -> web.StreamResponse:
        body = await http.read()
        request = read_chat_request(body)
        agent = self._find_agent(live, request.model)
        self._check_supported(request)
        tools = None if request.tool_choice == "none" else request.tools
        try:
            if tools:
                self.chat.check_tools(agent)
            earlier = live.session.list_earlier(agent)
            prompt_ids = self.chat.lineup.render_chat(agent, request.messages, tools, earlier)
        except (CannotParse, ConfigError) as error:
            raise RequestRefused(400, str(error)) from None
        except RecursionError:
            raise RequestRefused(400, "messages: too deeply nested") from None

        def show(seed: int, action: Action) -> Answered:
            text, was_cut = cut_text(action.text, request.stops)
            message: Mapping[str, Any] = {"content": text}
            if tools:
                text, was_cut = cut_text(self.chat.read_text(agent, action.token_ids), request.stops)
                parsed = self.chat.parse(agent, prompt_ids, text, tools)
                message = parsed if _has_usable_calls(parsed) else message
            tokens = self._list_tokens(agent, action, len(text) if was_cut else None) if request.logprobs else None
            return Answered(seed, action, message, was_cut, tokens)

        async def answer() -> dict[str, Any]:
            number, sampled = await self._complete(live, agent, prompt_ids, tuple(request.messages), request)
            return make_chat_answer(request, number, len(prompt_ids), list(starmap(show, sampled)))

        return await self._send(http, request, await self._answer_once(http, live, body, answer))

    async def _answer_text(self, http: web.Request, live: LiveSession) -> web.StreamResponse:
        body = await http.read()
        request = read_text_request(body)
        agent = self._find_agent(live, request.model)
        self._check_supported(request)
        prompt = str(request.prompt)
        try:
            prompt_ids = self.chat.lineup.encode_text(agent, prompt)
        except ConfigError as error:
            raise RequestRefused(400, f"prompt: {error}; send messages to /v1/chat/completions") from None
        messages = ({"role": "user", "content": prompt},)

        async def answer() -> dict[str, Any]:
            number, sampled = await self._complete(live, agent, prompt_ids, messages, request)
            return make_text_answer(request, number, len(prompt_ids), list(starmap(show, sampled)))

        def show(seed: int, action: Action) -> Answered:
            text, was_cut = cut_text(action.text, request.stops)
            length = len(text) if was_cut else None
            tokens = None if request.logprobs is None else self._list_tokens(agent, action, length, prompt_ids)
            return Answered(seed, action, {"content": text}, was_cut, tokens)

        return await self._send(http, request, await self._answer_once(http, live, body, answer))

    def _list_tokens(self, agent: str, action: Action, length: int | None, behind: Sequence[int] = ()) -> list[str]:
        """The text that each token adds; of a text that was cut to ``length`` characters, the tokens before the cut.

        The tokens of a text that is continued stand ``behind`` those of its prompt.
        """
        pieces = decode_pieces(self.chat.lineup.tokenizer(agent), action.token_ids, behind)
        ends = accumulate(map(len, pieces))
        return [piece for piece, end in zip(pieces, ends, strict=True) if length is None or end <= length]

    async def _answer_once(
        self, http: web.Request, live: LiveSession, body: bytes, answer: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """The answer to a request. A request that is sent again gets an answer that an equal request got before.

        Programs vote over equal requests on purpose, so requests that are not marked as sent again are separate
        samples. If several of them are sent again, each gets a different one of their answers, the latest first: a
        program that asks for one sample after the other has already read the earlier ones.
        """
        if live.session.is_sealed:  # while the body was on its way
            raise _SEALED
        digest = hashlib.blake2b(http.path.encode() + body).digest()
        equal = live.answered.setdefault(digest, [])
        count = http.headers.get(_RETRY_HEADER, "0")
        if equal and count != "0":
            earlier = equal[-1]
            for candidate in reversed(equal):
                if (candidate, count) not in live.given_again:
                    earlier = candidate
                    break
            live.given_again.add((earlier, count))
            return await asyncio.shield(earlier)
        # A task, so that the completion is sampled and recorded also if the client goes away.
        task = asyncio.ensure_future(answer())
        live.answers.append(task)
        equal.append(task)
        return await asyncio.shield(task)

    async def _complete(
        self,
        live: LiveSession,
        agent: str,
        prompt_ids: tuple[int, ...],
        messages: Messages,
        request: ChatRequest | TextRequest,
    ) -> tuple[int, list[tuple[int, Action]]]:
        """Sample and record the completions of a request; returns the number of the first, and all with their seeds."""
        session = live.session
        sampling, overruled = clamp_sampling(request, session.task.sampling)
        self._check_room(live, agent, len(prompt_ids), sampling)
        if session.num_asked + request.num_answers > session.max_calls:
            raise RequestRefused(
                429,
                f"n = {request.num_answers}: the episode has asked for {session.num_asked} of the {session.max_calls} "
                "completions that env.max_calls allows; ask for fewer, or raise it",
                "max_calls",
            )
        first = session.num_asked
        begun = [session.begin_call(agent, prompt_ids, request.seed) for _ in range(request.num_answers)]
        requests = [Request(agent, prompt_ids, sampling, seed) for _, seed in begun]
        with session.wait():
            results = await asyncio.gather(*map(live.stage.completions.submit, requests))
        if isinstance(request, TextRequest):
            results = [(batch, self.chat.continue_text(prompt_ids, action)) for batch, action in results]
        has_low_limit = sampling.max_new_tokens < session.task.sampling.max_new_tokens
        all_overruled = {**overruled, **request.unsupported}
        for (number, _), (batch, action) in zip(begun, results, strict=True):
            ends_early = has_low_limit or cut_text(action.text, request.stops)[1]
            session.calls.append(
                SampledCall(agent, number, batch, prompt_ids, messages, action, all_overruled, ends_early)
            )
        return first, [(seed, action) for (_, seed), (_, action) in zip(begun, results, strict=True)]

    def _find_agent(self, live: LiveSession, model: str) -> str:
        role = self.env.models.get(model, model)
        if role not in live.stage.roles:
            known = ", ".join([*live.stage.roles, *self.env.models])
            raise RequestRefused(
                404, f"no agent answers for model {model!r}; there are: {known} (env.models)", "no_model"
            )
        return live.stage.roles[role]

    def _check_supported(self, request: ChatRequest | TextRequest) -> None:
        if request.unsupported and not self.env.ignore_unsupported:
            raise RequestRefused(
                400,
                f"{', '.join(request.unsupported)}: not supported: the chat template alone makes the prompts, and "
                "constrained decoding would sample from another distribution than the one that is trained; leave it "
                "out, or set env.ignore_unsupported = true to have it ignored",
                "unsupported",
            )

    def _check_room(self, live: LiveSession, agent: str, length: int, sampling: SamplingParams) -> None:
        window = live.stage.window(agent)
        if length + sampling.max_new_tokens > window:
            raise RequestRefused(
                400,
                f"a prompt of {length} tokens and a completion of {sampling.max_new_tokens} do not fit the context "
                f"window of {window} tokens of agent {agent!r}",
                "context_length_exceeded",
            )
        if length == 0:
            raise RequestRefused(400, "the prompt is empty")

    async def _send(
        self, http: web.Request, request: ChatRequest | TextRequest, answer: Mapping[str, Any]
    ) -> web.StreamResponse:
        if not request.stream:
            return _json(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for event in stream_events(answer, wants_usage(request)):
            await response.write(event)
        await response.write_eof()
        return response

    async def _list_models(self, http: web.Request, live: LiveSession) -> web.StreamResponse:
        names = [*live.stage.roles, *self.env.models]
        return _json({"object": "list", "data": [_describe_model(name) for name in names]})

    async def _show_model(self, http: web.Request, live: LiveSession) -> web.StreamResponse:
        name = http.match_info["model"]
        self._find_agent(live, name)
        return _json(_describe_model(name))

    async def _refuse_path(self, http: web.Request, live: LiveSession) -> web.StreamResponse:
        raise RequestRefused(
            404,
            f"the gateway does not serve {http.method} /{http.match_info['path']}; it serves /v1/chat/completions, "
            "/v1/completions and /v1/models: use the chat-completions model of your library",
            "not_served",
        )

    # ------------------------------------------------------------------------------------------------------ programs
    async def _run_code(self, http: web.Request, live: LiveSession) -> web.StreamResponse:
        request = read_code_request(await http.read())
        with live.session.wait():
            _, report = await live.stage.programs.submit(Execution(request.source, request.entry_point, request.test))
        if "infra_error" in report.statuses:
            live.session.infra_error = "the sandbox failed to run a program"
        return _json(report)


def _has_usable_calls(message: Mapping[str, Any]) -> bool:
    """Whether every tool call of a parsed message names a function and gives its arguments as an object."""
    calls: Sequence[Any] = message.get("tool_calls") or []
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in calls]
    return all(
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", {}), Mapping)
        for function in functions
    )


def _describe_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "magrpo"}


def _json(value: Mapping[str, Any] | ExecutionReport) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
