"""Paths that a vLLM 0.32 server has besides its own: compact completions, with support, and loading of full weights.

vLLM adds :class:`MagrpoRoutes` to its server with ``--middleware``. The paths lie below ``/inference``, all of which
vLLM answers only to those who have its key. They call :class:`magrpo.engines.vllm_worker.WorkerExtension`.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from magrpo.engines import Completion
from magrpo.engines.compact_answers import COMPACT, ROUTES, CompactAnswer
from magrpo.engines.vllm_worker import SUPPORT, Truncated, expand_support

_WEIGHTS = asyncio.Lock()
"""Held while weights are loaded."""


class MagrpoRoutes:
    """ASGI middleware that only adds paths to the application, behind the check of the key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_complete:
            self._is_complete = True
            app: FastAPI = scope["app"]
            app.add_api_route(f"{ROUTES}/watch", _watch_truncation, methods=["POST"])
            app.add_api_route(COMPACT, _generate, methods=["POST"])
            app.add_api_route(f"{ROUTES}/load", _load_weights, methods=["POST"])
        await self._app(scope, receive, send)


async def _watch_truncation(raw_request: Request) -> Response:
    """Let log-probabilities be those from before truncation, from now on."""
    await raw_request.app.state.engine_client.collective_rpc("watch_truncation")
    return Response()


@with_cancellation  # type: ignore[untyped-decorator]
async def _complete(request: GenerateRequest, raw_request: Request) -> Any:
    """The answer as vLLM has it before it writes JSON; None if nobody waits for it any more."""
    return await raw_request.app.state.serving_tokens.serve_tokens(request, raw_request)


async def _generate(request: GenerateRequest, raw_request: Request, support: bool = False) -> Response:
    """vLLM's ``/inference/v1/generate`` with a CompactAnswer, which has the support of tokens if that is asked for."""
    engine, name = raw_request.app.state.engine_client, uuid4().hex
    truncated: list[Truncated | None] = []
    if support:
        request.sampling_params.extra_args = {SUPPORT: name}
    tickets: list[int] = []
    try:
        answer = await _complete(request, raw_request)
        if isinstance(answer, ErrorResponse):
            return JSONResponse(answer.model_dump(), answer.error.code)
        if answer is None:
            return Response(status_code=499)
        choice = answer.choices[0]
        tokens = choice.logprobs.content
        tickets = [token.rank or 0 for token in tokens]
    finally:  # also of a request that was given up: its records must go
        if support:
            truncated, *_ = await engine.collective_rpc("take_truncated", args=(name, tickets))
    logps, ids = [token.logprob for token in tokens], list[list[int]]()
    if support:
        logps, ids = expand_support(logps, truncated, engine.model_config.get_vocab_size())
    versions = [span.version for span in choice.weight_versions or ()]
    completion = Completion(choice.token_ids, logps, ids)
    compact = CompactAnswer.pack(answer.model, versions, choice.finish_reason, completion)
    return Response(msgspec.msgpack.encode(compact), media_type="application/msgpack")


async def _load_weights(raw_request: Request) -> Response:
    """Replace all weights by those in ``folder``, which answers name from now on; ends requests that are under way."""
    engine = raw_request.app.state.engine_client
    weights = msgspec.json.decode(await raw_request.body(), type=dict[str, str])
    async with _WEIGHTS:
        await engine.pause_generation(mode="abort")  # resets the prefix cache as well
        try:
            await engine.update_weight_version("unknown")
            await engine.collective_rpc("reload_from", args=(weights["folder"],))
            await engine.update_weight_version(weights["name"])
        finally:
            await engine.resume_generation()
    return Response()
