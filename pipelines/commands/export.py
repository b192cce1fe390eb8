"""``magrpo export``: writes the agents of a run to a folder for others, and uploads it to the hub."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from magrpo.export.agents_folder import write_agents
from magrpo.export.team import TrainedTeam
from magrpo.plugins import ConfigError
from magrpo.process.environment import shorten_path
from magrpo.run.files import AGENTS
from magrpo.run.store import RunStore
from pipelines.arguments import Root


def export_agents(
    run: str,
    /,
    *,
    merge: Annotated[bool, Parameter(negative=())] = False,
    push: str | None = None,
    public: Annotated[bool, Parameter(negative=())] = False,
    output: Path | None = None,
    root: Root = Path("runs"),
) -> int:
    """Write the folder and print what it is.

    Args:
        run: Id of a run; its last evaluated agents are exported.
        merge: Merge each adapter into a copy of its base, so that the models need neither peft nor the base.
        push: Upload the folder to this repository on the Hugging Face hub, OWNER/NAME; created if missing.
        public: With --push: make a new repository public; private by default.
        output: Folder to write; RUN/agents by default, RUN/agents-merged with --merge.
    """
    store = RunStore.open(root, run)
    if public and push is None:
        raise ConfigError("--public needs --push REPO")
    if push is not None:
        from magrpo.export.hub import check_repository  # huggingface_hub, only where something is pushed

        check_repository(push)
    team = TrainedTeam.of(store, merged=merge)
    target = output or store.path / (f"{AGENTS}-merged" if merge else AGENTS)
    write_agents(team, target, repository=push or "")
    names = ", ".join(agent.name for agent in team.config.agents)
    kind = "merged models" if merge else "agents"
    print(f"{shorten_path(target.resolve())}: the {kind} {names} after iteration {team.iteration}")
    print(f"how to use them: {shorten_path(target.resolve() / 'README.md')}")
    if push is not None:
        from magrpo.export.hub import push_folder  # huggingface_hub

        print(f"pushed to {push_folder(target, push, private=not public)}")
    return 0
