"""Stand-ins for vLLM servers that send answers made beforehand, in one process of their own."""

import asyncio
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from magrpo.engines.probes import read_probe
from magrpo.fleets.process import Child, share_paths

_WINDOW = 2**20
Answers = dict[int, bytes]
"""What follows the name of the model in an answer, by seed of the request."""


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

    async def generate(self, request: web.Request) -> web.Response:
        given = msgspec.json.decode(await request.read())
        name, sampling = msgspec.json.encode(given["model"]), given["sampling_params"]
        rest = self._answer_probe(given) if "prompt_logprobs" in sampling else self.answers[sampling["seed"]]
        return web.Response(
            body=b'{"request_id":"bench","model":' + name + b"," + rest, content_type="application/json"
        )

    def _answer_probe(self, given: dict[str, Any]) -> bytes:
        """The log-probabilities that the trainer wrote beside the weights."""
        probe = read_probe(Path(self._adapters[given["model"]]))
        assert probe is not None
        scored = [{str(token): {"logprob": logp}} for token, logp in zip(probe.token_ids, probe.logps, strict=True)]
        choice = {"token_ids": [0], "finish_reason": "length"}
        return msgspec.json.encode(
            {"choices": [choice], "prompt_logprobs": [*[None] * len(probe.prompt_ids), *scored]}
        )[1:]


async def serve_answers(count: int, channel: Connection) -> None:
    """Serve on ``count`` free ports whatever answers come through ``channel``."""
    server, app = _Server(), web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_get("/health", server.check_health)
    app.router.add_post("/v1/load_lora_adapter", server.load_adapter)
    app.router.add_post("/v1/unload_lora_adapter", server.unload_adapter)
    app.router.add_post("/inference/v1/generate", server.generate)
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
