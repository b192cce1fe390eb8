"""The routes of the gateway over HTTP, also as OpenAI's own client uses them."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from magrpo.model.lineup import Lineup
from magrpo.types import Action, Request, SamplingParams
from tests.gateway.playing import (
    SAMPLING,
    FakeModel,
    OpenGateway,
    list_texts,
    make_lineup,
    open_gateway,
    open_lineup,
)
from tests.processes import wait_until

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def gateway(model: FakeModel) -> Iterator[OpenGateway]:
    with open_gateway(model, models={"gpt-4o": "coder"}) as opened:
        yield opened


@pytest.fixture
def client(gateway: OpenGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any") as client:
        yield client


# ------------------------------------------------------------------------------------------------------- completions
def test_a_chat_completion(client: openai.OpenAI, gateway: OpenGateway) -> None:
    answer = client.chat.completions.create(model="planner", messages=HELLO)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "planner: hello")
    assert (choice.finish_reason, choice.logprobs, choice.message.tool_calls) == ("stop", None, None)
    [call] = gateway.session.seal()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(call.prompt_ids)
    assert answer.usage.completion_tokens == len(call.action.token_ids)
    assert answer.usage.total_tokens == len(call.prompt_ids) + len(call.action.token_ids)
    assert (call.agent, call.messages, call.overruled) == ("planner", tuple(HELLO), {})
    assert gateway.model.requests == [Request("planner", call.prompt_ids, SAMPLING, gateway.model.requests[0].seed)]


def test_a_streamed_chat_completion(client: openai.OpenAI, gateway: OpenGateway) -> None:
    events = [
        *client.chat.completions.create(
            model="coder", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
        )
    ]
    *pieces, last = events
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == sum(len(call.action.token_ids) for call in gateway.session.seal())
    texts, reasons = {0: "", 1: ""}, {}
    for event in pieces:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "coder: hello", 1: "coder: hello"}
    assert reasons == {0: "stop", 1: "stop"}
    assert pieces[0].choices[0].delta.role == "assistant"


def test_a_stream_without_usage_and_one_with_the_helper_of_the_client(client: openai.OpenAI) -> None:
    plain = [*client.chat.completions.create(model="coder", messages=HELLO, stream=True)]
    assert all(event.choices for event in plain)
    with client.chat.completions.stream(model="coder", messages=HELLO) as stream:
        assert stream.get_final_completion().choices[0].message.content == "coder: hello"


def test_completions_of_a_text(client: openai.OpenAI, gateway: OpenGateway, lineup: Lineup) -> None:
    answer = client.completions.create(model="coder", prompt="def f(", n=2, stop=": ")
    assert [(choice.text, choice.finish_reason, choice.index) for choice in answer.choices] == [
        ("coder", "stop", 0),
        ("coder", "stop", 1),
    ]
    calls = gateway.session.seal()
    assert [str(lineup.tokenizer("coder").decode([*call.prompt_ids])) for call in calls] == ["def f("] * 2
    gateway.session.is_sealed = False
    events = [*client.completions.create(model="coder", prompt=["def f("], stream=True)]
    assert "".join(choice.text for event in events for choice in event.choices) == "coder: def f("
    assert events[-1].choices[0].finish_reason == "stop"


def test_a_text_is_continued_with_all_spaces(tmp_path: Path) -> None:
    """Decoders such as Llama 2's drop the space that begins a text: continued code would lose a column."""
    make_lineup(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    body = {"model": "coder", "prompt": "def f():\n", "logprobs": 0}
    with open_gateway(FakeModel(open_lineup(tmp_path), lambda request, prompt: "    return 1")) as gateway:
        [choice] = gateway.send("v1/completions", body).body["choices"]
        assert gateway.chat().contents == ["   return 1"], "an answer is a text of its own"
        texts = list_texts(gateway.session.seal())
    assert choice["text"] == "    return 1"
    assert "".join(choice["logprobs"]["tokens"]) == "    return 1<|im_end|>"
    assert texts == ["    return 1", "   return 1"]


def test_the_async_client_and_equal_requests_as_separate_samples(gateway: OpenGateway) -> None:
    async def vote() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any") as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model="planner", messages=HELLO) for _ in range(4))
            )
            return [answer.id for answer in answers]

    assert len(set(asyncio.run(vote()))) == 4
    assert len({request.seed for request in gateway.model.requests}) == 4
    assert len(gateway.session.seal()) == 4


