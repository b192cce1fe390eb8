"""The agents as a program sees them: addresses for any OpenAI client, and a small client of their own.

Uses the standard library only, because it is loaded in every episode.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class GatewayRefused(RuntimeError):
    """The gateway refused a request; the message says why."""


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent. ``base_url``, ``api_key`` and ``model`` are what any OpenAI client needs to ask it."""

    base_url: str
    api_key: str
    model: str

    def ask(self, messages: str | Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of the agent's answer to a text or to messages in OpenAI's form.

        ``options`` are further fields of the request, such as ``max_tokens``. Raises GatewayRefused.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": self.model, "messages": messages, **options}
        answer = post_json(f"{self.base_url}/chat/completions", body, self.api_key)
        return answer["choices"][0]["message"]["content"] or ""

    def client(self, **options: Any) -> Any:
        """An ``openai.OpenAI`` client that asks the agents."""
        from openai import OpenAI  # only programs that want it need openai

        return OpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    def async_client(self, **options: Any) -> Any:
        """An ``openai.AsyncOpenAI`` client that asks the agents."""
        from openai import AsyncOpenAI  # only programs that want it need openai

        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)


@dataclass(frozen=True)
class Agents(Mapping[str, Agent]):
    """The agents of an episode by name, and its seed."""

    url: str
    """Address of the episode at the gateway."""
    token: str
    names: Sequence[str]
    seed: int
    """Seed of the episode's own random numbers: ``random`` is seeded with it before the program is called."""

    def __getitem__(self, name: str) -> Agent:
        if name not in self.names:
            raise KeyError(f"no agent {name!r}; there are: {', '.join(self.names)}")
        return Agent(f"{self.url}/v1", self.token, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def run_code(self, source: str, entry_point: str, test: str) -> dict[str, Any]:
        """Run a program in the run's sandbox; returns its :class:`~magrpo.types.ExecutionReport` as a dict.

        ``test`` defines ``check(candidate)``, as in HumanEval, and is called with the function ``entry_point``, or is a
        list of asserts. The report has the status of each assert, and nothing that the program prints.
        """
        body = {"source": source, "entry_point": entry_point, "test": test}
        return post_json(f"{self.url}/run", body, self.token)

    def export(self) -> None:
        """Set the environment variables that OpenAI clients read."""
        os.environ["OPENAI_BASE_URL"] = f"{self.url}/v1"
        os.environ["OPENAI_API_KEY"] = self.token


def post_json(url: str, body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Post a JSON object and return the answer. Raises GatewayRefused with the message of an error."""
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with closing(connect(parts.hostname or "", parts.port)) as connection:
        connection.request("POST", parts.path, json.dumps(body), headers)
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    if response.status != http.HTTPStatus.OK:
        raise GatewayRefused(answer["error"]["message"])
    return answer


def preload_request_codec() -> None:
    """Load what the first request of a process loads, before processes are forked."""
    "localhost".encode("idna")  # the codec that socket imports to resolve a name
