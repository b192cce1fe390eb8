"""Feedback mode ``expert_edits`` against real HTTP servers: a scripted one, and vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import ValidationError

from magrpo.envs.coding import CodingEnv
from magrpo.envs.expert import MAX_CHARS, _ask
from magrpo.process.ports import find_free_ports
from magrpo.types import Case, ExecutionReport, JointReward, PastTurn, Problem
from tests.servers import answers

PROBLEM = Problem("t/0", 'def f(xs):\n    """Sum."""\n', "f", "def check(candidate): ...")
TEXTS = {"ada": "HELPERTEXT", "bob": "MAINTEXT"}
REPORT = ExecutionReport("wrong", (Case("wrong", "assert f([]) == 0  # got 1"),), "namespaces", watched_calls=1)
PARTS = {"structure": 1.0, "syntax": 0.5, "tests": 0.0, "cooperation": 0.0}
TURN = PastTurn(TEXTS, JointReward(1.5, PARTS), {"program": REPORT})


class Endpoint(ThreadingHTTPServer):
    """Answers chat completions with ``reply`` and ``status``; keeps the requests."""

    reply = "Return 0 for an empty list."
    status = 200
    requests: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({"path": self.path, "key": self.headers["Authorization"], **body})
        message = {"role": "assistant", "content": self.server.reply}
        answer = {
            "id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }  # fmt: skip
        data = json.dumps(answer if self.server.status == 200 else {"error": {"message": "no such model"}}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    _ask.cache_clear()  # of another test's endpoint, which may have had the same port
    with Endpoint(("127.0.0.1", 0), Handler) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def env(port: int, **expert: object) -> CodingEnv:
    fields = {"model": "wise", "base_url": f"http://127.0.0.1:{port}/v1", **expert}
    return CodingEnv.model_validate({"feedback": "expert_edits", "num_turns": 3, "expert": fields})


def feedback(env: CodingEnv, role: str, agent: str, turns: int = 1) -> str:
    return env.observe(PROBLEM, role, [TURN] * turns, agent).messages[-1].content


def test_edits_reach_the_agent_they_are_for(endpoint: Endpoint) -> None:
    expected = (
        "A reviewer proposes:\nReturn 0 for an empty list.\nRevise your function `{}`. Answer with Python code only."
    )
    assert feedback(env(endpoint.server_port), "helper", "ada") == expected.format("aux")
    assert feedback(env(endpoint.server_port), "main", "bob") == expected.format("f")
    helper, main = endpoint.requests
    assert helper["path"] == "/v1/chat/completions"
    assert (helper["model"], helper["temperature"], helper["max_tokens"]) == ("wise", 0.0, 256)
    for request, function in ((helper, "aux"), (main, "f")):
        system, user = (message["content"] for message in request["messages"])
        assert "`f`" in system
        assert f"Propose edits to the function `{function}`" in user
        assert PROBLEM.prompt.rstrip() in user
        assert user.index("HELPERTEXT") < user.index("MAINTEXT")
        assert "assert f([]) == 0  # got 1" in user


def test_equal_questions_are_asked_once(endpoint: Endpoint) -> None:
    asked = env(endpoint.server_port)
    feedback(asked, "helper", "ada")
    feedback(asked, "helper", "ada", turns=2)
    assert len(endpoint.requests) == 1


def test_no_question_before_the_first_turn(endpoint: Endpoint) -> None:
    env(endpoint.server_port).observe(PROBLEM, "main", [], "bob")
    assert endpoint.requests == []


def test_answers_are_cut_and_may_be_empty(endpoint: Endpoint) -> None:
    endpoint.reply = "x" * 2 * MAX_CHARS
    assert feedback(env(endpoint.server_port), "helper", "ada").count("x") == MAX_CHARS + 1  # one in "aux"
    endpoint.reply = ""
    assert feedback(env(endpoint.server_port, max_tokens=7), "helper", "ada").startswith(
        "A reviewer proposes no edits."
    )


def test_the_key_comes_from_the_environment(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "abc")
    feedback(env(endpoint.server_port), "main", "bob")
    assert endpoint.requests[0]["key"] == "Bearer abc"


def test_a_refused_request_is_the_users_to_mend(endpoint: Endpoint) -> None:
    endpoint.status = 404
    with pytest.raises(ValueError, match=r"env\.expert: .* refuses a request to 'wise'.*no such model"):
        feedback(env(endpoint.server_port), "main", "bob")
    assert len(endpoint.requests) == 1


def test_a_failing_endpoint_is_tried_again(endpoint: Endpoint) -> None:
    endpoint.status = 500
    with pytest.raises(ConnectionError, match=r"env\.expert\.base_url: .* does not answer"):
        feedback(env(endpoint.server_port), "main", "bob")
    assert len(endpoint.requests) == 3


def test_no_endpoint_at_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConnectionError, match="start the server"):
        feedback(env(port), "main", "bob")


def test_an_expert_is_needed() -> None:
    with pytest.raises(ValidationError, match=r"set env\.expert\.model"):
        CodingEnv(feedback="expert_edits")
    with pytest.raises(ValidationError, match="for prompt 'instruct' only"):
        CodingEnv.model_validate({"feedback": "expert_edits", "prompt": "bare", "expert": {"model": "wise"}})


@pytest.fixture(scope="module")
def vllm_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A vLLM server of a tiny random model, named ``wise``."""
    from tests.tiny import tiny_base, tiny_config  # torch: not for the fast tests

    folder = tmp_path_factory.mktemp("expert")
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    tiny_base(folder / "base", tiny_config(max_length=2048), chat_template=template)
    [port] = find_free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "base")]
    command += ["--served-model-name", "wise", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True)
    try:
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield port
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_vllm_server_is_an_expert(vllm_port: int) -> None:
    text = feedback(env(vllm_port, max_tokens=16), "helper", "ada")
    assert text.startswith("A reviewer proposes")
    with pytest.raises(ValueError, match="The model `nobody` does not exist"):
        feedback(env(vllm_port, model="nobody"), "helper", "ada")
    with pytest.raises(ValueError, match="max_tokens=4096"):
        feedback(env(vllm_port, max_tokens=4096), "helper", "ada")
