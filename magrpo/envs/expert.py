"""The expert of feedback mode ``expert_edits``: a model that reads both completions and proposes edits to one of them.

Any OpenAI-compatible HTTP endpoint can serve it, for example another vLLM server.
"""

import os
from functools import lru_cache

from pydantic import Field

from magrpo.envs.prompts import PROMPTS
from magrpo.plugins import ConfigError, Section
from magrpo.types import Problem

MAX_CHARS = 4000
"""Longest answer of the expert, in characters; the rest is cut off."""


class Expert(Section):
    """The model that proposes edits."""

    model: str
    """Name of the model at the endpoint."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """OpenAI-compatible endpoint. Its API key, if any, is read from the environment variable OPENAI_API_KEY."""
    max_tokens: int = Field(256, ge=1)
    """Maximum length of an answer, in tokens."""
    timeout_s: float = Field(60.0, gt=0, le=10**6)
    """Seconds to wait for one answer. A failed request is retried twice."""

    def propose_edits(self, problem: Problem, role: str, *, helper: str, main: str, diagnosis: str) -> str:
        """Ask the expert for edits to the function that ``role`` wrote, decoded greedily.

        Answers are cached in this process, so an answer stays the same when later turns of an episode repeat it.

        Raises:
            ConnectionError: the endpoint does not answer, or fails.
            ConfigError: the endpoint rejects the request: wrong model name, wrong key, or prompt too long.
        """
        names = {"prompt": problem.prompt.rstrip("\n"), "entry_point": problem.entry_point}
        names |= {"helper": helper, "main": main, "diagnosis": diagnosis}
        names["function"] = "aux" if role == "helper" else problem.entry_point
        system, user = (PROMPTS["expert"][part].format(**names) for part in ("system", "user"))
        return _ask(self, system, user)


@lru_cache(maxsize=4096)
def _ask(expert: Expert, system: str, user: str) -> str:
    import openai  # optional dependency, installed by magrpo[expert]

    key = os.environ.get("OPENAI_API_KEY", "none")
    try:
        with openai.OpenAI(base_url=expert.base_url, api_key=key, timeout=expert.timeout_s, max_retries=2) as client:
            answer = client.chat.completions.create(
                model=expert.model,
                messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
                temperature=0.0,
                max_tokens=expert.max_tokens,
            )
    except (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError) as error:
        raise ConnectionError(
            f"env.expert.base_url: {expert.base_url} does not answer ({error}); start the server, or choose another "
            "env.feedback than expert_edits"
        ) from error
    except openai.APIStatusError as error:
        raise ConfigError(f"env.expert: {expert.base_url} refuses a request to {expert.model!r}: {error}") from error
    return (answer.choices[0].message.content or "").strip()[:MAX_CHARS]