def test_models(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["planner", "coder", "gpt-4o"]
    assert client.models.retrieve("gpt-4o") == [*client.models.list()][2]
    with pytest.raises(openai.NotFoundError, match="no agent answers for model 'gpt-5'"):
        client.models.retrieve("gpt-5")


def test_what_is_not_served_is_named(client: openai.OpenAI, gateway: OpenGateway) -> None:
    served = "it serves /v1/chat/completions, /v1/completions and /v1/models: use the chat-completions model"
    with pytest.raises(openai.NotFoundError, match=f"the gateway does not serve POST /v1/responses; {served}"):
        client.responses.create(model="planner", input="hello")
    right = {"Authorization": f"Bearer {gateway.TOKEN}"}
    for path, headers in [("chat/completions", {}), ("/v1/embeddings", right), ("/s/secret/", {})]:
        answer = gateway.send(path, {}, headers)
        assert (answer.status, answer.body["error"]["code"]) == (404, "not_served")
    assert gateway.send("v1/chat/completions", method="GET").error.startswith("the gateway does not serve GET /v1/chat")


def test_agents_answer_for_model_names(gateway: OpenGateway, client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="gpt-4o", messages=HELLO).model == "gpt-4o"
    assert [request.agent for request in gateway.model.requests] == ["coder"]
    with pytest.raises(openai.NotFoundError, match=r"no agent answers for model 'gpt-5'.*planner, coder, gpt-4o"):
        client.chat.completions.create(model="gpt-5", messages=HELLO)


def test_n_gives_samples_with_seeds_of_their_own(gateway: OpenGateway) -> None:
    assert gateway.chat(n=3).contents == ["planner: hello"] * 3
    assert len({request.seed for request in gateway.model.requests}) == 3
    assert len(gateway.session.seal()) == 3


def test_stop_cuts_the_text_but_not_the_completion(gateway: OpenGateway) -> None:
    answer = gateway.chat(stop=["zzz", "lo", "hell"])
    assert answer.contents == ["planner: "]
    assert answer.body["choices"][0]["finish_reason"] == "stop"
    [call] = gateway.session.seal()
    assert call.action.text == "planner: hello", "the agent's action is all that was sampled"
    assert call.ends_early


def test_a_limit_of_tokens_may_be_smaller_only(gateway: OpenGateway) -> None:
    short = gateway.chat(max_tokens=4)
    assert short.contents == ["plan"]
    assert short.body["choices"][0]["finish_reason"] == "length"
    gateway.chat(max_completion_tokens=5, max_tokens=60)
    gateway.chat(max_tokens=SAMPLING.max_new_tokens)
    gateway.chat(max_tokens=100_000)
    limits = [request.sampling.max_new_tokens for request in gateway.model.requests]
    assert limits == [4, 5, SAMPLING.max_new_tokens, SAMPLING.max_new_tokens]
    calls = gateway.session.seal()
    assert [call.overruled for call in calls] == [{}, {}, {}, {"max_tokens": 100_000}]
    assert [call.ends_early for call in calls] == [True, True, False, False]


def test_sampling_is_that_of_the_run(gateway: OpenGateway) -> None:
    wanted = {
        "temperature": 0.1,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.2,
        "frequency_penalty": 0.5,
        "presence_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": 3.0},
    }
    gateway.chat(**wanted)
    neutral = {
        "temperature": 0.8,
        "top_p": 1,
        "top_k": 0,
        "min_p": 0,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
    }
    gateway.chat(**neutral)
    gateway.chat(**dict.fromkeys([*neutral, "n", "stream", "max_tokens", "stop", "seed", "logprobs"]))
    assert {request.sampling for request in gateway.model.requests} == {SAMPLING}
    assert [call.overruled for call in gateway.session.seal()] == [wanted, {}, {}]


