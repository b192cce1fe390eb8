"""Updates by ranks: actors that compute each update together, on this machine or on the nodes of a cluster.

Weights and samples are files that every rank can read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from magrpo.cluster.connection import Cluster, StartedActor, decide_gpus, describe_ray_error, prepare_actor, start_actor
from magrpo.config.place import Place
from magrpo.config.run import RunConfig
from magrpo.errors import ConfigError
from magrpo.interfaces import Progress
from magrpo.updates import UpdatesDied
from magrpo.updates.agent_batch import CompletionCounter
from magrpo.updates.memory_fitting import MicroBatchTooLarge
from magrpo.updates.rank import RankUpdates, join_group
from magrpo.updates.updater import NonFiniteLoss

DEADLINE_S = 1800.0
"""Seconds that ranks wait for one another, such as for one micro-batch, before the update fails."""
_ERRORS = (ConfigError, MicroBatchTooLarge, NonFiniteLoss, torch.cuda.OutOfMemoryError)
"""Errors of a rank that another attempt would meet again; the driver raises them as they are."""
_POLL_S = 0.5
_GRACE_S = 5.0
"""Seconds after the first error of a rank in which others may report theirs: that of a lost connection comes first."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSetting:
    """What all ranks of a run are opened with."""

    config: RunConfig
    count: int
    is_sharded: bool
    dump: Path
    num_threads: int
    gpus: int
    deadline_s: float


class Rank(StartedActor):
    """The actor: one rank. A dead rank ends its group, so that Ray does not restart it."""

    def __init__(self, setting: RankSetting, number: int) -> None:
        self._setting, self._number = setting, number
        self._updates: RankUpdates | None = None
        self._num_completions = 0

    def open_store(self) -> tuple[str, int]:
        """Open the store through which the ranks find each other, on the first rank; returns its address."""
        host = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, host: str, port: int) -> None:
        """Find the other ranks, and load the models."""
        setting = self._setting
        prepare_actor(setting.num_threads, setting.gpus)
        store = TCPStore(host, port, is_master=False)
        join_group(store, self._number, setting.count, setting.deadline_s)
        self._updates = RankUpdates(setting.config, setting.is_sharded, setting.dump)

    def update(self, samples: Path | None, checkpoint: Path | None, out: Path) -> dict[str, float]:
        """Load ``checkpoint`` if it is given, update on ``samples`` if they are, and write ``out``."""
        assert self._updates is not None, "joined before"
        prepare_actor(self._setting.num_threads, self._setting.gpus)
        metrics: dict[str, float] = {}
        self._num_completions = 0
        if checkpoint is not None:
            self._updates.load(checkpoint)
        if samples is not None:
            metrics = self._updates.update(samples, self._count)
        self._updates.save(out)
        return metrics

    @ray.method(concurrency_group="watch")
    def count_completions(self) -> int:
        """The number of completions that this rank has computed in the update at work."""
        return self._num_completions

    def _count(self, completions: int) -> None:
        self._num_completions += completions


