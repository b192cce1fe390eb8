"""Runs derived from other runs: evaluations of a run's agents, alone or in a table of baselines.

An evaluation is a run without training iterations that starts from trained weights: same stages, same records.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from magrpo.config.agents import AgentConfig
from magrpo.config.place import Place
from magrpo.config.run import RunConfig, load_config
from magrpo.config.services import RegistryConfig
from magrpo.config.validate import validate_config, write_override
from magrpo.errors import ConfigError
from magrpo.experiments.baselines import RunTeam, Teams, parse_names, with_baselines
from magrpo.planning.place_check import check_device, check_place
from magrpo.run.files import checkpoint_weights, choose_checkpoint
from magrpo.run.store import RunStore, name_after
from magrpo.tracking.connection import check_tracking

RUNS = Path("runs")
"""Folder of the runs, unless another is given."""


@dataclass(frozen=True, slots=True)
class Source:
    """The agents to evaluate: a run at a checkpoint (None: the last one), or a TOML file with untrained agents."""

    run: str
    checkpoint: int | None
    root: Path | None
    """Folder of the runs. None: that of the overrides or of the file; for a run, ``runs``."""
    overrides: Sequence[str] = ()
    place: Place | None = None
    """Place at which the new run is executed; None: one process on this machine."""

    def load_file(self) -> RunConfig | None:
        """Load the configuration file, without training; None for a run. Raises ConfigError if it has a checkpoint."""
        if Path(self.run).suffix != ".toml":
            return None
        if self.checkpoint is not None:
            raise ConfigError("--checkpoint needs the id of a run; a configuration has no checkpoints")
        root = [] if self.root is None else [write_override("root", self.root)]
        return load_config(self.run, [*self.overrides, "train.num_iterations=0", *root])


def derive_config(tree: dict[str, Any], root: Path, overrides: Sequence[str], source: str) -> RunConfig:
    """Derive the configuration of a run in ``root`` without training or registration from another's resolved ``tree``.

    Raises ConfigError if an override is unusable; the message starts with ``source``.
    """
    tree = tree | {"registry": RegistryConfig().model_dump(), "root": str(root)}
    return validate_config(RunConfig, tree, [*overrides, "train.num_iterations=0"], source)


def create_evaluation(source: Source, name: str | None) -> RunStore:
    """Create the directory of a run that evaluates ``source``. Raises ConfigError if it or an override is unusable."""
    config = source.load_file()
    if config is not None:
        return _create_run(config, source, name)
    root = source.root or RUNS
    run = RunStore.open(root, source.run)
    source = replace(source, run=run.run_id)
    iteration = choose_checkpoint(run, source.checkpoint)
    tree: dict[str, Any] = json.loads(run.config().resolved(secrets=True))
    for agent in tree["agents"]:
        agent["start_from"] = str(checkpoint_weights(run, iteration) / agent["name"])
    name = name or _free_name(root, f"{source.run}-eval-{iteration}")
    return _create_run(derive_config(tree, root, source.overrides, f"run {source.run}"), source, name)


def create_baselines(
    source: Source, baselines: str, name: str | None, single_run: str | None = None, partners: Sequence[str] = ()
) -> RunStore:
    """Create the directory of a run that compares ``source`` with baselines (:mod:`magrpo.experiments.baselines`).

    The run's own agents are those of ``source`` before training. Rows with trained agents load them from other runs:
    from ``source`` itself, from ``single_run``, which has one agent, and from ``partners``, which play with the source.
    Raises ConfigError if a name, a run, a checkpoint or an override is unusable, or no row can be made.
    """
    names = parse_names(baselines)
    trained = None
    config = source.load_file()
    root = source.root or (RUNS if config is None else config.root)
    if config is None:
        run = RunStore.open(root, source.run)
        source = replace(source, run=run.run_id)
        tree: dict[str, Any] = json.loads(run.config().resolved(secrets=True))
        if tree["train"]["num_iterations"] == 0:
            raise ConfigError(f"run {source.run} does not train; name the run that trained its agents, or a file")
        trained = _team_of(run, source.checkpoint)
        config = derive_config(tree, root, source.overrides, f"run {source.run}")
    config = config.model_copy(update={"agents": tuple(map(_unshare_weights, config.agents))})
    teams = Teams(
        source=source.run,
        untrained=RunTeam("the run", config.agents),
        run=trained,
        single=None if single_run is None else _single_like(single_run, config, root),
        partners=tuple(_team_like(partner, config, root) for partner in partners),
    )
    table = with_baselines(config, names, teams)
    prefix = name_after(Path(source.run)) if trained is None else source.run
    return _create_run(table, source, name or _free_name(root, f"{prefix}-baselines"))


def _create_run(config: RunConfig, source: Source, name: str | None) -> RunStore:
    """Create a run directory. Raises ConfigError before that if its place, tracking store or experiment is unusable."""
    check_tracking(config.tracking, config.root)
    check_place(config, source.place or Place())
    check_device(config, source.place or Place())
    return RunStore.create(config, name)


def _team_of(run: RunStore, checkpoint: int | None) -> RunTeam:
    """Return the agents of a run with the weights of a checkpoint, by default the last one."""
    weights = checkpoint_weights(run, choose_checkpoint(run, checkpoint))
    agents = map(_unshare_weights, run.config().agents)
    return RunTeam(run.run_id, tuple(agent.model_copy(update={"start_from": weights / agent.name}) for agent in agents))


def _unshare_weights(agent: AgentConfig) -> AgentConfig:
    """Give the agent an adapter of its own, so that a row can change its weights alone."""
    return agent.model_copy(update={"weights": "lora"}) if agent.weights == "shared" else agent


def _single_like(run_id: str, config: RunConfig, root: Path) -> RunTeam:
    """Return the team of a run that trained a single agent, like :func:`_team_like`."""
    team = _team_like(run_id, config, root)
    if len(team.agents) > 1:
        names = ", ".join(agent.name for agent in team.agents)
        remedy = "name a run that trained one, such as one of embedded_grpo"
        raise ConfigError(f"--single-run {run_id}: it trained {len(team.agents)} agents ({names}); {remedy}")
    return team


def _team_like(run_id: str, config: RunConfig, root: Path) -> RunTeam:
    """Return the trained agents of a run whose adapters fit the models of ``config``."""
    run = RunStore.open(root, run_id)
    if run.config().lora != config.lora:
        raise ConfigError(f"run {run_id}: its section lora differs, so its adapters do not fit the models of this run")
    return _team_of(run, None)


def _free_name(root: Path, name: str) -> str:
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if not (root / free).exists())
