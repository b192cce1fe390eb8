"""Check the problems and models of a run before anything starts: within seconds, and without heavy libraries."""

import difflib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from magrpo.assets import FOLDER, locate_model, looks_like_folder
from magrpo.config.agents import AgentConfig, LoraConfig
from magrpo.config.run import RunConfig, load_resolved
from magrpo.experiments.sweep_grid import Sweep
from magrpo.files import hub
from magrpo.interfaces import ChecksSource
from magrpo.plugins import ConfigError
from magrpo.progress.activity import show_activity
from magrpo.stages.prepare import prepare


def check_inputs(config: RunConfig, *, for_plan: bool = False) -> None:
    """Raise ConfigError if problems or models of the run are missing, or its file of problems cannot be used.

    Problem sets that are made, or would have to be downloaded, are not loaded; a plan may do without the latter.
    """
    on_hub = _check_folders(config)
    missing_data = _read_problems(config)
    if on_hub or missing_data:
        obstacle = _contact_hub(on_hub)
        if missing_data and obstacle and not for_plan:
            raise ConfigError(f"problems: {missing_data}, and {obstacle}; give a local copy: problems.source=FILE")


def check_sweep_inputs(sweep: Sweep) -> None:
    """Raise ConfigError as :func:`check_inputs` for a run of a sweep; equal problems and agents are checked once."""
    checked = []
    for child in sweep.children:
        config = load_resolved(child.config)
        inputs = config.problems, config.agents, config.rollout.problems_per_iteration
        if inputs not in checked:
            check_inputs(config)
            checked.append(inputs)


def _read_problems(config: RunConfig) -> str:
    """Load the problems; returns which data set would have to be downloaded first, if so."""
    if not isinstance(config.problems, ChecksSource) and ":" not in config.problems.kind:
        return ""  # made by this project, not read
    with show_activity("reading the problems"), hub.read_cache_only(), _without_warnings():
        try:
            prepare(config.problems, config.rollout.problems_per_iteration)
        except hub.NotCached as error:
            return str(error)
    return ""


def _check_folders(config: RunConfig) -> list[AgentConfig]:
    """Check the folders of models and weights; returns the agents whose models are on the hub."""
    on_hub = []
    for agent in config.agents:
        folder = Path(locate_model(agent.model))
        if looks_like_folder(agent.model) and not folder.is_dir():
            raise ConfigError(f"agent {agent.name!r}: model = {agent.model!r}: no such folder")
        if not folder.is_dir():
            on_hub.append(agent)
        elif not (folder / "config.json").is_file():
            raise ConfigError(f"agent {agent.name!r}: model = {agent.model!r}: no model, it has no config.json")
    for agent in config.agents:
        if agent.start_from is not None:
            _check_start(agent, agent.start_from, config.lora)
    return on_hub


def _check_start(agent: AgentConfig, folder: Path, lora: LoraConfig) -> None:
    if not folder.is_dir():
        raise ConfigError(f"agent {agent.name!r}: start_from = {folder}: no such folder")
    if agent.weights != "full":
        from magrpo.model.lora import check_adapter  # peft

        check_adapter(folder, agent, lora)


def _contact_hub(agents: Sequence[AgentConfig]) -> str:
    """Why the hub cannot be used now, empty if it answers; raises ConfigError if a model is not in its cache then.

    Where it does not answer, libraries are told not to ask it: each file would take them half a minute.
    """
    with show_activity(f"contacting {hub.describe_host()}"):
        obstacle = hub.find_obstacle()
    if not obstacle:
        return ""
    for agent in agents:
        if not hub.is_model_cached(agent.model):
            shipped = [path.parent.name for path in FOLDER.glob("*/config.json")]
            near = difflib.get_close_matches(agent.model, shipped, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"agent {agent.name!r}: model = {agent.model!r}: {hint}no such folder, no such model in the cache of "
                f"the Hugging Face hub, and {obstacle}; give the folder of a copy, or with a network: "
                f"hf download {agent.model}"
            )
    hub.stay_offline(obstacle)
    return obstacle


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out what loading problems warns of: the run that follows warns of it."""
    loggers = [logging.getLogger(name) for name in ("magrpo.problems", "magrpo.stages.prepare")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
