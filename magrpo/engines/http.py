"""The client of one vLLM server: token ids in, token ids and log-probabilities out, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from magrpo.engines import Completion
from magrpo.engines.compact_answers import COMPACT, ROUTES, CompactAnswer
from magrpo.engines.probes import Probe
from magrpo.types import Request

_CONNECT_S = 10.0
_KEEP_ALIVE_S = 4.0
"""A vLLM server closes a connection that is idle for 5 s."""
GENERATE = "/inference/v1/generate"
_NO_NUMBER = -9999.0
"""What vLLM sends in place of a log-probability that is not finite."""
_DECODE_COMPACT = msgspec.msgpack.Decoder(CompactAnswer).decode
AnswerT = TypeVar("AnswerT")


class ServerFailed(Exception):
    """A server did not answer, or not as it must. The same question may be put to another server."""


class WeightsMissing(ServerFailed):
    """A server does not have the weights that a request names."""


class Refused(Exception):
    """A server refuses a request that no other would accept: wrong key, or wrong settings of the server."""


class _ConnectionWasClosed(ServerFailed):
    """The server closed a connection before any part of its answer."""


class Model(msgspec.Struct, frozen=True):
    """A base model or an adapter that a server has."""

    id: str
    root: str = ""
    parent: str | None = None
    """The base of an adapter; None: this is a base."""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


class _Token(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Token]


class _Span(msgspec.Struct, gc=False):
    version: str


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    model: str
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _PromptToken] | None] | None = None


class _PromptToken(msgspec.Struct, gc=False):
    logprob: float


class _Problem(msgspec.Struct):
    message: str


class _ErrorAnswer(msgspec.Struct):
    error: _Problem | str


def open_session() -> aiohttp.ClientSession:
    """Connections to all servers, as many as there are requests in flight. Call it on the loop that uses them."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S))


