"""The wire format of OpenAI's chat completions and completions: requests in, answers and events out.

Pure functions. Fields of a request that are not listed here are ignored, as OpenAI-compatible servers do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from magrpo.text import replace_surrogates
from magrpo.types import Action, SamplingParams

_NEUTRAL: Mapping[str, Any] = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": None,
}
"""Fields that change the distribution, with a value that does not (None: the run's own, or none)."""
_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    **dict.fromkeys(
        (
            *("guided_json", "guided_choice", "guided_regex", "guided_grammar", "structured_outputs"),
            *("bad_words", "allowed_token_ids", "min_tokens", "stop_token_ids", "ignore_eos"),
            *("use_beam_search", "length_penalty", "logits_processors", "structural_tag", "thinking_token_budget"),
            *("functions", "chat_template", "chat_template_kwargs", "continue_final_message", "echo", "suffix"),
            *("documents", "reasoning_effort", "truncate_prompt_tokens"),
        ),
        (False, 0, "", [], {}),
    ),
}
"""Fields of OpenAI and vLLM that constrain decoding or reshape the prompt, with values besides None that do not."""

FormT = TypeVar("FormT")


class RequestRefused(Exception):
    """A request that is not answered, with the HTTP status and OpenAI's type of error."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> bytes:
        """The error in OpenAI's form."""
        error = {"message": str(self), "type": "invalid_request_error", "code": self.code, "param": None}
        return msgspec.json.encode({"error": error})


class _Options(msgspec.Struct):
    """What both kinds of requests have."""

    model: str
    n: int | None = 1
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    best_of: int | None = None
    unsupported: dict[str, Any] = {}
    """What the request asks for by :data:`_UNSUPPORTED`, and ``best_of`` above ``n``; set when it was read."""

    @property
    def num_answers(self) -> int:
        """Number of completions."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        """Texts that end the answer, though not the completion."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ChatRequest(_Options, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None


