"""``magrpo evaluate``: the agents of a run, or of a configuration, on problems never trained on.

An evaluation is a training run of no iterations that starts from trained weights: the same stages, the same records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from magrpo.config import AgentConfig, RegistryConfig, RunConfig, load_config
from magrpo.plugins import ConfigError, validate_config
from magrpo.store import RunStore
from pipelines.experiments.baselines import Team, Teams, names_of, with_baselines


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
    tree: dict[str, Any] = json.loads(source.config().resolved(secrets=True))
    weights = source.path / "stages" / f"{iteration:05d}" / "update" / "weights"
    for agent in tree["agents"]:
        agent["start_from"] = str(weights / agent["name"])
    tree["registry"] = RegistryConfig().model_dump()
    tree["root"] = str(root)
    config = validate_config(RunConfig, tree, overrides, f"run {run}")
    return RunStore.create(config, name or _free_name(root, f"{run}-eval-{iteration}"))


def prepare_baselines(
    run: str,
    overrides: Sequence[str],
    checkpoint: int | None,
    root: Path,
    name: str | None,
    *,
    baselines: str,
    single_run: str | None,
    partners: Sequence[str],
) -> RunStore:
    """The directory of a new run that sets ``run`` beside baselines (:mod:`pipelines.experiments.baselines`).

    Its own agents are those of ``run`` before training; rows with trained agents load them from their runs.

    Args:
        baselines: names with commas, or ``all``.
        single_run: run of a single trained agent, if there is one.
        partners: runs whose agents play with those of ``run``.

    Raises:
        ConfigError: a name, a run, a checkpoint or an override is unusable, or no row can be made.
    """
    names = names_of(baselines)
    overrides = [*overrides, "train.num_iterations=0"]
    why = {
        "run": f"{run} is a configuration: its agents are untrained",
        "single": "no run of a single trained agent is given; --single-run RUN",
        "partners": "no other run is given; --partner RUN",
    }
    trained = None
    if Path(run).suffix == ".toml":
        if checkpoint is not None:
            raise ConfigError("--checkpoint goes with the id of a run; agents of a configuration file are untrained")
        config = load_config(run, [*overrides, f"root={root}"])
    else:
        source = RunStore.open(root, run)
        tree: dict[str, Any] = json.loads(source.config().resolved(secrets=True))
        if tree["train"]["num_iterations"] == 0:
            raise ConfigError(f"run {run} does not train; name the run that trained its agents, or a configuration")
        trained = _team(source, checkpoint)
        tree |= {"root": str(root), "registry": RegistryConfig().model_dump()}
        config = validate_config(RunConfig, tree, overrides, f"run {run}")
    config = config.model_copy(update={"agents": tuple(map(_apart, config.agents))})
    teams = Teams(
        untrained=Team("the run", config.agents),
        run=trained,
        single=None if single_run is None else _alike(single_run, config, root),
        partners=tuple(_alike(partner, config, root) for partner in partners),
        why=why,
    )
    table = with_baselines(config, names, teams)
    return RunStore.create(table, name or _free_name(root, f"{Path(run).stem}-baselines"))


def _team(source: RunStore, iteration: int | None) -> Team:
    """The agents of a run with the weights of a checkpoint, the last one by default."""
    weights = source.path / "stages" / f"{_checkpoint(source, iteration):05d}" / "update" / "weights"
    agents = map(_apart, source.config().agents)
    return Team(source.run_id, tuple(agent.model_copy(update={"start_from": weights / agent.name}) for agent in agents))


def _apart(agent: AgentConfig) -> AgentConfig:
    """The agent with an adapter to itself, so that a row can change its weights alone."""
    return agent.model_copy(update={"weights": "lora"}) if agent.weights == "shared" else agent


def _alike(run: str, config: RunConfig, root: Path) -> Team:
    source = RunStore.open(root, run)
    if source.config().lora != config.lora:
        raise ConfigError(f"run {run}: its section lora differs, so its adapters do not fit the models of this run")
    return _team(source, None)


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
