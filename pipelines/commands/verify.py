"""``magrpo verify``: whether the files of a run are those that it wrote, by their digests."""

from pathlib import Path

from magrpo.plugins import ConfigError
from magrpo.progress.activity import show_activity
from magrpo.reports.budget import format_count
from magrpo.run.layout import is_held, steps
from magrpo.run.store import RunStore
from magrpo.tracking.spool import DAMAGED, RECORDS, count_damaged
from magrpo.training.repair import find_damage, find_lost
from pipelines.arguments import Root, RunId
from pipelines.commands.train import resume_command


def verify_run(run: RunId, /, *, root: Root = Path("runs")) -> int:
    """Check every file of a run; the exit code is 1 if one is damaged or missing.

    Args:
        run: Id of a run that no process is working on.
    """
    store = RunStore.open(root, run)
    if is_held(store.path):
        raise ConfigError(f"run {run}: a process is working on it; verify it once that process has ended")
    with show_activity("reading the files of the run"):
        lines, num_checked = _check_run(store)
    for line in lines:
        print(line)
    if lines:
        print(f"{run} is damaged; to set the damaged files aside and compute them again:")
        print(f"  {resume_command('resume', run, store.path.parent, local=False)}")
        return 1
    print(f"{run}: {format_count(num_checked, 'stages')} checked, all files are intact")
    return 0


def _check_run(store: RunStore) -> tuple[list[str], int]:
    """A line for each part of the run that is damaged, and the number of its committed stages."""
    try:
        config = store.config()
    except ConfigError as error:
        return [str(error)], 0
    lines = [damage] if (damage := store.config_file.find_damage()) else []
    lines += [f"{name}: {words}" for name, words in find_damage(store, config).items()]
    lines += [
        f"{step.folder}: is missing, although later stages were computed from it" for step in find_lost(store, config)
    ]
    if damaged := count_damaged(store.path):
        lines.append(
            f"{RECORDS}: {format_count(damaged, 'lines')} damaged; the next resume skips them, with a copy in {DAMAGED}"
        )
    return lines, sum(store.is_committed(step.folder) for step in steps(config))