class RanksUpdates:
    """An :class:`magrpo.interfaces.Updates` whose ranks start with the first update, and again after they died.

    Args:
        dump: Folder for batches with a non-finite loss.
    """

    def __init__(
        self, cluster: Cluster, place: Place, config: RunConfig, dump: Path, deadline_s: float = DEADLINE_S
    ) -> None:
        self._cluster, self._place, self._config = cluster, place, config
        self._dump, self._deadline_s = dump.resolve(), deadline_s
        self._ranks: Sequence[Any] = ()
        self._checkpoint: Path | None = None
        """The adopted checkpoint that the ranks hold. None: there are no ranks, or they hold an update that is not
        adopted."""

    def begin(self, out: Path) -> None:
        self.close()  # ranks that have trained no longer know where they began
        self._ask_ranks(None, None, out, None)

    def update(self, samples: Path, checkpoint: Path, out: Path, progress: Progress | None = None) -> dict[str, float]:
        """As :meth:`magrpo.interfaces.Updates.update`. Raises UpdatesDied if a rank died or hung."""
        counter = CompletionCounter(progress)
        while True:
            source = None if self._ranks and self._checkpoint == checkpoint else checkpoint
            try:
                return self._ask_ranks(samples, source, out, counter)
            except MicroBatchTooLarge as error:
                tokens = error.tokens_to_try
            log.warning(
                f"a rank is out of memory; all ranks restart with micro-batches of {tokens} tokens. Set "
                f"optim.micro_batch_tokens = {tokens} to start with them"
            )
            counter.restart()
            optim = self._config.optim.model_copy(update={"micro_batch_tokens": tokens})
            self._config = self._config.model_copy(update={"optim": optim})

    def adopt(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    def close(self) -> None:
        """Kill all ranks."""
        ranks, self._ranks, self._checkpoint = self._ranks, (), None
        if ranks:
            with self._cluster.hold(UpdatesDied("the run ends")):
                for rank in ranks:
                    ray.kill(rank)

    def _ask_ranks(
        self, samples: Path | None, checkpoint: Path | None, out: Path, counter: CompletionCounter | None
    ) -> dict[str, float]:
        """Have all ranks update, starting them if need be; returns the metrics."""
        self._checkpoint = None
        folders = [None if folder is None else folder.resolve() for folder in (samples, checkpoint, out)]
        with self._cluster.hold(UpdatesDied("the run ends")) as check_open:
            try:
                if not self._ranks:
                    self._start_ranks(check_open)
                calls = [rank.update.remote(*folders) for rank in self._ranks]
                metrics: dict[str, float] = self._wait_for(calls, check_open, counter)[0]
            except BaseException:
                self.close()
                raise
        return metrics

    def _start_ranks(self, check_open: Callable[[], None]) -> None:
        place, config = self._place, self._config
        num_ranks, gpus = place.ranks.count, decide_gpus(place.ranks.gpus, config.model.device)
        setting = RankSetting(
            config,
            num_ranks,
            place.ranks.shard == "base",
            self._dump,
            torch.get_num_threads(),
            gpus,
            self._deadline_s,
        )
        places = self._cluster.choose_options(place, num_ranks, gpus)
        self._ranks = [
            start_actor(Rank, {"concurrency_groups": {"watch": 1}, **at}, setting, number)
            for number, at in enumerate(places)
        ]
        try:
            self._cluster.wait_for_places(self._ranks, "update ranks", check_open)
        except TimeoutError as error:
            raise UpdatesDied(str(error)) from None
        [(host, port)] = self._wait_for([self._ranks[0].open_store.remote()], check_open)
        self._wait_for([rank.join.remote(host, port) for rank in self._ranks], check_open)

    def _wait_for(
        self, calls: Sequence[Any], check_open: Callable[[], None], counter: CompletionCounter | None = None
    ) -> list[Any]:
        """The answers of all ranks. Raises UpdatesDied, or an error of a rank that another attempt would meet too."""
        waiting, num_done = list(calls), 0
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_POLL_S)
            check_open()
            for call in done:
                try:
                    ray.get(call)
                except RayError:
                    ray.wait(list(calls), num_returns=len(calls), timeout=_GRACE_S)
                    raise _explain_failure(calls) from None
            if counter is not None and waiting:
                now_done = self._count_completions(num_done)
                counter.add(now_done - num_done)
                num_done = now_done
        if counter is not None:
            counter.add(self._count_completions(num_done) - num_done)
        return list(ray.get(list(calls)))

    def _count_completions(self, otherwise: int) -> int:
        """The number of completions that all ranks have computed; ``otherwise`` if one does not answer."""
        try:
            return sum(ray.get([rank.count_completions.remote() for rank in self._ranks], timeout=_POLL_S))
        except (RayError, GetTimeoutError):  # it has died, or is too busy; the call under way says which
            return otherwise


def _explain_failure(calls: Sequence[Any]) -> Exception:
    """The error to raise for calls of all ranks after one rank failed, which makes the others fail as well."""
    finished, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
    died, failed, silent = [], [], []
    for number, call in enumerate(calls):
        if call not in finished:
            silent.append(f"rank {number} did not answer")
            continue
        try:
            ray.get(call)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, _ERRORS):
                return cause
            failed.append(f"rank {number} failed: {type(cause).__name__}: {describe_ray_error(cause)}")
        except RayActorError as error:
            died.append(f"rank {number} died: {describe_ray_error(error)}")
    return UpdatesDied("update " + "; ".join(died or [*failed, *silent]))
