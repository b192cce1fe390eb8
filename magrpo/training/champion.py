"""Fetches the champion of a registered model, to start a run from it."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from magrpo.assets import name_base
from magrpo.config.run import RunConfig
from magrpo.errors import ConfigError
from magrpo.files.writing import atomic_write
from magrpo.run.files import START, describe_start
from magrpo.run.store import CONFIG, RunStore
from magrpo.tracking.connection import Unavailable, tracking_uri
from magrpo.tracking.model_registry import ModelRegistry, TeamVersion

log = logging.getLogger(__name__)

FETCHED = "champions"
"""Folder of a run that holds the versions it fetched, by number."""
PAUSES_S = (5.0, 20.0, 60.0)
"""Seconds to wait before each further request to a registry that failed: long enough for a restart of its server."""


class RegistryError(RuntimeError):
    """The registry lacks, or cannot deliver, a version that a run needs before it can start."""


def start_from_champion(store: RunStore) -> str:
    """Give a new run the champion's weights if it asks for them; return a sentence that says so, or an empty text.

    After this the run does not depend on the registry: the weights are in its directory, its configuration names them,
    and ``start.json`` names the version. Raises ConfigError if an agent already has weights to start from, or the
    champion has other agents, base models or kinds of weights; RegistryError if MLflow still does not answer
    after ``PAUSES_S``.
    """
    if not (store.path / START).exists():
        config = store.config()
        if not config.registry.continue_from_champion:
            return ""
        _load_champion(store, config)
    return f"the agents start from {describe_start(store)}"


def _load_champion(store: RunStore, config: RunConfig) -> None:
    assert config.registry.model is not None
    given = {agent.name: agent.start_from for agent in config.agents if agent.start_from is not None}
    fetched = {path.parent for path in given.values() if path.parent.parent == store.path / FETCHED}
    if fetched:  # an earlier attempt was killed between writing the two files below
        _note_start(store, config.registry.model, int(fetched.pop().name))
        return
    if given:
        raise ConfigError(
            f"agent {next(iter(given))!r}: start_from cannot be combined with registry.continue_from_champion: remove "
            "one of them"
        )
    registry = ModelRegistry(tracking_uri(config.tracking, store.path.parent), config.registry.model)
    champion = _fetch_champion(registry, store.path / FETCHED)
    if champion is None:
        _note_start(store, registry.model, None)
        return
    folder = store.path / FETCHED / str(champion.number)
    _check_agents(config, json.loads((folder / CONFIG).read_bytes())["agents"], champion.number)
    agents = tuple(agent.model_copy(update={"start_from": folder / agent.name}) for agent in config.agents)
    store.write_config(config.model_copy(update={"agents": agents}))
    _note_start(store, registry.model, champion.number)


def _fetch_champion(registry: ModelRegistry, folder: Path) -> TeamVersion | None:
    """Download the champion into ``folder/<version>``; None if there is none. Raises RegistryError after PAUSES_S."""
    pauses = iter(PAUSES_S)
    while True:
        try:
            champion = registry.find_champion()
            if champion is not None:
                folder.mkdir(exist_ok=True)
                registry.download_version(champion, folder / str(champion.number))
            return champion
        except Unavailable as error:
            if (pause_s := next(pauses, None)) is None:
                raise RegistryError(f"registry.continue_from_champion: {error}") from error
            log.warning("registry.continue_from_champion: %s; trying again in %g s", error, pause_s)
            time.sleep(pause_s)


def _check_agents(config: RunConfig, champions: Sequence[Mapping[str, Any]], version: int) -> None:
    """Raise ConfigError if the weights of the champion's agents do not belong to the agents of this run."""
    title = f"registry.continue_from_champion: version {version} of {config.registry.model}"
    theirs = {agent["name"]: (agent["model"], agent["weights"]) for agent in champions}
    wanted = sorted(agent.name for agent in config.agents)
    if sorted(theirs) != wanted:
        raise ConfigError(
            f"{title} has the agents {', '.join(sorted(theirs))}, but this run has {', '.join(wanted)}; "
            "use another registry.model"
        )
    for agent in config.agents:
        model, weights = theirs[agent.name]
        ours = name_base(agent.model)
        if (model, weights) != (ours, agent.weights):
            raise ConfigError(
                f'{title} has agent {agent.name!r} on model {model} with weights = "{weights}", but this run on '
                f'{ours} with weights = "{agent.weights}"; use the same, or another registry.model'
            )


def _note_start(store: RunStore, model: str, version: int | None) -> None:
    atomic_write(store.path / START, json.dumps({"model": model, "version": version}).encode())
