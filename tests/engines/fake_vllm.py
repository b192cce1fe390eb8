"""A stand-in for a vLLM server: its protocol, completions that follow from weights, prompt and seed, and its faults.

The support of a token is itself and the next id, its log-probability over the support a tenth of that before.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from magrpo.engines import Completion
from magrpo.engines.compact_answers import CompactAnswer
from magrpo.engines.probes import NUM_TOKENS, PROBES

BASE = "base"
KEY = "secret"
PROBE_PROMPT, PROBE_TOKENS = [5, 6, 7], list(range(10, 10 + NUM_TOKENS))


def draw(*parts: object) -> int:
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:4], "big")


def complete(weights: str, prompt: list[int], seed: int, count: int) -> tuple[list[int], list[float]]:
    tokens = [3 + draw(weights, prompt, seed, i) % 250 for i in range(count)]
    return tokens, score(weights, tokens)


def score(weights: str, tokens: list[int]) -> list[float]:
    return [-1.0 - draw(weights, token) % 1000 / 100 for token in tokens]


def refusal(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "Error", "code": status}}


def write_weights(folder: Path, agent: str, content: str, *, full: bool = False) -> Path:
    """Weights of an agent that a fake server reads, with their probe."""
    target = folder / agent
    target.mkdir(parents=True, exist_ok=True)
    (target / ("model.safetensors" if full else "adapter_model.safetensors")).write_text(content)
    (target / ("config.json" if full else "adapter_config.json")).write_text("{}")
    probes = folder / PROBES
    known = json.loads(probes.read_text()) if probes.exists() else {}
    known[agent] = {
        "prompt_ids": PROBE_PROMPT,
        "token_ids": PROBE_TOKENS,
        "logps": score(content, PROBE_TOKENS),
    }
    probes.write_text(json.dumps(known))
    return target


def pack_answer(answer: dict[str, Any]) -> bytes:
    """The compact form of an answer with one completion."""
    [choice] = answer["choices"]
    logps = [token["logprob"] for token in choice["logprobs"]["content"]]
    completion = Completion(choice["token_ids"], logps, choice.get("support", ()))
    versions = [span["version"] for span in choice["weight_versions"]]
    return msgspec.msgpack.encode(CompactAnswer.pack(answer["model"], versions, choice["finish_reason"], completion))


class FakeServer:
    """One server. ``on_generate`` is called with its number before each completion and may return a fault.

    Faults: an HTTP status, ``hang`` until :meth:`release`, ``close`` the connection, ``half`` an answer, ``forget`` all
    adapters and full weights and then answer, ``other``: answer in another name. Without ``extended`` it lacks the
    paths of ``magrpo.engines.vllm_routes``.
    """

    def __init__(
        self,
        on_generate: Callable[[int], str | int | None] = lambda _: None,
        *,
        base: str = BASE,
        extended: bool = True,
    ) -> None:
        self.on_generate, self.base, self.extended = on_generate, base, extended
        self.adapters: dict[str, str] = {}
        self.full = ("default", "")
        """Name and folder of the weights in place of the base."""
        self.served: list[tuple[str, tuple[int, ...], int]] = []
        """Adapter, prompt and seed of each completion."""
        self.loads: list[str] = []
        self.max_in_flight = 0
        self.serves_base = False
        self.is_well = True
        self.delay_s = 0.0
        self._in_flight = 0
        self._count = 0
        self._lock = threading.Lock()
        self._released = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                fake._get(self)

            def do_POST(self) -> None:
                fake._post(self, json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *_: object) -> None: ...

        self._http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._http.server_port

    def release(self) -> None:
        self._released.set()

    def close(self) -> None:
        self.release()
        self._http.shutdown()
        self._http.server_close()

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/health":
            if self.is_well == "silent":
                self._released.wait(60)
            return self._answer(handler, 200 if self.is_well is True else 503, "")
        if handler.headers["Authorization"] != f"Bearer {KEY}":
            return self._answer(handler, 401, {"error": "Unauthorized"})
        base = {"id": self.base, "root": self.base, "parent": None, "max_model_len": 4096}
        models = [{"id": name, "root": root, "parent": self.base} for name, root in self.adapters.items()]
        return self._answer(handler, 200, {"data": [base, *models]})

    def _post(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if handler.path == "/v1/load_lora_adapter":
            if not Path(body["lora_path"]).is_dir():
                return self._answer(handler, 404, refusal(404, "no adapter found"))
            self.adapters[body["lora_name"]] = body["lora_path"]
            self.loads.append(body["lora_name"])
            return self._answer(handler, 200, "Success")
        if handler.path == "/v1/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return self._answer(handler, 404, refusal(404, "not found"))
            return self._answer(handler, 200, "Success")
        if handler.path.startswith("/inference/magrpo/") and not self.extended:
            return self._answer(handler, 404, {"detail": "Not Found"})
        if handler.path == "/inference/magrpo/watch":
            return self._answer(handler, 200, "")
        if handler.path == "/inference/magrpo/load":
            self.full = (body["name"], body["folder"])
            self.loads.append(body["name"])
            return self._answer(handler, 200, "")
        return self._generate(handler, body)

    def _generate(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        is_probe = "prompt_logprobs" in body["sampling_params"]
        fault: str | int | None = None
        if not is_probe:
            with self._lock:
                self._count += 1
                number = self._count
                self._in_flight += 1
                self.max_in_flight = max(self.max_in_flight, self._in_flight)
            fault = self.on_generate(number)
        try:
            status, answer = self._reply(body, fault, support=handler.path.endswith("?support=true"))
        finally:
            if not is_probe:
                with self._lock:
                    self._in_flight -= 1
        if status == 0:
            handler.close_connection = True
        else:
            compact = status == 200 and handler.path.startswith("/inference/magrpo/")
            self._answer(handler, status, pack_answer(answer) if compact else answer, half=fault == "half")

    def _reply(self, body: dict[str, Any], fault: str | int | None, *, support: bool) -> tuple[int, dict[str, Any]]:
        """Status and answer; status 0 closes the connection."""
        name, prompt, sampling = body["model"], body["token_ids"], body["sampling_params"]
        is_probe = "prompt_logprobs" in sampling
        if fault == "forget":
            self.adapters.clear()
            self.full = ("default", "")
        if fault == "hang":
            self._released.wait(60)
        if fault in ("hang", "close"):
            return 0, {}
        if isinstance(fault, int):
            return fault, refusal(fault, "out of order")
        folder = self.adapters.get(name)
        if folder is None and name != self.base:
            return 404, refusal(404, f"The model `{name}` does not exist.")
        if self.delay_s and not is_probe:
            time.sleep(self.delay_s)
        version, full = self.full
        weights = self.base if self.serves_base else self._read_weights(folder, full)
        answer: dict[str, Any] = {"model": "another" if fault == "other" else name, "prompt_logprobs": None}
        if is_probe:
            pairs = zip(prompt, score(weights, prompt), strict=True)
            answer["prompt_logprobs"] = [{str(token): {"logprob": logp}} for token, logp in pairs]
        elif fault is None or fault == "forget":
            self.served.append((name, tuple(prompt), sampling["seed"]))
        tokens, logps = complete(weights, prompt, sampling.get("seed", 0), sampling["max_tokens"])
        content = [{"token_id": t, "logprob": x, "rank": 1} for t, x in zip(tokens, logps, strict=True)]
        choice = {"token_ids": tokens, "finish_reason": "length", "logprobs": {"content": content}}
        choice["weight_versions"] = [{"version": version, "start": 0, "end": len(tokens)}]
        if support:
            choice["support"] = [[token, token + 1] for token in tokens]
            for token in content:
                token["logprob"] /= 10
        answer["choices"] = [choice]
        return 200, answer

    def _read_weights(self, adapter: str | None, full: str) -> str:
        if adapter:
            return (Path(adapter) / "adapter_model.safetensors").read_text()
        return (Path(full) / "model.safetensors").read_text() if full else self.base

    def _answer(self, handler: BaseHTTPRequestHandler, status: int, body: object, *, half: bool = False) -> None:
        data = body if isinstance(body, bytes) else b"" if body == "" else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            handler.close_connection = True
