"""``magrpo study``: executes a study, or goes on with it, and compares its arms."""

import logging
import shlex
from functools import partial

from rich.console import Console

from magrpo.config.place import Place
from magrpo.experiments.study import FIXED, Study, check_study_place, fix_study
from magrpo.experiments.study_runs import run_study
from magrpo.process.environment import find_command, shorten_path
from magrpo.process.signals import find_interrupt
from magrpo.progress.activity import LOADING, open_console, show_activity
from magrpo.run.files import keep_place
from magrpo.run.lock import hold_run
from magrpo.text import format_count
from magrpo.tracking.connection import check_tracking
from pipelines.arguments import STUDIES
from pipelines.commands.inputs import check_inputs
from pipelines.commands.train import report_interrupt
from pipelines.flows.launch import run_stages
from pipelines.flows.local_server import LocalServer

log = logging.getLogger(__name__)


def start_study(study: Study, place: Place | None, workers: int, *, local: bool) -> int:
    """Execute the unfinished runs of a study at ``place``, ``workers`` at once; the exit code is 1 if a run failed.

    Raises ConfigError before anything is written if the study cannot run, or is not the one that was fixed.
    """
    _check_study(study, place)
    record = fix_study(study)
    keep_place(study.folder_store, place)
    console = open_console()
    runs = format_count(len(study.list_pilots()) + len(study.list_reported({})), "runs")
    folder = shorten_path(study.folder)
    console.print(f"study {study.name}, {runs}, in {folder}; fixed on {record['when']}", markup=False, soft_wrap=True)
    file = study.path
    given = file.stem if file.parent == STUDIES else shorten_path(file)
    again = shlex.join([find_command("magrpo"), "study", given, "--root", shorten_path(study.root)])
    if study.name != file.stem:
        again += f" --name {study.name}"
    if workers > 1:
        again += f" --workers {workers}"
    if local:
        again += " --local"
    with hold_run(study.folder_store):
        try:
            failures = _run_locally(study, console, workers) if local else _run_flow(study, workers)
        except BaseException as error:
            interrupt = find_interrupt(error)
            if not isinstance(interrupt, KeyboardInterrupt):
                raise
            log.info("", exc_info=True)  # with --verbose
            return report_interrupt(interrupt, again, console)
    if failures:
        retry = f"failed runs have tracebacks in {folder}/RUN.error.txt. To retry them:\n  {again}"
        console.print(f"failed: {failures}\n{retry}", markup=False, soft_wrap=True)
        return 1
    console.quiet = False
    stores = (study.find_store(run.run_id) for run in study.list_reported({}))
    if kept := next((store for store in stores if store.exists()), None):
        console.print(f"next: look at a run: {kept.format_command('show')} --open", markup=False, soft_wrap=True)
    return 0


def _check_study(study: Study, place: Place | None, *, for_plan: bool = False) -> None:
    """Check the tracking of every arm, and models, problems and the place of the arms with runs left."""
    if (study.folder / FIXED).exists():
        fix_study(study)  # names an edit, which the checks below would take for another fault
    for run in study.list_samples():
        config = study.configure_run(run)
        check_tracking(config.tracking, config.root)
    for run in study.list_samples_left():
        check_inputs(study.configure_run(run), for_plan=for_plan)
    check_study_place(study, place, for_plan=for_plan)


def _run_locally(study: Study, console: Console, workers: int) -> str:
    failures = run_study(study, partial(run_stages, local=True), console, workers)
    return "; ".join(f"{run_id}: {reason}" for run_id, reason in failures.items())


def _run_flow(study: Study, workers: int) -> str:
    with LocalServer(study.root / "prefect") as server:  # one server for all runs
        with show_activity(LOADING["Prefect"]):
            from pipelines.flows import study as flows  # prefect, loaded while the server starts
            from pipelines.flows.train import mark_killed, name_server

            server.wait_until_ready()
        with name_server():
            parameters = {"file": str(study.path.absolute()), "root": str(study.root), "name": study.name}
            mark_killed(study.name, parameters)
            try:
                flows.study(**parameters, workers=workers)
            except flows.StudyFailed as error:
                return str(error)
    return ""


def list_study_runs(study: Study, place: Place | None) -> int:
    """Check what a study needs; print its runs and mark the finished ones; return the exit code."""
    _check_study(study, place, for_plan=True)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    rates = study.choose_rates()
    finished = {run.run_id for run in study.read_finished(rates)}
    lines = [(run.run_id, f"pilot, optim.lr={run.rate:g}") for run in study.list_pilots()]
    for run in study.list_reported(rates):
        chosen = "optim.lr as configured" if run.rate is None else f"optim.lr={run.rate:g}"
        lines.append((run.run_id, chosen if run.arm in rates else "optim.lr chosen by its pilots"))
    width = max(len(name) for name, _ in lines)
    for name, remark in lines:
        state = "finished" if name in finished else ""
        console.print(f"  {name:{width}}  {remark}  {state}".rstrip())
    return 0