class TextRequest(_Options, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[str]
    logprobs: int | None = None


class CodeRequest(msgspec.Struct):
    """The body of ``POST /run``: a program to run in the sandbox."""

    source: str
    entry_point: str
    test: str


def read_chat_request(body: bytes) -> ChatRequest:
    """Read and check a chat request. Raises RequestRefused."""
    request = _decode(body, ChatRequest)
    request.messages = [_read_message(message) for message in request.messages]
    if not request.messages:
        raise RequestRefused(400, "messages: at least one is needed")
    return request


def read_text_request(body: bytes) -> TextRequest:
    """Read and check a request for the continuation of a text. Raises RequestRefused."""
    request = _decode(body, TextRequest)
    if isinstance(request.prompt, list):
        if len(request.prompt) != 1:
            raise RequestRefused(400, "prompt: one text to a request")
        (request.prompt,) = request.prompt
    return request


def read_code_request(body: bytes) -> CodeRequest:
    """Read a request to run a program. Raises RequestRefused."""
    request = _decode(body, CodeRequest)
    if not request.entry_point:
        raise RequestRefused(400, "entry_point: must name a function of the source, which the test calls")
    return request


def _decode(body: bytes, form: type[FormT]) -> FormT:
    try:
        fields = replace_surrogates(json.loads(body))
        request = msgspec.convert(fields, form)
    except (ValueError, RecursionError) as error:  # msgspec's ValidationError is a ValueError
        raise RequestRefused(400, f"the request cannot be read: {error}") from None
    if isinstance(request, _Options):
        if request.num_answers < 1:
            raise RequestRefused(400, f"n = {request.n}: must be at least 1")
        request.unsupported = {
            name: fields[name]
            for name, neutral in _UNSUPPORTED.items()
            if fields.get(name) is not None and fields[name] not in neutral
        }
        if (request.best_of or 0) > request.num_answers:
            request.unsupported["best_of"] = request.best_of
    return request


def _read_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form that chat templates expect: text content, arguments of tool calls as objects."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestRefused(400, "messages: each needs a role")
    if message.get("function_call"):
        raise RequestRefused(400, "messages: function_call is not supported; send tool_calls")
    read: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _read_content(message.get("content")),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestRefused(400, "messages: tool_calls must be a list")
        read["tool_calls"] = [_read_tool_call(call) for call in calls]
    return read


def _read_content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise RequestRefused(400, "messages: content must be a text, or a list of parts with texts")
        texts.append(part["text"])
    return "".join(texts)


def _read_tool_call(call: Any) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = replace_surrogates(json.loads(arguments or "{}"))
    except (TypeError, KeyError, ValueError, RecursionError):
        raise RequestRefused(400, "messages: a tool call needs a function with a name and arguments in JSON") from None
    return {"id": call.get("id", ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def clamp_sampling(request: _Options, run: SamplingParams) -> tuple[SamplingParams, dict[str, Any]]:
    """The sampling parameters of a request: the run's, except for a smaller limit of tokens; and what was overruled."""
    own = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k}
    overruled: dict[str, Any] = {}
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name)
        changes_nothing = value in (None, neutral, own.get(name)) or value == {}  # {}: an empty logit_bias
        if not changes_nothing:
            overruled[name] = value
    limit = request.max_tokens
    if isinstance(request, ChatRequest):
        if request.tools and request.parallel_tool_calls is False:
            overruled["parallel_tool_calls"] = False
        if request.max_completion_tokens is not None:
            limit = request.max_completion_tokens
    if limit is None or limit == run.max_new_tokens:
        return run, overruled
    if limit < 1:
        raise RequestRefused(400, f"max_tokens = {limit}: must be at least 1")
    if limit > run.max_new_tokens:
        overruled["max_tokens"] = limit
    return replace(run, max_new_tokens=min(limit, run.max_new_tokens)), overruled


class Answered(NamedTuple):
    """One completion as its client sees it."""

    seed: int
    """The completion's seed, from which ids are made: unlike its number, no other agent's requests change it."""
    action: Action
    message: Mapping[str, Any]
    """``content`` and perhaps ``tool_calls``, whose arguments are objects."""
    was_cut: bool
    """Whether the client sees only what stands before a stop."""
    tokens: Sequence[str] | None
    """The text that each token adds, up to a stop; None if log-probabilities were not asked for."""

    @property
    def logps(self) -> Sequence[float]:
        """The log-probability of each of ``tokens``."""
        return self.action.sampling_logps[: len(self.tokens or ())]


Finish = Literal["stop", "length", "tool_calls"]


def cut_text(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of ``stops``, and whether one was found."""
    found = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def _list_tool_calls(answered: Answered) -> list[dict[str, Any]]:
    return [
        {
            # Templates may show ids to the agent, and those of Mistral take nine letters and digits only.
            "id": sha256(f"{answered.seed}/{index}".encode()).hexdigest()[:9],
            "index": index,
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"].get("arguments", {})),
            },
        }
        for index, call in enumerate(answered.message.get("tool_calls") or [])
    ]


def _chat_logprobs(answered: Answered) -> dict[str, Any] | None:
    if answered.tokens is None:
        return None
    return {
        "content": [
            {"token": token, "logprob": logp, "bytes": list(token.encode()) or None, "top_logprobs": []}
            for token, logp in zip(answered.tokens, answered.logps, strict=True)
        ]
    }


def _text_logprobs(answered: Answered) -> dict[str, Any] | None:
    if answered.tokens is None:
        return None
    ends = list(accumulate(map(len, answered.tokens)))
    return {
        "tokens": answered.tokens,
        "token_logprobs": answered.logps,
        "text_offset": [0, *ends[:-1]],
        "top_logprobs": None,
    }


def _describe_answer(
    request: _Options, choices: Sequence[Mapping[str, Any]], prompt_tokens: int, answers: Sequence[Answered]
) -> dict[str, Any]:
    """What answers of both kinds say besides their id."""
    sampled = sum(len(answered.action.token_ids) for answered in answers)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}
    return {"created": int(time.time()), "model": request.model, "choices": choices, "usage": usage}


def make_chat_answer(
    request: ChatRequest, number: int, prompt_tokens: int, answers: Sequence[Answered]
) -> dict[str, Any]:
    """The answer to a chat request. ``number``: its number in the episode, for ids."""
    choices = []
    for index, answered in enumerate(answers):
        content = str(answered.message.get("content") or "")
        calls = _list_tool_calls(answered)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if answered.message.get("reasoning_content"):
            message["reasoning_content"] = answered.message["reasoning_content"]
        finish: Finish = "stop" if answered.was_cut else answered.action.finish_reason
        if calls:
            message["tool_calls"], finish = calls, "tool_calls"
        logprobs = _chat_logprobs(answered)
        choices.append({"index": index, "message": message, "finish_reason": finish, "logprobs": logprobs})
    facts = {"id": f"chatcmpl-{number}", "object": "chat.completion"}
    return facts | _describe_answer(request, choices, prompt_tokens, answers)


def make_text_answer(
    request: TextRequest, number: int, prompt_tokens: int, answers: Sequence[Answered]
) -> dict[str, Any]:
    """The answer to a request for the continuation of a text."""
    choices = []
    for index, answered in enumerate(answers):
        finish: Finish = "stop" if answered.was_cut else answered.action.finish_reason
        text, logprobs = answered.message["content"], _text_logprobs(answered)
        choices.append({"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs})
    facts = {"id": f"cmpl-{number}", "object": "text_completion"}
    return facts | _describe_answer(request, choices, prompt_tokens, answers)


def stream_events(answer: Mapping[str, Any], with_usage: bool) -> Iterator[bytes]:
    """A whole answer as server-sent events: what a client that streams expects, in a few pieces."""
    is_chat = answer["object"] == "chat.completion"
    base = {
        "id": answer["id"],
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": answer["created"],
        "model": answer["model"],
    }
    for choice in answer["choices"]:
        shown = {"index": choice["index"], "finish_reason": None, "logprobs": choice["logprobs"]}
        piece: dict[str, Any] = {"delta": choice["message"]} if is_chat else {"text": choice["text"]}
        yield _event({**base, "choices": [{**shown, **piece}]})
        ending: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        finish = {"index": choice["index"], "finish_reason": choice["finish_reason"], "logprobs": None}
        yield _event({**base, "choices": [{**finish, **ending}]})
    if with_usage:
        yield _event({**base, "choices": [], "usage": answer["usage"]})
    yield b"data: [DONE]\n\n"


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def wants_usage(request: _Options) -> bool:
    """Whether a stream ends with the number of tokens."""
    return bool(request.stream_options and request.stream_options.get("include_usage"))
