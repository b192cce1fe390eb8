"""``magrpo export``: writes the agents of a run to a folder for others."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from magrpo.errors import ConfigError
from magrpo.export.agents_folder import write_agents
from magrpo.export.team import TrainedTeam
from magrpo.process.environment import shorten_path
from magrpo.run.files import AGENTS
from magrpo.run.store import RunStore
from pipelines.arguments import HomePath, Root


def export_agents(
    run: str,
    /,
    *,
    merge: Annotated[bool, Parameter(negative=())] = False,
    output: HomePath | None = None,
    root: Root = Path("runs"),
) -> int:
    """Write the folder and print what it is.

    Args:
        run: Id of a run; its last evaluated agents are exported.
        merge: Merge each adapter into a copy of its base, so that the models need neither peft nor the base.
        output: Folder to write; RUN/agents by default, RUN/agents-merged with --merge.
    """
    store = RunStore.open(root, run)
    team = TrainedTeam.of(store, merged=merge)
    target = (output or store.path / (f"{AGENTS}-merged" if merge else AGENTS)).resolve()
    if Path.cwd().is_relative_to(target):  # writing would delete the folder
        raise ConfigError(f"{target} is the current folder, or holds it; choose a new folder")
    write_agents(team, target)
    names = ", ".join(agent.name for agent in team.config.agents)
    kind = "merged models" if merge else "agents"
    print(f"{shorten_path(target)}: the {kind} {names} after iteration {team.iteration}")
    print(f"how to use them: {shorten_path(target / 'README.md')}")
    print(f"to upload them: hf upload OWNER/NAME {shorten_path(target)}")
    return 0
