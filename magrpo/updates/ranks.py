"""Updates by several processes under torchrun, on this machine or on the nodes of a cluster.

The driver, this process, owns a TCPStore. Keys: ``config``, the run's configuration; ``shard``, the place's; ``job/N``
and ``answer/N``; ``doing/R``, what rank R does; ``progress``, a count that stands still if all ranks do;
``completions``, how many are done; ``died``, the first rank that failed, with its words. Weights and samples are files
that every rank can read.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from magrpo.config.place import Place
from magrpo.config.run import RunConfig
from magrpo.fleets import Fleet, Job, ProcessDied, Running
from magrpo.fleets.process import read_last_words
from magrpo.interfaces import Progress
from magrpo.plugins import ConfigError
from magrpo.stages.agent_batch import CompletionCounter
from magrpo.stages.memory_fitting import MicroBatchTooLarge
from magrpo.stages.update import NonFiniteLoss, SamplingGapTooLarge
from magrpo.updates import UpdatesDied

WAITS = "waits for other ranks"
"""What a rank says it does while it is not what the others wait for."""
ERRORS: Mapping[str, type[Exception]] = {
    "ConfigError": ConfigError,
    "MicroBatchTooLarge": MicroBatchTooLarge,
    "NonFiniteLoss": NonFiniteLoss,
    "OutOfMemoryError": torch.cuda.OutOfMemoryError,
    "SamplingGapTooLarge": SamplingGapTooLarge,
}
"""Errors that are raised again by the driver, by name."""
_POLL_S = 0.02
log = logging.getLogger(__name__)


class RanksUpdates:
    """An :class:`magrpo.interfaces.Updates` whose ranks start with the first update, and again after they died.

    Args:
        dump: Folder for batches with a non-finite loss.
        logs: Folder for the logs of the processes.
    """

    def __init__(self, config: RunConfig, place: Place, fleet: Fleet, dump: Path, logs: Path) -> None:
        self._config, self._place, self._fleet = config, place, fleet
        self._dump, self._logs = dump.resolve(), logs.resolve()
        self._group: _Group | None = None
        self._checkpoint: Path | None = None  # that the ranks are at

    def begin(self, out: Path) -> None:
        self.close()  # ranks that have trained no longer know where they began
        self._ask({"samples": None, "checkpoint": None, "out": str(out.resolve())}, None)

    def update(self, samples: Path, checkpoint: Path, out: Path, progress: Progress | None = None) -> dict[str, float]:
        """As :meth:`magrpo.interfaces.Updates.update`. Raises UpdatesDied if a rank died or hung."""
        counter = CompletionCounter(progress)
        while True:
            source = None if self._group and self._checkpoint == checkpoint else str(checkpoint.resolve())
            job = {"samples": str(samples.resolve()), "checkpoint": source, "out": str(out.resolve())}
            try:
                return self._ask(job, counter.add)
            except MicroBatchTooLarge as error:
                smaller = {"micro_batch_tokens": int(str(error))}
            log.warning(
                "a rank is out of memory; all ranks restart with micro-batches of %(micro_batch_tokens)d tokens. Set "
                "optim.micro_batch_tokens = %(micro_batch_tokens)d to start with them",
                smaller,
            )
            counter.restart()
            optim = self._config.optim.model_copy(update=smaller)
            self._config = self._config.model_copy(update={"optim": optim})

    def adopt(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    def close(self) -> None:
        if self._group:
            self._group.stop()
        self._group = self._checkpoint = None

    def _ask(self, job: dict[str, str | None], progress: Progress | None) -> dict[str, float]:
        self._checkpoint = None
        try:
            if self._group is None:
                self._group = _Group(self._config, self._place, self._fleet, self._dump, self._logs)
            return self._group.do_job(job, progress)
        except ProcessDied as error:
            raise UpdatesDied(f"update ranks cannot start: {error}") from None
        except BaseException:
            self.close()
            raise


class _Group:
    """One set of ranks, from their start to their end."""

    def __init__(self, config: RunConfig, place: Place, fleet: Fleet, dump: Path, logs: Path) -> None:
        self._num_ranks, self._deadline_s = place.update.ranks, place.update.deadline_s
        self._num_jobs = 0
        self._store = TCPStore(fleet.host, 0, is_master=True, wait_for_workers=False)
        self._store.set("config", config.resolved())
        self._store.set("shard", place.update.shard)
        logs.mkdir(parents=True, exist_ok=True)
        attempt = next(i for i in count() if not self._log_of(logs, i, 0).exists())
        self._logs = [self._log_of(logs, attempt, rank) for rank in range(self._num_ranks)]
        gpus = place.update.gpus
        if gpus is None:
            gpus = int(config.model.device != "cpu" and torch.cuda.is_available())
        # A cluster places single ranks; on one machine a single torchrun is cheaper.
        num_copies = 1 if place.fleet.kind == "local" else self._num_ranks
        per_copy = self._num_ranks // num_copies
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"{fleet.host}:{self._store.port}", "--rdzv-conf", "is_host=false"]
        command += ["--rdzv-id", "ranks", "--nnodes", str(num_copies), "--nproc-per-node", str(per_copy)]
        command += ["-m", "magrpo.updates.rank", fleet.host, str(self._store.port)]
        command += [str(self._log_of(logs, attempt, "{rank}")), str(dump)]
        self._processes: Sequence[Running] = fleet.start(
            Job(
                "update",
                tuple(command),
                count=num_copies,
                gpus=gpus * per_copy,
                shares_gpus=place.update.colocate,
                # Sums on a processor depend on the number of threads: as many as in this process give its bits.
                environment={"OMP_NUM_THREADS": str(torch.get_num_threads())},
                logs=logs,
            )
        )

    def do_job(self, job: dict[str, str | None], progress: Progress | None) -> dict[str, float]:
        """Have all ranks do ``job``. Raises UpdatesDied, or an error of a rank that is the user's."""
        key, num_done = f"answer/{self._num_jobs}", self._store.add("completions", 0)
        self._store.set(f"job/{self._num_jobs}", json.dumps(job))
        self._num_jobs += 1
        seen, seen_at = -1, time.monotonic()
        while not self._wait_for(key):
            if any(process.exit_status() is not None for process in self._processes) and not self._wait_for(key):
                raise UpdatesDied(self._explain_death())
            now_done, now = self._store.add("completions", 0), self._store.add("progress", 0)
            if progress and now_done > num_done:
                progress(now_done - num_done)
                num_done = now_done
            if now != seen:
                seen, seen_at = now, time.monotonic()
            elif time.monotonic() > seen_at + self._deadline_s:
                raise UpdatesDied(self._explain_hang())
        answer = json.loads(self._store.get(key))
        if "error" in answer:
            raise ERRORS[answer["error"]](answer["message"])
        if progress and (left := self._store.add("completions", 0) - num_done):
            progress(left)
        metrics: dict[str, float] = answer["metrics"]
        return metrics

    def stop(self) -> None:
        """Kill all ranks; returns when they are gone."""
        for process in self._processes:
            process.stop()

    @staticmethod
    def _log_of(logs: Path, attempt: int, rank: int | str) -> Path:
        return logs / f"rank-{rank}.{attempt}.log"

    def _wait_for(self, key: str) -> bool:
        """Wait a moment for ``key``; returns whether it is there."""
        if not self._store.check([key]):
            time.sleep(_POLL_S)
        return bool(self._store.check([key]))

    def _doing(self, rank: int) -> str:
        key = f"doing/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "starts"

    def _describe(self, rank: int, what: str) -> str:
        log = self._logs[rank]
        last = read_last_words(log)
        return f"update rank {rank} {what}, at: {self._doing(rank)}{f' ({last})' if last else ''}; log: {log}"

    def _explain_hang(self) -> str:
        """Blame the ranks that the others wait for."""
        silent = [rank for rank in range(self._num_ranks) if self._doing(rank) != WAITS] or range(self._num_ranks)
        return "; ".join(self._describe(rank, f"made no progress for {self._deadline_s:g} s") for rank in silent)

    def _explain_death(self) -> str:
        """Blame a rank that a signal killed, as torchrun tells; else the first that failed by itself."""
        ended = [process for process in self._processes if process.exit_status() is not None]
        for process in ended:
            text = process.log.read_text(encoding="utf-8", errors="replace")
            for rank, status in re.findall(r"rank\s*: (\d+) \(local_rank.*\n\s*exitcode\s*: (-?\d+)", text):
                if int(status) < 0 and -int(status) != signal.SIGTERM:
                    return self._describe(int(rank), f"was killed by {signal.Signals(-int(status)).name}")
        if self._store.check(["died"]):
            died = json.loads(self._store.get("died"))
            return self._describe(died["rank"], f"failed: {died['words']}")
        return "; ".join(
            f"torchrun ended with status {p.exit_status()} ({p.last_words()}); log: {p.log}" for p in ended
        )
