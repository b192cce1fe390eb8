"""The engine over samplers: actors that each hold an engine with all agents, and sample a share of each batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from magrpo.checks.runners import open_engine_plugin, serve_weights
from magrpo.cluster.connection import Cluster, StartedActor, decide_gpus, prepare_actor, start_actor
from magrpo.cluster.dealing import MAX_RESTARTS, Crew, NotOpen
from magrpo.config.place import Place
from magrpo.config.run import RunConfig
from magrpo.engines import EngineError, check_prompts
from magrpo.interfaces import Engine, Progress, Served
from magrpo.model.host import EngineHost
from magrpo.model.lineup import Lineup
from magrpo.model.policy import Policy
from magrpo.types import Action, Request

_ANSWER_S = 5.0
"""Seconds within which samplers must say how far they are; nothing depends on it but the progress that is shown."""


@dataclass(frozen=True)
class SamplerSetting:
    """What all samplers of a run are opened with."""

    config: RunConfig
    num_served: int
    num_threads: int
    gpus: int
    owns_gpus: bool


@dataclass(frozen=True)
class Share:
    """Requests of a batch for one sampler, and the weights that answer them."""

    number: int
    """Of the weights."""
    version: int
    weights: Mapping[str, Path]
    requests: Sequence[Request]


class SamplerActor(StartedActor):
    """The actor. It forgets everything when it is restarted, so that each call says which weights it needs."""

    def __init__(self, setting: SamplerSetting) -> None:
        self._setting = setting
        self._engine: Engine | None = None
        self._served: dict[int, Served] = {}
        self._num_finished = 0

    def open(self) -> None:
        """Open the engine, or wake it."""
        setting = self._setting
        prepare_actor(setting.num_threads, setting.gpus)
        if self._engine is not None:
            self._engine.wake()
            return
        config = setting.config
        lineup = Lineup.open(config.agents, config.model, config.lora)
        host = EngineHost(
            lineup,
            lambda: Policy.of(lineup, config.train.seed),
            num_served=setting.num_served,
            gpus=max(setting.gpus, 1),
            owns_gpus=setting.owns_gpus,
        )
        self._engine = open_engine_plugin(config.engine, host)

    def work(self, share: Share) -> list[Action]:
        """Sample a completion for each request. Raises NotOpen if the actor has been restarted."""
        if self._engine is None:
            raise NotOpen
        prepare_actor(self._setting.num_threads, self._setting.gpus)
        self._num_finished = 0
        if share.number not in self._served:
            self._served[share.number] = serve_weights(self._engine, share.version, share.weights)
        return self._served[share.number].generate(share.requests, self._count)

    def forget(self, number: int) -> None:
        """Forget weights that are no longer needed."""
        if number in self._served:
            self._served.pop(number).close()

    def sleep(self) -> None:
        """Let the engine sleep until the next :meth:`open`."""
        if self._engine is not None:
            self._engine.sleep()

    @ray.method(concurrency_group="watch")
    def count_finished(self) -> int:
        """The number of completions that are done of the share at work."""
        return self._num_finished

    def _count(self, finished: int) -> None:
        self._num_finished += finished


class SamplerEngine:
    """An :class:`magrpo.interfaces.Engine` whose samplers are Ray actors.

    Args:
        num_served: Number of sets of weights that are open at once.
    """

    def __init__(self, cluster: Cluster, place: Place, config: RunConfig, lineup: Lineup, num_served: int) -> None:
        self._lineup = lineup
        self._numbers = count()
        gpus = decide_gpus(place.samplers.gpus, config.model.device)
        setting = SamplerSetting(config, num_served, torch.get_num_threads(), gpus, owns_gpus=not place.colocate)
        options: dict[str, Any] = {"max_restarts": MAX_RESTARTS, "concurrency_groups": {"watch": 1}}
        places = cluster.choose_options(place, place.samplers.count, gpus)
        actors = [start_actor(SamplerActor, {**options, **at}, setting) for at in places]
        self._crew = Crew(cluster, "samplers", actors, EngineError)
        self._crew.open()

    def serve(self, version: int, weights: Mapping[str, Path]) -> SampledWeights:
        folders = {agent: folder.resolve() for agent, folder in weights.items()}
        return SampledWeights(self, next(self._numbers), version, folders)

    def generate(self, served: SampledWeights, requests: Sequence[Request], progress: Progress | None) -> list[Action]:
        """One completion for each request, in order. Raises EngineError if three samplers die over one share."""
        check_prompts(self._lineup, requests)
        shares = split_requests(requests, len(self._crew.actors))
        pieces = [
            Share(served.number, served.version, served.weights, [requests[i] for i in share]) for share in shares
        ]
        counter = _SharedCounter(progress)
        actions: dict[int, Action] = {}
        with closing(self._crew.deal(pieces, counter.watch)) as results:
            for number, result in results:
                if isinstance(result, EngineError):
                    raise result
                actions |= zip(shares[number], result, strict=True)
                counter.finish(len(result))
        return [actions[i] for i in range(len(requests))]

    def forget(self, number: int) -> None:
        with self._crew.cluster.hold(EngineError("the samplers were closed")):
            for actor in self._crew.actors:
                actor.forget.remote(number)

    def sleep(self) -> None:
        self._crew.call_present("sleep")

    def wake(self) -> None:
        """No-op: the next batch wakes the samplers."""

    def close(self) -> None:
        """Kill the samplers. May be called twice."""
        self._crew.close()


@dataclass(frozen=True)
class SampledWeights:
    """A :class:`magrpo.interfaces.Served`, which samplers load when they first need it."""

    _engine: SamplerEngine
    number: int
    version: int
    weights: Mapping[str, Path]

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        """See :meth:`SamplerEngine.generate`."""
        return self._engine.generate(self, requests, progress)

    def close(self) -> None:
        self._engine.forget(self.number)


@dataclass
class _SharedCounter:
    """Reports completions of samplers once, also if a share starts over on another sampler."""

    progress: Progress | None
    num_done: int = 0
    """Of shares that are done."""
    num_reported: int = 0

    def finish(self, completions: int) -> None:
        self.num_done += completions
        self._report(self.num_done)

    def watch(self, at_work: Sequence[tuple[Any, int]]) -> None:
        """Ask the samplers how far they are."""
        try:
            counts = ray.get([actor.count_finished.remote() for actor, _ in at_work], timeout=_ANSWER_S)
        except (RayError, GetTimeoutError):  # one of them has died, or is too busy to answer
            return
        self._report(self.num_done + sum(counts))

    def _report(self, total: int) -> None:
        if self.progress is not None and total > self.num_reported:
            self.progress(total - self.num_reported)
            self.num_reported = total


def split_requests(requests: Sequence[Request], num_shares: int) -> list[list[int]]:
    """The numbers of the requests in each share.

    Siblings of a prompt stay together, since an engine processes their prompt once; each prompt goes to the share with
    the fewest tokens so far.
    """
    by_prompt: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for i, request in enumerate(requests):
        by_prompt[request.agent, tuple(request.prompt_ids)].append(i)
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    tokens = [0] * num_shares
    for siblings in by_prompt.values():
        smallest = tokens.index(min(tokens))
        shares[smallest] += siblings
        tokens[smallest] += sum(requests[i].sampling.max_new_tokens for i in siblings)
    return [share for share in shares if share]