def test_greedy_evaluations_stay_greedy(model: FakeModel) -> None:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=8)
    with open_gateway(model, greedy) as gateway:
        gateway.chat(temperature=1.0)
        assert model.requests[0].sampling == greedy
        assert gateway.session.seal()[0].overruled == {"temperature": 1.0}


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
    {"guided_json": {"type": "object"}},
    {"guided_choice": ["yes", "no"]},
    {"guided_regex": "a+"},
    {"guided_grammar": "root ::= x"},
    {"structured_outputs": {"regex": "a+"}},
    {"bad_words": ["hello"]},
    {"allowed_token_ids": [5]},
    {"min_tokens": 5},
    {"stop_token_ids": [5]},
    {"functions": [TOOL["function"]]},
    {"function_call": {"name": "add"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"documents": [{"text": "x"}]},
    {"reasoning_effort": "low"},
    {"continue_final_message": True},
]
TEXT_CONSTRAINTS: list[dict[str, Any]] = [
    {"guided_regex": "a+"},
    {"response_format": {"type": "json_object"}},
    {"n": 2, "best_of": 3},
    {"echo": True},
    {"suffix": "end"},
]


@pytest.mark.parametrize("fields", CONSTRAINTS)
def test_constrained_decoding_is_refused_or_ignored(hermes: Lineup, fields: dict[str, Any]) -> None:
    name = [*fields][-1]
    with open_gateway(FakeModel(hermes)) as gateway:
        answer = gateway.chat(**fields)
        assert answer.status == 400
        assert answer.error.startswith(f"{name}: not supported")
        assert "env.ignore_unsupported = true" in answer.error
        assert gateway.model.batches == []
    with open_gateway(FakeModel(hermes), ignore_unsupported=True) as gateway:
        assert gateway.chat(**fields).contents == ["planner: hello"]
        assert gateway.session.seal()[0].overruled == {name: fields[name]}


@pytest.mark.parametrize("fields", TEXT_CONSTRAINTS)
def test_texts_are_not_constrained_either(model: FakeModel, fields: dict[str, Any]) -> None:
    name, body = [*fields][-1], {"model": "planner", "prompt": "hello", **fields}
    with open_gateway(model) as gateway:
        answer = gateway.send("v1/completions", body)
        assert (answer.status, answer.body["error"]["code"]) == (400, "unsupported")
        assert answer.error.startswith(f"{name}: not supported")
    with open_gateway(model, ignore_unsupported=True) as gateway:
        assert gateway.send("v1/completions", body).status == 200
        assert gateway.session.seal()[0].overruled == {name: fields[name]}


def test_one_tool_call_at_most_cannot_be_had(hermes: Lineup) -> None:
    with open_gateway(FakeModel(hermes)) as gateway:
        assert gateway.chat(tools=[TOOL], parallel_tool_calls=False).status == 200
        assert gateway.chat(tools=[TOOL], parallel_tool_calls=True).status == 200
        assert [call.overruled for call in gateway.session.seal()] == [{"parallel_tool_calls": False}, {}]


def test_fields_that_constrain_nothing_are_accepted(gateway: OpenGateway) -> None:
    assert gateway.chat(response_format={"type": "text"}, tool_choice="auto", user="me", store=False).status == 200
    assert gateway.chat(tools=[TOOL], tool_choice="none").status == 200, "and no template is needed for them"
    neutral = {"min_tokens": 0, "bad_words": [], "guided_json": None, "function_call": "auto", "functions": []}
    assert gateway.chat(**neutral).status == 200
    text = {"model": "planner", "prompt": "hello", "n": 2, "best_of": 2, "echo": False, "suffix": ""}
    assert gateway.send("v1/completions", text).status == 200
    assert [call.overruled for call in gateway.session.seal()] == [{}] * 5