class ServerClient:
    """One vLLM server. Methods raise ServerFailed if it fails, Refused if it rejects what is asked."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None, deadline_s: float) -> None:
        self.url = url
        self.is_extended = False
        """Whether it has the paths of ``magrpo.engines.vllm_routes``."""
        self._session, self._deadline_s = session, deadline_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def generate(
        self, model: str, request: Request, stop_token_ids: Sequence[int], version: str | None = None
    ) -> Completion:
        """The completion of ``request`` by the adapter or base called ``model``, with its support if it asks for it.

        Args:
            version: The name of the base's weights; None: they never change.
        """
        body = make_body(model, request, stop_token_ids)
        recorded = request.sampling.records_support
        if self.is_extended:
            path = f"{COMPACT}?support=true" if recorded else COMPACT
            finish_reason, completion = self._unpack(await self._post(path, body, self._deadline_s), model, version)
        else:
            finish_reason, completion = _read_choice((await self._ask(body, version)).choices[0])
        token_ids, logps, support = completion
        if finish_reason not in ("stop", "length") or not token_ids:
            raise ServerFailed(f"{self.url} aborted a completion ({finish_reason})")
        if len(logps) != len(token_ids):
            raise ServerFailed(f"{self.url} sent no log-probabilities for its tokens")
        if recorded and len(support) != len(token_ids):
            raise ServerFailed(f"{self.url} sent no support for its tokens")
        if not min(logps) > _NO_NUMBER:
            logps = [_read_logp(logp) for logp in logps]
        return Completion(token_ids, logps, support)

    async def score(self, model: str, probe: Probe, version: str | None = None) -> list[float]:
        """Log-probabilities of the tokens of ``probe`` at temperature 1 by ``model``; see :meth:`generate`."""
        sampling = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"model": model, "token_ids": [*probe.prompt_ids, *probe.token_ids], "sampling_params": sampling}
        answer = await self._ask(body, version)
        scored = (answer.prompt_logprobs or [])[len(probe.prompt_ids) :]
        if len(scored) != len(probe.token_ids):
            raise ServerFailed(f"{self.url} sent no log-probabilities for a prompt")
        logps = []
        for token, entries in zip(probe.token_ids, scored, strict=True):
            if entries is None or str(token) not in entries:
                raise ServerFailed(f"{self.url} sent no log-probability for a token of the prompt")
            logps.append(_read_logp(entries[str(token)].logprob))
        return logps

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load the adapter in ``folder``, a path on the server's machine, under ``name``."""
        try:
            await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, self._deadline_s)
        except WeightsMissing:
            raise ServerFailed(
                f"{self.url} cannot load adapters, or cannot see {folder}: start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, on a machine that mounts the run directory"
            ) from None

    async def unload_adapter(self, name: str) -> None:
        """Forget the adapter called ``name``."""
        try:
            await self._post("/v1/unload_lora_adapter", {"lora_name": name}, self._deadline_s)
        except WeightsMissing:
            return

    async def load_full(self, name: str, folder: Path) -> None:
        """Replace the base by the full copy in ``folder``, a path on the server's machine; answers then name it."""
        try:
            await self._post(f"{ROUTES}/load", {"name": name, "folder": str(folder)}, self._deadline_s)
        except WeightsMissing as error:
            raise ServerFailed(str(error)) from None

    async def find_extension(self) -> None:
        """Learn whether the server has magrpo's paths; get log-probabilities from before truncation, if so."""
        try:
            await self._post(f"{ROUTES}/watch", {}, self._deadline_s)
        except WeightsMissing:
            self.is_extended = False
        else:
            self.is_extended = True

    async def list_models(self) -> list[Model]:
        """The bases and adapters that the server has."""
        return self._decode(await self._send("GET", "/v1/models", None, _CONNECT_S), _Models).data

    async def check_health(self, deadline_s: float) -> None:
        """Return if the server and its engine say they are well within ``deadline_s`` seconds."""
        await self._send("GET", "/health", None, deadline_s)

    async def sleep(self) -> None:
        """Release GPU memory. Needs a server in development mode."""
        await self._post("/sleep?level=1", {}, self._deadline_s)

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        await self._post("/wake_up", {}, self._deadline_s)

    async def _ask(self, body: Mapping[str, object], version: str | None) -> _Answer:
        answer = self._decode(await self._post(GENERATE, body, self._deadline_s), _Answer)
        if len(answer.choices) != 1:
            raise ServerFailed(f"{self.url} sent {len(answer.choices)} completions for one request")
        versions = [span.version for span in answer.choices[0].weight_versions or ()]
        self._check_source(body["model"], version, answer.model, versions)
        return answer

    def _unpack(self, data: bytes, model: str, version: str | None) -> tuple[str, Completion]:
        """The finish reason and the completion of a compact answer."""
        try:
            answer = _DECODE_COMPACT(data)
            completion = answer.unpack()
        except (msgspec.DecodeError, ValueError) as error:
            raise ServerFailed(f"{self.url} sent an answer that cannot be read ({error})") from None
        self._check_source(model, version, answer.model, answer.versions)
        return answer.finish_reason, completion

    def _check_source(self, model: object, version: str | None, its_model: str, its_versions: list[str]) -> None:
        if its_model != model:
            raise ServerFailed(f"{self.url} was asked for {model} but answered with {its_model}")
        if version is not None and its_versions != [version]:
            raise WeightsMissing(f"{self.url} was asked for {version} but answered with {', '.join(its_versions)}")

    async def _post(self, path: str, body: Mapping[str, object], deadline_s: float) -> bytes:
        data = msgspec.json.encode(body)
        try:
            return await self._send("POST", path, data, deadline_s)
        except _ConnectionWasClosed:  # an idle one, as the request left; asking twice gives the same answer
            return await self._send("POST", path, data, deadline_s)

    async def _send(self, method: str, path: str, data: bytes | None, deadline_s: float) -> bytes:
        headers = {**self._headers, "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=min(_CONNECT_S, deadline_s))
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as answer:
                text = await answer.read()
        except TimeoutError:
            raise ServerFailed(f"{self.url} did not answer within {deadline_s:g} s") from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            kind = ServerFailed if isinstance(error, aiohttp.ClientConnectorError) else _ConnectionWasClosed
            raise kind(f"lost the connection to {self.url} ({error})") from None
        except aiohttp.ClientError as error:
            raise ServerFailed(f"lost the connection to {self.url} ({error})") from None
        if answer.status == 200:
            return text
        message = f"{self.url} answered {answer.status} ({_read_error(text)})"
        if answer.status == 404:
            raise WeightsMissing(message)
        if answer.status in (401, 403):
            raise Refused(f"{message}; put its key into the environment variable VLLM_API_KEY")
        if 400 <= answer.status < 500 and answer.status not in (408, 429):
            raise Refused(message)
        raise ServerFailed(message)

    def _decode(self, text: bytes, kind: type[AnswerT]) -> AnswerT:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            raise ServerFailed(f"{self.url} sent an answer that cannot be read ({error})") from None


def make_body(model: str, request: Request, stop_token_ids: Sequence[int]) -> dict[str, object]:
    """What is posted for the completion of ``request`` by ``model``; it sets all that a model's own files might set."""
    sampling = request.sampling
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": sampling.max_new_tokens,
        "seed": request.seed,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    return {"model": model, "token_ids": list(request.prompt_ids), "sampling_params": params}


def _read_choice(choice: _Choice) -> tuple[str, Completion]:
    tokens = choice.logprobs.content if choice.logprobs else []
    logps = [token.logprob for token in tokens]
    if [token.token_id for token in tokens] != choice.token_ids:
        logps = []
    return choice.finish_reason, Completion(choice.token_ids, logps)


def _read_logp(value: float) -> float:
    return value if value > _NO_NUMBER else float("nan")


def _read_error(text: bytes) -> str:
    try:
        error = msgspec.json.decode(text, type=_ErrorAnswer).error
    except msgspec.DecodeError:
        return text[:200].decode("utf-8", errors="replace")
    return (error if isinstance(error, str) else error.message)[:400]
