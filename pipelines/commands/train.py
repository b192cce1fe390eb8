"""``magrpo train``: start or resume a run, with or without Prefect."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from magrpo.layout import hold_run, steps_to_repeat
from magrpo.plugins import ConfigError
from magrpo.store import RunStore
from pipelines.environment import find_command, shorten_path
from pipelines.flows.launch import run_stages
from pipelines.training.closing import print_closing

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def train_run(store: RunStore, *, local: bool) -> int:
    """Start or resume the run in ``store``; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"run {store.run_id} in {shorten_path(store.path)}")
    resume = resume_command("train", store.run_id, store.path.parent, local=local)
    try:
        result = run_stages(store, console, local=local)
    except KeyboardInterrupt:
        console.print(f"\ninterrupted; every committed stage is kept. To resume:\n  {resume}")
        return INTERRUPTED
    except ConfigError:
        raise
    except BaseException:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"the run stopped; every committed stage is kept. To resume once the cause is gone:\n  {resume}"
        )
        raise
    print_closing(result, console)
    return 0


def resume_command(command: str, name: str, root: Path, *, local: bool) -> str:
    """The command line that resumes a run or a sweep."""
    flags = f"--resume {name} --root {shorten_path(root)}{' --local' if local else ''}"
    return f"{find_command('magrpo')} {command} {flags}"


def rewind_run(store: RunStore, name: str) -> None:
    """Set aside the committed outputs of the step ``name``, ``STAGE[:ITERATION]``, and of all later steps.

    Raises:
        ConfigError: there is no such step, or another process is working on the run.
    """
    with hold_run(store):
        repeated = steps_to_repeat(store, store.config(), name)
        if repeated:
            folder = store.set_aside([step.folder for step in repeated])
            count = len(repeated)
            print(f"{count} committed stages from {repeated[0]} on are set aside in {shorten_path(folder)}")
