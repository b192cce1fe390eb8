"""The engine ``transformers``: generates in the trainer's process from the trainer's own weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from magrpo.engines import check_prompts, make_action
from magrpo.interfaces import Engine, Listener, Progress
from magrpo.plugins import Plugin
from magrpo.types import Action, Request

if TYPE_CHECKING:
    from magrpo.policy import Policy


class TransformersEngine(Plugin):
    """Batched decoding with transformers, in the trainer's process. The default on CPU."""

    kind: str = "transformers"
    max_batch: int = Field(256, ge=1)
    """Maximum number of completions of one agent decoded at once. Affects only speed and memory."""

    def open(self, policy: Policy) -> LocalEngine:
        return LocalEngine(policy, self.max_batch)


@dataclass(frozen=True)
class LocalEngine:
    """An :class:`magrpo.interfaces.Engine` that shares the base model with the trainer's policy."""

    _policy: Policy
    _max_batch: int

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        from magrpo.engines.decoding import decode_batch, decoding_model  # defers torch and transformers

        check_prompts(self._policy, requests)
        actions: dict[int, Action] = {}
        # Siblings together, prompts of similar length together.
        by_prompt = sorted(enumerate(requests), key=lambda entry: (len(entry[1].prompt_ids), entry[1].prompt_ids))
        for agent in dict.fromkeys(request.agent for request in requests):
            stops = self._policy.stop_token_ids(agent)
            of_agent = [(i, request) for i, request in by_prompt if request.agent == agent]
            with decoding_model(self._policy, agent) as model:
                for start in range(0, len(of_agent), self._max_batch):
                    batch = of_agent[start : start + self._max_batch]
                    completions = decode_batch(model, [request for _, request in batch], stops, progress)
                    for (i, request), completion in zip(batch, completions, strict=True):
                        actions[i] = make_action(self._policy, request, completion, self._policy.version)
        return [actions[i] for i in range(len(requests))]

    def load(self, policy_version: int, weights: Mapping[str, Path]) -> None:
        """Load the weights only if the policy is at another version: an update in this process needs nothing."""
        if self._policy.version != policy_version:
            self._policy.load(policy_version, weights)

    def with_listener(self, listen: Listener) -> Engine:
        """See :class:`magrpo.interfaces.StreamsTokens`."""
        return StreamingEngine(self._policy, self._max_batch, listen)

    def sleep(self) -> None:
        """No-op: the weights are the trainer's."""

    def wake(self) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


@dataclass(frozen=True)
class StreamingEngine(LocalEngine):
    """The same engine, which decodes all agents side by side, a token of each in turn, and tells a listener."""

    _listen: Listener

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        from magrpo.engines.decoding import decode_steps, decoding_model  # defers torch and transformers

        policy = self._policy
        check_prompts(policy, requests)
        actions: dict[int, Action] = {}
        token_ids: list[list[int]] = [[] for _ in requests]
        with ExitStack() as models:
            decoding = {}
            for agent in dict.fromkeys(request.agent for request in requests):
                model = models.enter_context(decoding_model(policy, agent))
                numbers = [i for i, request in enumerate(requests) if request.agent == agent]
                of_agent = [requests[i] for i in numbers]
                decoding[agent] = numbers, decode_steps(model, of_agent, policy.stop_token_ids(agent), progress)
            while decoding:
                for agent, (numbers, steps) in list(decoding.items()):
                    try:
                        with policy.active(agent):
                            live, tokens = next(steps)
                    except StopIteration as end:
                        del decoding[agent]
                        for i, completion in zip(numbers, end.value, strict=True):
                            actions[i] = make_action(policy, requests[i], completion, policy.version)
                        continue
                    for row, token in zip(live.tolist(), tokens.tolist(), strict=True):
                        token_ids[numbers[row]].append(token)
                        text = policy.tokenizer(agent).decode(token_ids[numbers[row]], skip_special_tokens=True)
                        self._listen(agent, str(text))
        return [actions[i] for i in range(len(requests))]
