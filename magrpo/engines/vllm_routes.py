"""Paths that a vLLM 0.32 server has besides its own: completions with their support, loading of full weights.

vLLM adds :class:`MagrpoRoutes` to its server with ``--middleware``. The paths lie below ``/inference``, all of which
vLLM answers only to those who have its key. They call :class:`magrpo.engines.vllm_worker.WorkerExtension`.
"""

from __future__ import annotations

import asyncio
from math import isfinite
from uuid import uuid4

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.scale_out.token_in_token_out.api_router import generate
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

from magrpo.engines.http import NO_NUMBER
from magrpo.engines.vllm_worker import SUPPORT, expand_support

PREFIX = "/inference/magrpo"
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
            app.add_api_route(f"{PREFIX}/watch", _watch_truncation, methods=["POST"])
            app.add_api_route(f"{PREFIX}/generate", _generate_with_support, methods=["POST"], response_model=None)
            app.add_api_route(f"{PREFIX}/load", _load_weights, methods=["POST"])
        await self._app(scope, receive, send)


async def _watch_truncation(raw_request: Request) -> Response:
    """Let log-probabilities be those from before truncation, from now on."""
    await raw_request.app.state.engine_client.collective_rpc("watch_truncation")
    return Response()


async def _generate_with_support(request: GenerateRequest, raw_request: Request) -> Response | None:
    """vLLM's ``/inference/v1/generate`` with ``sampling_mask``, over which log-probabilities are taken."""
    engine, name = raw_request.app.state.engine_client, uuid4().hex
    request.sampling_params.extra_args = {SUPPORT: name}
    tickets: list[int] = []
    body = {}
    try:
        answer: Response | None = await generate(request, raw_request)
        if answer is not None and answer.status_code == 200:
            body = msgspec.json.decode(answer.body)
            tokens = body["choices"][0]["logprobs"]["content"]
            tickets = [token["rank"] or 0 for token in tokens]
    finally:  # also of a request that was given up: its records must go
        truncated, *_ = await engine.collective_rpc("take_truncated", args=(name, tickets))
    if not tickets:
        return answer
    logps = [token["logprob"] for token in tokens]
    logps, support = expand_support(logps, truncated, engine.model_config.get_vocab_size())
    for token, logp in zip(tokens, logps, strict=True):
        token["logprob"] = logp if isfinite(logp) else NO_NUMBER
    body["choices"][0]["sampling_mask"] = support
    return Response(msgspec.json.encode(body), media_type="application/json")


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
