"""Engines that generate completions; :class:`magrpo.interfaces.Engine` is what each of them does.

Begin with ``transformers.py``, which samples in the run's own process with the decoding of ``local/``. ``vllm.py`` has
servers instead (``vllm_server.py`` is their process, ``vllm_worker.py`` changes vLLM inside it), and ``auto.py``
chooses between the two. This module holds what they share: errors, the check of prompts before sampling, and making
actions after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from magrpo.errors import ConfigError
from magrpo.types import Action, Request

if TYPE_CHECKING:
    from magrpo.model.lineup import Lineup


class EngineError(RuntimeError):
    """The engine died, exceeded its deadline or produced invalid output. The message names the log file if any."""


class NonFiniteLogits(EngineError):
    """The weights give logits that are not finite. Another attempt would meet them again, so it is not retried."""


class PromptTooLong(ConfigError):
    """The prompt of ``request`` leaves no room for its completion. Raised before anything is sampled."""

    def __init__(self, message: str, request: Request) -> None:
        super().__init__(message)
        self.request = request

    def __reduce__(self) -> tuple[type[PromptTooLong], tuple[str, Request]]:
        return type(self), (str(self), self.request)


class Completion(NamedTuple):
    """The sample for one request: token ids, their log-probabilities and, if recorded, their support."""

    token_ids: Sequence[int]
    logps: Sequence[float]
    support: Sequence[Sequence[int]] = ()


def check_prompts(lineup: Lineup, requests: Sequence[Request]) -> None:
    """Raise ConfigError for an empty prompt, PromptTooLong for one that leaves no room for its completion."""
    limits = {agent: lineup.max_length(agent) for agent in {request.agent for request in requests}}
    for request in requests:
        length, new, limit = len(request.prompt_ids), request.sampling.max_new_tokens, limits[request.agent]
        if length == 0:
            raise ConfigError(f"agent {request.agent!r}: empty prompt; the environment must show the agent something")
        if length + new > limit:
            raise PromptTooLong(
                f"agent {request.agent!r}: a prompt of {length} tokens and rollout.max_new_tokens = {new} do not fit "
                f"the context window of {limit} tokens of {lineup.base(request.agent)!r}; lower "
                f"rollout.max_new_tokens, shorten the prompt or choose a base model with a longer context",
                request,
            )


def make_action(lineup: Lineup, request: Request, completion: Completion, version: int) -> Action:
    """Make the action of a completion. Raises NonFiniteLogits if a log-probability is not finite."""
    if not math.isfinite(sum(completion.logps)):  # as soon as one of them is not
        cause = "the weights have diverged: lower optim.lr or optim.max_grad_norm"
        if version == 0:
            cause = f"the weights of {lineup.base(request.agent)!r} are damaged, or too large for model.dtype"
        raise NonFiniteLogits(f"agent {request.agent!r}: logits are not finite at policy version {version}; {cause}")
    stopped = completion.token_ids[-1] in lineup.stop_token_ids(request.agent)
    return Action(
        agent=request.agent,
        text=str(lineup.tokenizer(request.agent).decode(list(completion.token_ids), skip_special_tokens=True)),
        token_ids=tuple(completion.token_ids),
        sampling_logps=tuple(completion.logps),
        finish_reason="stop" if stopped else "length",
        policy_version=version,
        support=tuple(map(tuple, completion.support)),
    )
