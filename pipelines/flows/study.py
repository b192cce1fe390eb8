"""A study as a Prefect flow. Each of its runs is a subflow, or a flow of another process if several run at once."""

from functools import partial
from pathlib import Path

from prefect import flow

from magrpo.experiments.study import check_study_place, fix_study, load_study
from magrpo.experiments.study_runs import run_study
from magrpo.progress.activity import open_console
from magrpo.run.files import keep_place
from pipelines.arguments import locate_config, locate_study, parse_place
from pipelines.flows.launch import run_stages


class StudyFailed(RuntimeError):
    """Some runs of a study failed; the others are finished."""


@flow(name="magrpo-study", flow_run_name="{name}", validate_parameters=False)
def study(file: str, root: str, name: str, place: str = "", workers: int = 1) -> None:
    """Execute the unfinished runs of a study, pilots first, and write its page; a retry goes on where it stopped.

    Raises StudyFailed if runs failed; the message names all of them.

    Args:
        file: The study's TOML file on the machine that trains, or the name of a study that ships.
        root: Folder of run directories on the machine that trains.
        name: Name of the study and prefix of the names of its runs.
        place: TOML file on the machine that trains that says where to run; empty: as before, or in one process there.
        workers: How many runs to execute side by side.
    """
    chosen = load_study(locate_study(file), name, Path(root), locate_config)
    given = parse_place(place) if place else None
    check_study_place(chosen, given)
    fix_study(chosen)
    keep_place(chosen.folder_store, given)
    failures = run_study(chosen, partial(run_stages, local=False), open_console(), workers)
    if failures:
        raise StudyFailed("; ".join(f"{run_id}: {reason}" for run_id, reason in failures.items()))
