"""The program of one rank under torchrun, ``-m magrpo.updates.rank HOST PORT LOG DUMP``, for :mod:`.ranks`.

``HOST`` and ``PORT`` are those of the driver's TCPStore, through which ranks get their jobs and find each other.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.device_mesh import init_device_mesh

from magrpo.config.run import load_resolved
from magrpo.model.lineup import Lineup
from magrpo.model.policy import Policy
from magrpo.model.sharding import Shards
from magrpo.run.files import samples_file
from magrpo.run.store import read_records
from magrpo.stages.lanes import add_in_pairs
from magrpo.stages.update import Updater
from magrpo.types import Sample
from magrpo.updates.ranks import ERRORS, WAITS

_FOR_EVER = timedelta(days=365)
"""The driver enforces deadlines: it kills the ranks."""


class TorchRanks:
    """The :class:`magrpo.stages.lanes.Ranks` of a torchrun group: gloo on CPU, NCCL on GPUs."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self.number, self.count = dist.get_rank(), dist.get_world_size()
        self._store, self._device = store, device

    def tell_progress(self, doing: str) -> None:
        self._store.set(f"doing/{self.number}", doing)
        self._store.add("progress", 1)

    def agree_on(self, fits: bool) -> bool:
        self.tell_progress(WAITS)
        agreed = torch.tensor(int(fits), device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return bool(agreed)

    def fill_in(self, table: Tensor) -> Tensor:
        self.tell_progress(WAITS)
        dist.all_reduce(table.view(torch.int32))  # as integers: bits of one rank plus zeros of the others
        return table

    def add_branches(self, branch: Tensor | None, owners: Sequence[int], size: int) -> Tensor:
        """Each rank adds the branches of one chunk of the vector; all ranks gather the chunks."""
        self.tell_progress(WAITS)
        length = -(-size // self.count)
        sent = torch.empty(0, device=self._device)
        if branch is not None:
            sent = torch.nn.functional.pad(branch, (0, length * self.count - size))
        received = torch.empty(len(owners), length, device=self._device)
        lengths_received = [length if rank in owners else 0 for rank in range(self.count)]
        lengths_sent = [len(sent) // self.count] * self.count
        dist.all_to_all_single(received.view(-1), sent, lengths_received, lengths_sent)
        total = torch.empty(length * self.count, device=self._device)
        dist.all_gather_into_tensor(total, add_in_pairs(received))
        return total[:size]


class Rank:
    """Weights and optimizers of all agents, brought up to date with the other ranks.

    Args:
        store: The driver's, for jobs and answers.
        dump: Folder for batches with a non-finite loss.
    """

    def __init__(self, store: Store, dump: Path) -> None:
        self._store = store
        config = load_resolved(store.get("config").decode())
        lineup = Lineup.open(config.agents, config.model, config.lora)
        self._ranks, shards = TorchRanks(store, lineup.device), None
        if store.get("shard") == b"base":
            shards = Shards(init_device_mesh(lineup.device.type, (self._ranks.count,)), lineup.device)
        policy = Policy.of(lineup, config.train.seed, shards)
        self._saves = shards is not None or self._ranks.number == 0
        self._updater = Updater.of(policy, config, dump, self._ranks)
        self._trained = [agent.name for agent in config.agents if agent.trained]

    def answer(self, number: int) -> None:
        """Wait for a job and do it; the first rank answers. Raises one of :data:`ERRORS`."""
        self._ranks.tell_progress(WAITS)
        job = json.loads(self._store.get(f"job/{number}"))
        metrics: dict[str, float] = {}
        if job["checkpoint"] is not None:
            self._ranks.tell_progress(f"loads {job['checkpoint']}")
            self._updater.load(Path(job["checkpoint"]))
        if job["samples"] is not None:
            self._ranks.tell_progress(f"reads {job['samples']}")
            folder = Path(job["samples"])
            batch = {agent: read_records(folder / samples_file(agent), Sample) for agent in self._trained}
            metrics = self._updater.update(batch, self._report_completions)
        if self._saves:
            self._ranks.tell_progress(f"writes {job['out']}")
            self._updater.save(Path(job["out"]))
        if self._ranks.number == 0:
            self._store.set(f"answer/{number}", json.dumps({"metrics": metrics}))

    def _report_completions(self, num_completions: int) -> None:
        self._store.add("completions", num_completions)


def main(host: str, port: int, log_name: str, dump: Path) -> int:
    """Do jobs until the driver ends this process, or one fails; ``log_name``: path of the log, with ``{rank}``."""
    number, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with Path(log_name.replace("{rank}", str(number))).open("wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO)
    store = TCPStore(host, port, is_master=False, timeout=_FOR_EVER)

    def post_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        words = {"rank": number, "words": f"{kind.__name__}: {error}"}
        store.compare_set("died", "", json.dumps(words))
        sys.__excepthook__(kind, error, trace)
        sys.stderr.flush()
        os._exit(1)  # an exit in order may abort on gloo's threads, and the driver would blame that signal

    sys.excepthook = post_error
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        backend, store=PrefixStore("group", store), rank=number, world_size=num_ranks, timeout=_FOR_EVER
    )
    job = 0
    try:
        rank = Rank(store, dump)
        for job in count():
            rank.answer(job)
    except tuple(ERRORS.values()) as error:
        store.compare_set(f"answer/{job}", "", json.dumps({"error": type(error).__name__, "message": str(error)}))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
