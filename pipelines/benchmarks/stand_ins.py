"""Stand-ins for vLLM servers that send answers made beforehand, in one process of their own."""

import asyncio
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from magrpo.engines.compact_answers import COMPACT, ROUTES, CompactAnswer
from magrpo.engines.http import GENERATE
from magrpo.engines.probes import read_probe
from magrpo.fleets.process import Child, share_paths

_WINDOW = 2**20
Answers = dict[int, CompactAnswer]
"""Compact answers but for the name of the model, by seed of the request."""


class _Asked(msgspec.Struct):
    model: str
    sampling_params: dict[str, Any]


class StandIns:
    """``count`` servers in one process. Close it."""

    def __init__(self, count: int, folder: Path) -> None:
        command = [sys.executable, "-m", __name__, str(count)]
        self._child = Child(command, folder / "stand-ins.log", share_paths())
        self.urls = msgspec.json.decode(self._child.receive(), type=list[str])

    def prepare(self, base: str, answers: Answers) -> None:
        """Let the servers have this base model and these answers, in place of the last ones."""
        self._child.send(msgspec.msgpack.encode((base, answers)))
        self._child.receive()

    def close(self) -> None:
        """End the process."""
        self._child.kill()


class _Server:
    """What all servers answer from."""

    def __init__(self) -> None:
        self.base, self.answers = "", Answers()
        self._adapters: dict[str, str] = {}

    async def list_models(self, _: web.Request) -> web.Response:
        base = {"id": self.base, "root": self.base, "parent": None, "max_model_len": _WINDOW}
        adapters = [{"id": name, "root": root, "parent": self.base} for name, root in self._adapters.items()]
        return web.json_response({"data": [base, *adapters]})

    async def check_health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def load_adapter(self, request: web.Request) -> web.Response:
        given = await request.json()
        self._adapters[given["lora_name"]] = given["lora_path"]
        return web.Response()

    async def unload_adapter(self, request: web.Request) -> web.Response:
        return web.Response()

    async def watch_truncation(self, _: web.Request) -> web.Response:
        return web.Response()

    async def generate(self, request: web.Request) -> web.Response:
        given = msgspec.json.decode(await request.read(), type=_Asked)
        answer = msgspec.structs.replace(self.answers[given.sampling_params["seed"]], model=given.model)
        return web.Response(body=msgspec.msgpack.encode(answer), content_type="application/msgpack")

    async def answer_probe(self, request: web.Request) -> web.Response:
        """The log-probabilities that the trainer wrote beside the weights."""
        given = await request.json()
        probe = read_probe(Path(self._adapters[given["model"]]))
        assert probe is not None
        scored = [{str(token): {"logprob": logp}} for token, logp in zip(probe.token_ids, probe.logps, strict=True)]
        choice = {"token_ids": [0], "finish_reason": "length"}
        scores = [*[None] * len(probe.prompt_ids), *scored]
        return web.json_response({"model": given["model"], "choices": [choice], "prompt_logprobs": scores})


async def serve_answers(count: int, channel: Connection) -> None:
    """Serve on ``count`` free ports whatever answers come through ``channel``."""
    server, app = _Server(), web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_get("/health", server.check_health)
    app.router.add_post("/v1/load_lora_adapter", server.load_adapter)
    app.router.add_post("/v1/unload_lora_adapter", server.unload_adapter)
    app.router.add_post(GENERATE, server.answer_probe)
    app.router.add_post(f"{ROUTES}/watch", server.watch_truncation)
    app.router.add_post(COMPACT, server.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    for _ in range(count):
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    channel.send_bytes(msgspec.json.encode([f"http://{host}:{port}" for host, port in runner.addresses]))
    while True:
        try:
            message = await asyncio.to_thread(channel.recv_bytes)
        except EOFError:
            return
        server.base, server.answers = msgspec.msgpack.decode(message, type=tuple[str, Answers])
        channel.send_bytes(b"")


if __name__ == "__main__":
    asyncio.run(serve_answers(int(sys.argv[1]), Connection(int(sys.argv[2]))))