def test_log_probabilities(client: openai.OpenAI, gateway: OpenGateway) -> None:
    messages: list[Any] = [{"role": "user", "content": "né"}]
    answer = client.chat.completions.create(model="planner", messages=messages, logprobs=True)
    [call] = gateway.session.seal()
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.logprob for token in logprobs.content] == [*call.action.sampling_logps]
    assert "".join(token.token for token in logprobs.content) == "planner: né<|im_end|>"
    assert [(token.token, token.bytes) for token in logprobs.content[-4:-1]] == [
        ("n", [ord("n")]),
        ("", None),
        ("é", [0xC3, 0xA9]),
    ], "a character of two tokens"


def test_log_probabilities_of_a_text(client: openai.OpenAI, gateway: OpenGateway) -> None:
    answer = client.completions.create(model="coder", prompt="né(", logprobs=0)
    [call] = gateway.session.seal()
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [*call.action.sampling_logps]
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "coder: né(<|im_end|>"
    assert logprobs.text_offset == [*range(9), 8, 9, 10], "a token for each byte"
    assert len(answer.choices[0].text) == 10


def test_log_probabilities_end_where_a_stop_cuts_the_text(client: openai.OpenAI, gateway: OpenGateway) -> None:
    chat = client.chat.completions.create(model="planner", messages=HELLO, logprobs=True, stop="lo").choices[0]
    text = client.completions.create(model="planner", prompt="hello", logprobs=0, stop="lo").choices[0]
    assert (chat.message.content, text.text) == ("planner: hel", "planner: hel")
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    assert "".join(token.token for token in chat.logprobs.content) == "planner: hel"
    logps = [*gateway.session.seal()[0].action.sampling_logps[:12]]
    assert [token.logprob for token in chat.logprobs.content] == logps
    assert text.logprobs is not None
    assert (text.logprobs.tokens, text.logprobs.token_logprobs) == ([*"planner: hel"], logps)
    assert text.logprobs.text_offset == [*range(12)]


def test_code_runs_in_the_sandbox(gateway: OpenGateway) -> None:
    answer = gateway.send("run", {"source": "def f(): ...", "entry_point": "f", "test": "def check(f): ..."})
    assert (answer.status, answer.body["status"]) == (200, "pass")
    [execution] = gateway.executions
    assert (execution.source, execution.entry_point) == ("def f(): ...", "f")
    assert gateway.session.waited_s > 0, "the time does not count against the limit"
    assert gateway.session.num_asked == 0, "no agent was asked"
    whole = {"source": "def f(): ...", "entry_point": "f", "test": ""}
    for name in whole:
        answer = gateway.send("run", {key: value for key, value in whole.items() if key != name})
        assert (answer.status, f"missing required field `{name}`" in answer.error) == (400, True)
    assert "entry_point: must name a function" in gateway.send("run", {**whole, "entry_point": ""}).error


# ------------------------------------------------------------------------------------------------- sessions and access
def test_a_token_in_the_address_or_as_the_key(gateway: OpenGateway) -> None:
    body = {"model": "planner", "messages": HELLO}
    right = {"Authorization": f"Bearer {gateway.TOKEN}"}
    assert gateway.send("/v1/chat/completions", body, right).status == 200
    assert gateway.send("/v1/models", headers=right, method="GET").status == 200
    assert gateway.send("v1/chat/completions", body, {"Authorization": "Bearer whatever"}).status == 200
    wrong = [("/v1/chat/completions", {}), ("/v1/chat/completions", {"Authorization": "Bearer no"})]
    for path, headers in [*wrong, ("/s/no/v1/chat/completions", right), ("/s/no/run", {}), ("/run", {})]:
        answer = gateway.send(path, body, headers)
        assert answer.status == 401
        assert "use the base URL or the API key that the program was given" in answer.error
    assert len(gateway.model.requests) == 2


