"""The transformers engine: generates in the trainer's process from the trainer's own weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from magrpo.engines.common import check_prompts, make_action
from magrpo.interfaces import Progress
from magrpo.plugins import Plugin
from magrpo.types import Action, Request

if TYPE_CHECKING:
    from magrpo.policy import Policy


class TransformersEngine(Plugin):
    """Batched decoding with transformers, in the trainer's process. The default on CPU."""

    kind: str = "transformers"
    max_batch: int = Field(256, ge=1)
    """Completions of one agent decoded at once; changes speed and memory only."""

    def open(self, policy: Policy) -> LocalEngine:
        """An engine on the live weights of ``policy``."""
        return LocalEngine(policy, self.max_batch)


class LocalEngine:
    """An :class:`magrpo.interfaces.Engine` on the trainer's own policy: the base model is in memory once."""

    def __init__(self, policy: Policy, max_batch: int) -> None:
        self._policy = policy
        self._max_batch = max_batch

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        """One completion for each request, in order.

        Raises:
            PromptTooLong: a prompt leaves no room for its completion; raised before anything is sampled.
            EngineError: an agent's logits are not finite.
        """
        from magrpo.engines.decoding import decode_batch, decoding_model

        check_prompts(self._policy, requests)
        actions: dict[int, Action] = {}
        for agent in dict.fromkeys(request.agent for request in requests):
            stops = self._policy.stop_token_ids(agent)
            with decoding_model(self._policy, agent) as model:
                for batch in self._batches(requests, agent):
                    chosen = [requests[i] for i in batch]
                    completions = decode_batch(model, chosen, stops, progress or (lambda _: None))
                    for i, completion in zip(batch, completions, strict=True):
                        actions[i] = make_action(self._policy, requests[i], completion, self._policy.version)
        return [actions[i] for i in range(len(requests))]

    def _batches(self, requests: Sequence[Request], agent: str) -> Iterator[list[int]]:
        """Indices of the agent's requests: siblings together, prompts of similar length together."""
        mine = [i for i, request in enumerate(requests) if request.agent == agent]
        mine.sort(key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids))
        for start in range(0, len(mine), self._max_batch):
            yield mine[start : start + self._max_batch]

    def load(self, policy_version: int, weights: Mapping[str, Path]) -> None:
        """Nothing to do after an update in this process; reads the folders if the policy is at another version."""
        if self._policy.version != policy_version:
            self._policy.load(policy_version, weights)

    def sleep(self) -> None:
        """Nothing to give: the weights are the trainer's."""

    def wake(self) -> None:
        """See :meth:`sleep`."""

    def close(self) -> None:
        """Nothing to stop."""
