"""``magrpo evaluate``: the agents of a run, or of a configuration, on problems never trained on.

An evaluation is a training run of no iterations that starts from trained weights: the same stages, the same records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from magrpo.config import RegistryConfig, RunConfig, load_config, validated
from magrpo.registry import ConfigError
from magrpo.store import RunStore


def prepare(run: str, overrides: Sequence[str], checkpoint: int | None, root: Path, name: str | None) -> RunStore:
    """The directory of a new run that evaluates ``run``: a run's id, or a TOML file, whose agents are untrained.

    Args:
        checkpoint: iteration whose weights are taken; None: the last committed one.

    Raises:
        ConfigError: there is no such run, file or checkpoint, or an override is unusable.
    """
    overrides = [*overrides, "train.num_iterations=0"]
    if Path(run).suffix == ".toml":
        if checkpoint is not None:
            raise ConfigError("--checkpoint goes with the id of a run; agents of a configuration file are untrained")
        return RunStore.create(load_config(run, [*overrides, f"root={root}"]), name)
    source = RunStore.open(root, run)
    iteration = _checkpoint(source, checkpoint)
    tree: dict[str, Any] = json.loads(source.config().resolved())
    weights = source.path / "stages" / f"{iteration:05d}" / "update" / "weights"
    for agent in tree["agents"]:
        agent["start_from"] = str(weights / agent["name"])
    tree["registry"] = RegistryConfig().model_dump()
    tree["root"] = str(root)
    config = validated(RunConfig, tree, overrides, f"run {run}")
    return RunStore.create(config, name or _free_name(root, f"{run}-eval-{iteration}"))


def _checkpoint(source: RunStore, iteration: int | None) -> int:
    """The iteration, checked, or the last one committed."""
    known = sorted(int(path.parent.parent.name) for path in source.path.glob("stages/*/update/_SUCCESS"))
    if not known:
        raise ConfigError(f"run {source.run_id} has no checkpoint yet")
    if iteration is not None and iteration not in known:
        raise ConfigError(f"--checkpoint {iteration}: run {source.run_id} has {known[0]} to {known[-1]}")
    return known[-1] if iteration is None else iteration


def _free_name(root: Path, name: str) -> str:
    taken = {path.name for path in root.glob(f"{name}*")}
    return next(n for n in (name, *(f"{name}-{k}" for k in range(2, len(taken) + 3))) if n not in taken)
