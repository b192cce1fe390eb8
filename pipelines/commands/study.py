"""``magrpo study``: executes a study, or goes on with it, and compares its arms."""

import shlex
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from magrpo.experiments.study import Study, fix_study, list_samples, load_study, run_study
from magrpo.process.environment import set_verbosity, shorten_path
from magrpo.progress.activity import LOADING, open_console, show_activity
from magrpo.reports.budget import format_count
from magrpo.run.files import is_finished, keep_place
from magrpo.run.lock import hold_run
from pipelines.arguments import STUDIES, GivenPlace, Quiet, Root, RunName, StudyFile, Verbose, locate_config
from pipelines.commands.inputs import check_inputs
from pipelines.commands.train import check_given_place, report_interrupt, resume_command
from pipelines.flows.launch import run_stages
from pipelines.flows.local_server import LocalServer


def start_study(
    file: StudyFile,
    /,
    *,
    name: RunName | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    root: Root | None = None,
    place: GivenPlace | None = None,
    local: bool = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Execute the unfinished runs of a study; the exit code is 1 if a run failed.

    Args:
        file: TOML file of the study, or the name of a shipped study.
        name: Name of the study and prefix of its runs' names; by default the file's name.
        dry_run: Check the study, its problems and models, and list its runs; train nothing.
        local: Run without Prefect.
    """
    set_verbosity(quiet=quiet, verbose=verbose)
    study = load_study(file, name, root, locate_config)
    for run in list_samples(study):
        config = study.configure_run(run)
        check_given_place(config, place)
        check_inputs(config, for_plan=dry_run)
    if dry_run:
        _list_runs(study)
        return 0
    record = fix_study(study)
    keep_place(study.folder_store, place)
    console = open_console()
    runs = format_count(len(study.list_pilots()) + len(study.list_reported()), "runs")
    folder = shorten_path(study.folder)
    console.print(f"study {study.name}, {runs}, in {folder}; fixed on {record['when']}", markup=False, soft_wrap=True)
    given = file.stem if file.parent == STUDIES else str(shorten_path(file))
    again = resume_command("study", shlex.quote(given), study.root, local=local)
    if study.name != file.stem:
        again += f" --name {study.name}"
    with hold_run(study.folder_store):
        try:
            failures = _run_locally(study, console) if local else _run_flow(study)
        except KeyboardInterrupt as error:
            return report_interrupt(error, again, console)
    if failures:
        retry = f"failed runs have tracebacks in {folder}/RUN.error.txt. To retry them:\n  {again}"
        console.print(f"failed: {failures}\n{retry}", markup=False, soft_wrap=True)
        return 1
    return 0


def _run_locally(study: Study, console: Console) -> str:
    failures = run_study(study, lambda store: run_stages(store, local=True), console)
    return "; ".join(f"{run_id}: {reason}" for run_id, reason in failures.items())


def _run_flow(study: Study) -> str:
    with LocalServer(study.root / "prefect") as server:  # one server for all runs
        with show_activity(LOADING["Prefect"]):
            from pipelines.flows import study as flows  # prefect, loaded while the server starts
            from pipelines.flows.train import mark_killed, name_server

            server.wait_until_ready()
        with name_server():
            mark_killed(study.name)
            try:
                flows.study(str(study.path.absolute()), str(study.root), study.name)
            except flows.StudyFailed as error:
                return str(error)
    return ""


def _list_runs(study: Study) -> None:
    """Print the runs of a study and mark the finished ones."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    rates = study.choose_rates()
    lines = [(run.run_id, f"pilot, optim.lr={run.rate:g}") for run in study.list_pilots()]
    for arm, _, name in study.list_reported():
        rate = rates.get(arm.name)
        chosen = "optim.lr as configured" if rate is None else f"optim.lr={rate:g}"
        lines.append((name, chosen if arm.name in rates else "optim.lr chosen by its pilots"))
    width = max(len(name) for name, _ in lines)
    for name, remark in lines:
        state = "finished" if is_finished(study.find_store(name)) else ""
        console.print(f"  {name:{width}}  {remark}  {state}".rstrip())
