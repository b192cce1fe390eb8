"""One rank of an update: computes its lanes and exchanges gradients with the others by torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.device_mesh import init_device_mesh

from magrpo.config.run import RunConfig
from magrpo.interfaces import Progress
from magrpo.model.lineup import Lineup
from magrpo.model.policy import Policy
from magrpo.model.sharding import Shards
from magrpo.run.files import read_samples
from magrpo.updates.lanes import add_in_pairs
from magrpo.updates.updater import Updater


def join_group(store: Store, number: int, count: int, timeout_s: float) -> None:
    """Make this process one of ``count`` that find each other through ``store``: by gloo on CPUs, by NCCL on GPUs.

    A rank that waits for others longer than ``timeout_s`` fails.
    """
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(0)  # the only one that this process may use
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=timedelta(seconds=timeout_s))


class TorchRanks:
    """The :class:`magrpo.updates.lanes.Ranks` of the process group that this process has joined."""

    def __init__(self, device: torch.device) -> None:
        self.number, self.count = dist.get_rank(), dist.get_world_size()
        self._device = device

    def all_agree(self, flag: bool) -> bool:
        agreed = torch.tensor(int(flag), device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return bool(agreed)

    def wait_for_all(self) -> None:
        self.all_agree(True)  # as dist.barrier, which warns where NCCL was not told its device

    def fill_in(self, table: Tensor) -> Tensor:
        dist.all_reduce(table.view(torch.int32))  # as integers: bits of one rank plus zeros of the others
        return table

    def add_branches(self, branch: Tensor | None, owners: Sequence[int], size: int) -> Tensor:
        """Each rank adds the branches of one chunk of the vector; all ranks gather the chunks."""
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


class RankUpdates:
    """Weights and optimizers of all agents on one rank, in step with the other ranks: all call the same methods.

    Args:
        is_sharded: Whether base models and full weights are spread over the ranks.
        dump: Folder for batches with a non-finite loss.
    """

    def __init__(self, config: RunConfig, is_sharded: bool, dump: Path) -> None:
        lineup = Lineup.open(config.agents, config.model, config.lora)
        ranks, shards = TorchRanks(lineup.device), None
        if is_sharded:
            shards = Shards(init_device_mesh(lineup.device.type, (ranks.count,)), lineup.device)
        policy = Policy.of(lineup, config.train.seed, shards)
        self._config = config
        self._saves = is_sharded or ranks.number == 0
        self._updater = Updater.of(policy, config, dump, ranks)

    def load(self, checkpoint: Path) -> None:
        self._updater.load(checkpoint)

    def update(self, samples: Path, progress: Progress) -> dict[str, float]:
        """Update the weights on the samples of a folder; ``progress`` counts the completions of this rank."""
        batch, comparisons = read_samples(samples, self._config)
        return self._updater.update(batch, progress, comparisons)

    def save(self, out: Path) -> None:
        """Write the checkpoint: the first rank alone, or each rank its part."""
        if self._saves:
            self._updater.save(out)