def test_a_sealed_session_refuses_everything(client: openai.OpenAI, gateway: OpenGateway) -> None:
    client.chat.completions.create(model="planner", messages=HELLO)
    calls = gateway.session.seal()
    requests: dict[str, dict[str, Any]] = {"chat/completions": {"messages": HELLO}, "completions": {"prompt": "x"}}
    for path, body in requests.items():
        assert gateway.send(f"v1/{path}", {"model": "planner", **body}).status == 409
    assert gateway.send("run", {"source": ""}).status == 409
    with pytest.raises(openai.ConflictError, match="the episode has ended"):
        client.chat.completions.create(model="planner", messages=HELLO)
    assert gateway.session.seal() == calls
    assert len(gateway.model.requests) == 1


def test_a_session_sealed_while_a_request_arrives(gateway: OpenGateway) -> None:
    body = json.dumps({"model": "planner", "messages": HELLO}).encode()
    connection = gateway.connect()
    connection.putrequest("POST", f"/s/{gateway.TOKEN}/v1/chat/completions")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders()
    connection.send(body[:10])
    assert gateway.send("v1/models", method="GET").status == 200, "the server has seen what was sent before"
    gateway.session.seal()
    connection.send(body[10:])
    assert connection.getresponse().status == 409
    connection.close()
    assert gateway.model.batches == []


def test_an_episode_may_not_ask_for_ever(model: FakeModel) -> None:
    limit = "of the 3 completions that env.max_calls allows; ask for fewer, or raise it"
    with open_gateway(model, max_calls=3) as gateway:
        assert gateway.chat(n=2).status == 200
        refused = gateway.chat(n=2)
        assert (refused.status, refused.error) == (429, f"n = 2: the episode has asked for 2 {limit}")
        assert gateway.chat().status == 200
        refused = gateway.chat()
        assert (refused.status, refused.error) == (429, f"n = 1: the episode has asked for 3 {limit}")
        assert len(gateway.session.seal()) == 3


def test_clients_do_not_repeat_what_is_refused_for_good(model: FakeModel) -> None:
    sent: list[httpx.Request] = []
    with open_gateway(model, max_calls=1) as gateway, httpx.Client(event_hooks={"request": [sent.append]}) as http:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", http_client=http)
        client.chat.completions.create(model="planner", messages=HELLO)
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="planner", messages=HELLO)
        gateway.session.seal()
        with pytest.raises(openai.ConflictError):
            client.chat.completions.create(model="planner", messages=HELLO)
    assert len(sent) == 3


