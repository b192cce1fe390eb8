"""The folder of a run's trained agents, which can be used without the run and without this project.

``<run>/agents``::

    README.md                         the model card
    config.json                       the run's configuration, without folders and services of the training machine
    origin.json                       the run, checkpoint and evaluation that the folder was made from
    helper/  main/                    one folder for each agent: adapter or model, tokenizer with chat template
    coopcode-base/                    the base model, if it ships with the project
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from magrpo.assets import locate_model, name_base
from magrpo.config.agents import AgentConfig
from magrpo.errors import ConfigError
from magrpo.export.merging import merge_adapter
from magrpo.export.model_card import CARD, render_agent_card, render_model_card
from magrpo.export.team import TrainedTeam
from magrpo.files.locks import make_draft
from magrpo.files.writing import share_files
from magrpo.model.lineup import open_prompt_tokenizer
from magrpo.model.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from magrpo.run.files import AGENTS, WEIGHTS
from magrpo.run.store import CONFIG, RunStore

ORIGIN = "origin.json"


def write_run_agents(store: RunStore) -> Path:
    """Write ``agents`` into the folder of a finished run, unless it already holds the agents of this checkpoint."""
    team = TrainedTeam.of(store)
    target = store.path / AGENTS
    origin = target / ORIGIN
    if not (origin.is_file() and json.loads(origin.read_bytes()) == team.describe_origin()):
        write_agents(team, target)
    return target


def write_agents(team: TrainedTeam, target: Path) -> None:
    """Write the folder ``target``. An earlier version of it is replaced once the new one is complete.

    Raises ConfigError if ``target`` holds anything else, the weights are damaged, or a tokenizer or base cannot be
    loaded.
    """
    if target.is_file() or (target.is_dir() and any(target.iterdir()) and not (target / ORIGIN).is_file()):
        raise ConfigError(f"{target} contains other files; choose a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    team.store.check_files(team.checkpoint, WEIGHTS)
    with make_draft(target.parent, f".{target.name}-draft-") as draft:
        for agent in team.config.agents:
            _write_agent(team, agent, draft / agent.name)
        for model in team.list_shipped_bases():
            shutil.copytree(locate_model(model), draft / model, copy_function=shutil.copyfile)
        (draft / CONFIG).write_text(team.portable_config().resolved(), encoding="utf-8")
        (draft / CARD).write_text(render_model_card(team), encoding="utf-8")
        (draft / ORIGIN).write_text(json.dumps(team.describe_origin(), indent=1) + "\n", encoding="utf-8")
        share_files(draft)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)


def _write_agent(team: TrainedTeam, agent: AgentConfig, folder: Path) -> None:
    folder.mkdir()
    source = team.weights / agent.name
    if agent.weights == "full":
        for path in source.iterdir():
            _copy_file(path, folder / path.name, link=path.suffix == ".safetensors")
    elif team.merged:
        merge_adapter(agent, source, folder)
    else:
        _copy_file(source / ADAPTER_WEIGHTS, folder / ADAPTER_WEIGHTS)
        facts = json.loads((source / ADAPTER_CONFIG).read_bytes())
        facts["base_model_name_or_path"] = name_base(agent.model)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    open_prompt_tokenizer(agent, team.config.model.chat_template).save_pretrained(folder)
    (folder / CARD).write_text(render_agent_card(team, agent), encoding="utf-8")


def _copy_file(source: Path, target: Path, *, link: bool = False) -> None:
    """Copy a file; with ``link``, make a hard link to the file of the run if the file system can."""
    if link:
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)
