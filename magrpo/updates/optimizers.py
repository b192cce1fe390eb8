"""The optimizers of agents: their learning rate, and their states in a checkpoint."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import AdamW

from magrpo.config.sections import OptimConfig
from magrpo.errors import ConfigError, quote_error
from magrpo.model.policy import Policy
from magrpo.model.sharding import spread_like
from magrpo.run.files import OPTIMIZER, OPTIMIZER_SHARDS


def learning_rate(optim: OptimConfig, update: int, num_iterations: int) -> float:
    """The learning rate of an update, counted from 1: linear warm-up, then the schedule's shape down to 0."""
    if update <= optim.warmup_iterations:
        return optim.lr * update / optim.warmup_iterations
    if optim.schedule == "constant":
        return optim.lr
    length = max(num_iterations - optim.warmup_iterations, 1)
    progress = min((update - 1 - optim.warmup_iterations) / length, 1.0)
    if optim.schedule == "linear":
        return optim.lr * (1 - progress)
    return optim.lr * ((1 + math.cos(math.pi * progress)) / 2)


def write_optimizers(folder: Path, policy: Policy, optimizers: Mapping[str, AdamW]) -> None:
    """Write the policy's version and the states of all optimizers into a checkpoint.

    If models are spread over ranks, all ranks call it, and each writes its parts of the states that are spread.
    """
    whole = {agent: optimizer.state_dict() for agent, optimizer in optimizers.items() if not policy.is_spread(agent)}
    for agent, optimizer in optimizers.items():
        if agent not in whole and optimizer.state:
            save(_name_states(policy, agent, optimizer), checkpoint_id=folder / OPTIMIZER_SHARDS / agent)
    if not policy.shards or policy.shards.is_first:
        torch.save({"version": policy.version, "optimizers": whole}, folder / OPTIMIZER)


def read_optimizers(folder: Path, policy: Policy, optimizers: Mapping[str, AdamW]) -> int:
    """Read the files of :func:`write_optimizers`, written by any number of ranks; returns the policy's version.

    Raises ConfigError if the file is damaged. Code in the file is never run.
    """
    try:
        stored = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise ConfigError(f"{folder / OPTIMIZER}: holds no state of optimizers: {quote_error(error)}") from error
    for agent, optimizer in optimizers.items():
        shards = folder / OPTIMIZER_SHARDS / agent
        if agent not in stored["optimizers"]:
            optimizer.state.clear()
            if shards.exists():
                _read_shards(shards, policy, agent, optimizer)
        elif policy.is_spread(agent):
            optimizer.state.clear()
            parameters = list(policy.parameters(agent).values())
            for i, state in stored["optimizers"][agent]["state"].items():
                optimizer.state[parameters[i]] = {
                    name: spread_like(value, parameters[i]) if value.ndim else value.to(policy.device)
                    for name, value in state.items()
                }
        else:
            optimizer.load_state_dict(stored["optimizers"][agent])
    return int(stored["version"])


def _read_shards(folder: Path, policy: Policy, agent: str, optimizer: AdamW) -> None:
    for parameter in policy.parameters(agent).values():
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # by no_dist, below
        load(_name_states(policy, agent, optimizer), checkpoint_id=folder, no_dist=not policy.is_spread(agent))


def _name_states(policy: Policy, agent: str, optimizer: AdamW) -> dict[str, dict[str, Tensor]]:
    return {name: optimizer.state[parameter] for name, parameter in policy.parameters(agent).items()}