# -------------------------------------------------------------------------------------------------- malformed requests
MALFORMED: list[tuple[str, Any, str]] = [
    ("chat/completions", b"", "the request cannot be read"),
    ("chat/completions", b"{", "the request cannot be read"),
    ("chat/completions", b"\xff\xfe", "the request cannot be read"),
    ("chat/completions", b"[" * 100_000, "the request cannot be read"),
    ("chat/completions", [], "Expected `object`"),
    ("chat/completions", {"messages": HELLO}, "missing required field `model`"),
    ("chat/completions", {"model": "planner"}, "missing required field `messages`"),
    ("chat/completions", {"model": "planner", "messages": []}, "messages: at least one is needed"),
    ("chat/completions", {"model": "planner", "messages": ["hi"]}, "Expected `object`"),
    ("chat/completions", {"model": "planner", "messages": [{"content": "hi"}]}, "messages: each needs a role"),
    ("chat/completions", {"model": "planner", "messages": [{"role": "user", "content": 5}]}, "content must be a text"),
    (
        "chat/completions",
        {"model": "planner", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "content must be a text, or a list of parts with texts",
    ),
    (
        "chat/completions",
        {"model": "planner", "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
        "a tool call needs a function with a name and arguments in JSON",
    ),
    (
        "chat/completions",
        {
            "model": "planner",
            "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        },
        "a tool call needs a function with a name and arguments in JSON",
    ),
    ("chat/completions", {"model": "planner", "messages": [{"role": "user", "tool_calls": 5}]}, "tool_calls"),
    (
        "chat/completions",
        {"model": "planner", "messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages: function_call is not supported; send tool_calls",
    ),
    ("chat/completions", {"model": "planner", "messages": HELLO, "n": 0}, "n = 0: must be at least 1"),
    ("chat/completions", {"model": "planner", "messages": HELLO, "n": "2"}, "Expected `int | null`"),
    ("chat/completions", {"model": "planner", "messages": HELLO, "max_tokens": 0}, "max_tokens = 0"),
    ("chat/completions", {"model": "planner", "messages": HELLO, "temperature": "hot"}, "Expected `float"),
    ("completions", {"model": "planner"}, "missing required field `prompt`"),
    ("completions", {"model": "planner", "prompt": ["a", "b"]}, "prompt: one text to a request"),
    ("completions", {"model": "planner", "prompt": [1, 2]}, "Expected `str`"),
    ("completions", {"model": "planner", "prompt": ""}, "the prompt is empty"),
    (
        "completions",
        {"model": "planner", "prompt": "<|im_start|>user\nhello<|im_end|>\n"},
        "prompt: contains the special token '<|im_start|>', which a text may not hold; send messages to /v1/chat/comp",
    ),
]


@pytest.mark.parametrize(("path", "body", "message"), MALFORMED, ids=[message for *_, message in MALFORMED])
def test_malformed_requests(gateway: OpenGateway, path: str, body: Any, message: str) -> None:
    answer = gateway.send(f"v1/{path}", body)
    assert answer.status == 400
    assert message in answer.error
    assert gateway.session.num_asked == 0
    assert gateway.chat().status == 200, "the next request is answered"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "messages",
    "n",
    "stop",
    "max_tokens",
    "seed",
    "tools",
    "tool_choice",
    "logit_bias",
    "stream_options",
    "model",
)


@pytest.fixture(scope="module")
def patient_gateway(hermes: Lineup) -> Iterator[OpenGateway]:
    """A gateway that never refuses a call because there were too many."""
    with open_gateway(FakeModel(hermes), max_calls=10**6) as opened:
        yield opened


@given(
    field=st.sampled_from(FIELDS),
    value=json_values,
    message=st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "name", "tool_call_id"]), json_values, max_size=3
    ),
)
def test_no_request_breaks_the_gateway(
    patient_gateway: OpenGateway, field: str, value: Any, message: dict[str, Any]
) -> None:
    body = {"model": "planner", "messages": [*HELLO, message], field: value}
    assert patient_gateway.send("v1/chat/completions", body).status in (200, 400, 404)


def test_a_request_that_is_too_long(gateway: OpenGateway) -> None:
    answer = gateway.send("v1/chat/completions", b" " * (64 * 2**20 + 1))
    assert (answer.status, answer.error) == (413, f"the request is longer than {64 * 2**20} bytes")


def test_prompts_must_fit_the_context_window(tmp_path: Any) -> None:
    lineup = make_lineup(tmp_path, window=128)
    with open_gateway(FakeModel(lineup)) as gateway:
        answer = gateway.chat("x" * 200)
        assert (answer.status, answer.body["error"]["code"]) == (400, "context_length_exceeded")
        assert "do not fit the context window of 128 tokens of agent 'planner'" in answer.error
        assert gateway.chat("x" * 70).status == 400, "the completion must fit, too"
        assert gateway.chat("x" * 70, max_tokens=8).status == 200
        assert gateway.session.num_asked == 1


# ----------------------------------------------------------------------------------------- broken connections, retries
@dataclass
class BlockedModel(FakeModel):
    """Answers once it is released."""

    is_asked: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def generate(self, requests: Any) -> list[Action]:
        self.is_asked.set()
        assert self.released.wait(300)
        return super().generate(requests)


