"""The engine ``transformers``: generates in the trainer's process from the trainer's own weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from pydantic import Field

from magrpo.engines import Completion, check_prompts, make_action
from magrpo.interfaces import Progress
from magrpo.plugins import Plugin
from magrpo.types import Action, Request

if TYPE_CHECKING:
    from magrpo.engines.local.ways import Way
    from magrpo.model.host import EngineHost
    from magrpo.model.policy import Policy


log = logging.getLogger(__name__)
_COST_ON_GPU = (
    "without vLLM a GPU samples for one agent after another: 2,800 tokens per second in 64 rows of a 0.5B model on an "
    "H200, where vLLM sampled 15,300 in 128 rows on an H100 (docs/gpus.md); install vLLM, and set engine.kind = vllm"
)


class TransformersEngine(Plugin):
    """Batched decoding with transformers, in the trainer's process. The default on CPU."""

    kind: str = "transformers"
    max_batch: int = Field(256, ge=1)
    """Maximum number of completions of one agent decoded at once. Affects only speed and memory."""

    def open(self, host: EngineHost) -> LocalEngine:
        if host.lineup.device.type == "cuda":
            log.warning(_COST_ON_GPU)
        return LocalEngine(host.open_policy(), self.max_batch)


def _count_threads() -> int:
    import torch  # half a second

    return torch.get_num_threads()


@dataclass(frozen=True)
class LocalEngine:
    """An :class:`magrpo.interfaces.Engine` on a policy in this process, usually the trainer's."""

    policy: Policy
    max_batch: int
    num_threads: int = field(default_factory=_count_threads)
    """Number of threads that torch computes with; agents decoded side by side share them."""
    lock: Lock = field(default_factory=Lock)
    """Held while the policy's weights are used."""
    ways: dict[str, Way] = field(default_factory=dict)
    """How each base that was sampled from is decoded."""

    def serve(self, version: int, weights: Mapping[str, Path]) -> LocalWeights:
        return LocalWeights(self, version, dict(weights))

    def find_way(self, agent: str) -> Way:
        """Find out how the agent's base is decoded; warn once of a slow way. Call it while the weights are held.

        Raises ConfigError if the base cannot be decoded.
        """
        from magrpo.engines.local.ways import choose_way  # defers torch, transformers

        base = self.policy.lineup.base(agent)
        if base not in self.ways:
            with self.policy.active(agent) as model:
                way = self.ways[base] = choose_way(model, self.policy.lineup.product_dtype)
                if way.notice:
                    log.warning("%s: %s %s", base, type(model).__name__, way.notice)
        return self.ways[base]

    def sleep(self) -> None:
        """Leave the memory of sampling to the update. The weights stay: they are the trainer's."""
        self.policy.lineup.release_cached_memory()

    def wake(self) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


@dataclass(frozen=True)
class LocalWeights:
    """A :class:`magrpo.interfaces.Served` that loads its weights when it generates, unless the policy holds them."""

    _engine: LocalEngine
    _version: int
    _weights: Mapping[str, Path]

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        check_prompts(self._engine.policy.lineup, requests)
        with self._hold_weights() as policy:
            return self._decode(policy, requests, progress)

    @contextmanager
    def _hold_weights(self) -> Iterator[Policy]:
        """The policy with these weights, for this thread only."""
        from magrpo.model.side_by_side import hold_cores  # defers torch

        policy = self._engine.policy
        with self._engine.lock, hold_cores(policy.device):
            if policy.sources != self._weights:
                policy.load(self._version, self._weights)
            yield policy

    def _decode(self, policy: Policy, requests: Sequence[Request], progress: Progress | None) -> list[Action]:
        from magrpo.engines.local.decoding import (  # defers torch, transformers
            can_decode_apart,
            decode_batch,
            decoding_model,
        )
        from magrpo.engines.local.ways import split_batches  # defers torch, transformers
        from magrpo.model.side_by_side import Stop, run_side_by_side  # defers torch

        # Keep siblings together, and prompts of similar length.
        by_prompt = sorted(enumerate(requests), key=lambda entry: (len(entry[1].prompt_ids), entry[1].prompt_ids))
        agents = list(dict.fromkeys(request.agent for request in requests))
        ways = {agent: self._engine.find_way(agent) for agent in agents}
        counting = Lock()

        def advance(finished: int) -> None:
            if progress:
                with counting:
                    progress(finished)

        def decode_agent(agent: str, stop: Stop) -> dict[int, Completion]:
            stops = policy.lineup.stop_token_ids(agent)
            of_agent = [(i, request) for i, request in by_prompt if request.agent == agent]
            completions: dict[int, Completion] = {}
            way = ways[agent]
            with ExitStack() as models:
                model = models.enter_context(decoding_model(policy, agent))
                for numbered in split_batches(of_agent, way, self._engine.max_batch):
                    numbers, batch = zip(*numbered, strict=True)
                    sampled = decode_batch(model, batch, stops, advance, stop, way.start)
                    completions |= zip(numbers, sampled, strict=True)
            return completions

        tasks = [partial(decode_agent, agent) for agent in agents]
        at_once = min(len(tasks), self._engine.num_threads) if can_decode_apart(policy) else 1
        parts = run_side_by_side(tasks, self._engine.num_threads, at_once)
        completions = dict(chain.from_iterable(part.items() for part in parts))
        return [make_action(policy.lineup, r, completions[i], self._version) for i, r in enumerate(requests)]

    def close(self) -> None:
        """No-op."""
