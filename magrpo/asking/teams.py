"""Finding the team to ask: that of a run, of one of its checkpoints, of a folder, or the champion of a model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magrpo.config.run import RunConfig
from magrpo.config.services import TrackingConfig, hide_password
from magrpo.config.validate import validate_config
from magrpo.errors import ConfigError
from magrpo.files.paths import expand_home
from magrpo.run.files import checkpoint_weights, choose_checkpoint
from magrpo.run.steps import makes_tables
from magrpo.run.store import CONFIG, RunStore, read_json
from magrpo.tracking.connection import Unavailable, tracking_uri
from magrpo.tracking.model_registry import CHAMPION, ModelRegistry

CHAMPIONS = "champions"
"""Folder for downloaded champions, in the root of runs."""
UNTRAINED = "untrained-"
"""Prefix of the names of untrained agents, beside those of the trained ones."""
_NUM_PARENTS = 4
"""Largest depth of a folder of agents below the configuration of its run."""


@dataclass(frozen=True, slots=True)
class AskedTeam:
    """A team, with its configuration and weights."""

    config: RunConfig
    """The configuration that the team was trained with, changed for asking: see :func:`find_asked_team`."""
    weights: Mapping[str, Path]
    """The folder of trained weights of each agent; empty for untrained agents."""
    title: str
    """Description of the weights, for people."""
    store: RunStore | None = None
    """The run, whose folder holds the problems; None if it is not at hand."""

    def trained_agents(self) -> RunConfig:
        """The configuration whose agents start from the weights."""
        agents = (agent.model_copy(update={"start_from": self.weights.get(agent.name)}) for agent in self.config.agents)
        return self.config.model_copy(update={"agents": tuple(agents)})

    def untrained_agents(self) -> RunConfig:
        """The configuration whose agents, under other names, have the weights of their base models."""
        agents = tuple(
            agent.model_copy(
                update={
                    "name": UNTRAINED + agent.name,
                    "start_from": None,
                    "weights": "full" if agent.weights == "full" else "lora",
                }
            )
            for agent in self.config.agents
        )
        return self.config.model_copy(update={"agents": agents})


def find_asked_team(name: str, root: Path, checkpoint: int | None = None, overrides: Sequence[str] = ()) -> AskedTeam:
    """Find the team called ``name``.

    ``name`` is the id of a run in ``root``, the folder of a run, a folder that holds a folder of weights for each
    agent, or ``MODEL@champion``.

    The engines ``auto`` and ``vllm`` are replaced by ``transformers``, which starts faster, and
    ``model.device = "cuda"`` by ``"auto"``. Then ``overrides`` are applied.

    Raises:
        ConfigError: there is no such team or checkpoint, or an override is unusable.
    """
    model, at, alias = name.partition("@")
    is_run = "/" not in name and (root / name / CONFIG).is_file()
    if not is_run and at and alias == CHAMPION:
        _refuse_checkpoint(checkpoint, "the champion")
        return _find_champion(model, root, overrides)
    path = expand_home(name)
    if is_run or not path.is_dir():
        return _team_of_run(RunStore.open(root, name), checkpoint, overrides)
    path = path.absolute()
    if (path / CONFIG).is_file() and (path / "stages").is_dir():
        return _team_of_run(RunStore(path.parent, path.name), checkpoint, overrides)
    _refuse_checkpoint(checkpoint, "a folder of agents")
    return _team_in_folder(path, overrides, f"the agents in {name}")


def _refuse_checkpoint(checkpoint: int | None, what: str) -> None:
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint needs a run, not {what}")


def _team_of_run(store: RunStore, checkpoint: int | None, overrides: Sequence[str]) -> AskedTeam:
    config = _change_config(store.config_tree(), store.path / CONFIG, overrides)
    if makes_tables(config):
        raise ConfigError(f"run {store.run_id} compares baselines; ask the run that trained its agents")
    iteration = choose_checkpoint(store, checkpoint)
    if iteration == 0 and all(agent.start_from is None for agent in config.agents):
        return AskedTeam(config, {}, f"run {store.run_id} before training", store)
    weights = checkpoint_weights(store, iteration)
    iterations = "1 iteration" if iteration == 1 else f"{iteration} iterations"
    title = f"run {store.run_id} after {iterations}"
    if config.train.num_iterations == 0:
        title = f"run {store.run_id}, which evaluates trained agents"
    return AskedTeam(config, {agent.name: weights / agent.name for agent in config.agents}, title, store)


def _team_in_folder(folder: Path, overrides: Sequence[str], title: str) -> AskedTeam:
    """Find the team whose agents are in ``folder``, with the configuration beside them or in a folder above."""
    above = [folder, *folder.parents[:_NUM_PARENTS]]
    path = next((parent / CONFIG for parent in above if _is_run_config(parent / CONFIG)), None)
    if path is None:
        raise ConfigError(
            f"{folder}: neither a run nor a folder of agents; a folder of agents holds {CONFIG} and one folder of "
            "weights for each agent"
        )
    config = _change_config(read_json(path), path, overrides)
    names = [agent.name for agent in config.agents]
    if missing := [name for name in names if not (folder / name).is_dir()]:
        inside = f"; ask {folder.parent}" if folder.name in names else ""
        raise ConfigError(f"{folder}: has no folder for agent {missing[0]!r}; it needs {' and '.join(names)}{inside}")
    stores = (RunStore(parent.parent, parent.name) for parent in above if (parent / "stages").is_dir())
    return AskedTeam(config, {name: folder / name for name in names}, title, next(stores, None))


def _is_run_config(path: Path) -> bool:
    """Whether ``path`` is the configuration of a run, rather than that of a model, which has the same name."""
    if not path.is_file():
        return False
    try:
        return "agents" in json.loads(path.read_bytes())
    except ValueError:
        return False


def _change_config(tree: dict[str, Any], path: Path, overrides: Sequence[str]) -> RunConfig:
    """Change the configuration that was read from ``path`` for asking, and apply ``overrides``."""
    if tree["engine"]["kind"] in ("auto", "vllm"):
        tree["engine"] = {"kind": "transformers"}
    if tree["model"]["device"] == "cuda":
        tree["model"]["device"] = "auto"
    return validate_config(RunConfig, tree, overrides, str(path))


def _find_champion(model: str, root: Path, overrides: Sequence[str]) -> AskedTeam:
    """Find the champion of a registered model, and download it into ``root/champions`` unless it is there."""
    registry = ModelRegistry(tracking_uri(TrackingConfig(), root), model)
    try:
        version = registry.find_champion()
        if version is None:
            raise ConfigError(f"model {model!r} has no champion in {hide_password(registry.uri)}")
        # Versions of different stores have the same numbers.
        folder = root / CHAMPIONS / model / f"{version.number}-{version.mlflow_run_id[:8]}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        registry.download_version(version, folder)
    except Unavailable as error:
        raise ConfigError(f"{model}@{CHAMPION}: {error}") from None
    return _team_in_folder(folder.absolute(), overrides, f"version {version.number} of {model}, the champion")