def reset(connection: socket.socket) -> None:
    """Break a connection off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_before_the_answer(lineup: Lineup, stream: bool) -> None:
    model = BlockedModel(lineup)
    with open_gateway(model) as gateway:
        connection = gateway.connect()
        body = json.dumps({"model": "planner", "messages": HELLO, "stream": stream})
        connection.request("POST", f"/s/{gateway.TOKEN}/v1/chat/completions", body)
        assert model.is_asked.wait(300)
        reset(connection.sock)
        model.released.set()
        wait_until(lambda: gateway.session.calls)
        assert [call.action.text for call in gateway.session.seal()] == ["planner: hello"]


def test_a_client_that_goes_away_in_the_middle_of_a_stream(gateway: OpenGateway) -> None:
    connection = gateway.connect()
    body = json.dumps({"model": "planner", "messages": HELLO, "stream": True, "n": 50})
    connection.request("POST", f"/s/{gateway.TOKEN}/v1/chat/completions", body)
    assert connection.sock.recv(10)
    reset(connection.sock)
    assert gateway.chat().status == 200
    assert len(gateway.session.seal()) == 51


def test_a_request_that_is_sent_again_gets_the_same_answer(gateway: OpenGateway) -> None:
    first = gateway.chat(headers={"x-stainless-retry-count": "0"})
    again = gateway.chat(headers={"x-stainless-retry-count": "1"})
    assert again.body == first.body
    assert len(gateway.model.requests) == 1
    other = gateway.chat("another", {"x-stainless-retry-count": "1"})
    assert other.contents == ["planner: another"], "one whose first try never arrived is answered"
    assert gateway.chat().body["id"] != first.body["id"], "the same text without the mark is another sample"
    assert len(gateway.session.seal()) == 3


@pytest.mark.parametrize("num_requests", [1, 4])
def test_requests_that_are_sent_again_while_they_are_sampled(lineup: Lineup, num_requests: int) -> None:
    model = BlockedModel(lineup, lambda request, prompt: f"sample {request.seed}")
    with open_gateway(model) as gateway, ThreadPoolExecutor(3 * num_requests) as pool:
        first = [pool.submit(gateway.chat) for _ in range(num_requests)]
        wait_until(lambda: gateway.session.num_asked == num_requests)
        again = [
            [pool.submit(gateway.chat, headers={"x-stainless-retry-count": count}) for _ in range(num_requests)]
            for count in ("1", "2")
        ]
        gateway.send("v1/models", method="GET")
        model.released.set()
        texts = [sorted(answer.result().contents[0] or "" for answer in answers) for answers in (first, *again)]
        assert texts[0] == texts[1] == texts[2], "no two of them get the same completion"
        assert len(set(texts[0])) == num_requests
        assert len(model.requests) == len(gateway.session.seal()) == num_requests


def test_a_request_that_is_sent_again_after_equal_ones_were_answered(gateway: OpenGateway) -> None:
    gateway.chat()
    for _ in range(2):
        latest = gateway.chat()
        for count in ("1", "2"):
            assert gateway.chat(headers={"x-stainless-retry-count": count}).body == latest.body


def test_the_client_itself_repeats_a_request_whose_connection_broke(gateway: OpenGateway) -> None:
    """The first answer is lost on its way, so the client asks again."""
    lost: list[bytes] = []

    class LosingTransport(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if not lost:
                lost.append(response.read())
                raise httpx.ReadError("lost")
            return response

    with httpx.Client(transport=LosingTransport()) as http:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", http_client=http)
        answer = client.chat.completions.create(model="planner", messages=HELLO)
    assert answer.id == json.loads(lost[0])["id"]
    assert len(gateway.session.seal()) == 1


def test_stopping_does_not_wait_for_requests_that_never_end(model: FakeModel) -> None:
    with open_gateway(model) as gateway:
        connection = gateway.connect()
        connection.putrequest("POST", f"/s/{gateway.TOKEN}/v1/chat/completions")
        connection.putheader("Content-Length", "100")
        connection.endheaders()
        assert gateway.send("v1/models", method="GET").status == 200
    connection.close()
