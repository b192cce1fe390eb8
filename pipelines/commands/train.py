"""``magrpo train``, ``resume`` and ``schedule``: start or resume runs, with or without Prefect."""

from asyncio import CancelledError
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from magrpo.config.place import Place, load_place
from magrpo.config.run import RunConfig, load_config
from magrpo.errors import ConfigError
from magrpo.planning.place_check import check_device, check_place
from magrpo.process.environment import is_quiet, shorten_path
from magrpo.process.signals import describe_interrupt, find_exit_code
from magrpo.progress.activity import LOADING, open_console, show_activity
from magrpo.progress.state import was_refused
from magrpo.run.files import keep_place, read_place
from magrpo.run.lock import hold_file, hold_run
from magrpo.run.rewind import steps_to_repeat
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.text import format_count
from magrpo.tracking.connection import check_tracking
from magrpo.training.closing import print_closing
from magrpo.training.removal import remove_run
from pipelines.commands.inputs import check_inputs, check_repeated_inputs
from pipelines.flows.launch import run_stages
from pipelines.flows.local_server import LocalServer
from pipelines.flows.timetable import Timetable


def check_given_place(
    config: RunConfig, place: Place | None, store: RunStore | None = None, from_stage: str | None = None
) -> None:
    """Check that the run fits this machine and ``place``, its last one if None, and that MLflow can use its store.

    ``store`` and ``from_stage`` are those of a run to resume. Raises ConfigError before anything is created.
    """
    place = place or (read_place(store) if store else Place())
    check_tracking(config.tracking, config.root)
    check_place(config, place, store, from_stage)
    check_device(config, place, store, from_stage)


def start_run(config: RunConfig, name: str | None, place: Place | None, *, local: bool) -> int:
    """Start a run of ``config``; return the exit code. Raises ConfigError before creating a folder if it cannot run."""
    check_given_place(config, place)
    check_inputs(config)
    return launch_run(RunStore.create(config, name), place, local=local, is_new=True, is_checked=True)


def launch_run(
    store: RunStore, place: Place | None, *, local: bool, is_new: bool = False, is_checked: bool = False
) -> int:
    """Start or resume the run in ``store`` at ``place`` (None: its last place), which fits it; return the exit code.

    Problems and models are checked first, unless ``is_checked`` or the problems are prepared. A new run whose
    configuration is refused before it has sampled anything is removed, so that its name stays free.
    """
    keep_place(store, place)
    console = open_console()
    console.print(f"run {store.run_id} in {shorten_path(store.path)}", markup=False, soft_wrap=True)
    resume = store.format_command("resume") + (" --local" if local else "")
    try:
        if not is_checked and store.find(Step("prepare", 0).output) is None:
            check_inputs(store.config())
        result = run_stages(store, local=local)
    except KeyboardInterrupt as error:
        console.quiet = False
        return report_interrupt(error, resume, console)
    except BaseException as error:
        if is_new and was_refused(store, error):
            remove_run(store)
        elif not isinstance(error, ConfigError):
            stopped = f"the run stopped; finished work is kept. Fix the cause, then resume with:\n  {resume}"
            Console(stderr=True, highlight=False, soft_wrap=True).print(stopped, markup=False)
        raise
    console.quiet = False
    print_closing(result, console, brief=is_quiet())
    return 0


def resume_run(store: RunStore, from_stage: str | None, place: Place | None, *, local: bool) -> int:
    """Resume the run in ``store``, rewound to ``from_stage`` if given; return the exit code."""
    # First, so that nothing is set aside for a place where the run cannot run.
    config = store.config()
    check_given_place(config, place, store, from_stage)
    if from_stage is not None:
        check_repeated_inputs(steps_to_repeat(store, config, from_stage), config)
        rewind_run(store, from_stage)
    return launch_run(store, place, local=local)


def rewind_run(store: RunStore, name: str) -> None:
    """Set aside the committed outputs of the step ``name``, ``STAGE[:ITERATION]``, and of all later steps."""
    with hold_run(store):
        if repeated := steps_to_repeat(store, store.config(), name):
            folder = shorten_path(store.set_aside([step.output for step in repeated]))
            print(f"{format_count(len(repeated), 'committed stages')}, from {repeated[0]} on, set aside in {folder}")


def serve_schedule(
    config: Path, overrides: Sequence[str], timetable: Timetable, name: str, limit: int, place: Path | None
) -> int:
    """Start runs by a schedule until interrupted, then return 0.

    Raises ConfigError if another process serves a schedule of this name, whose deployment this one would replace.
    """
    resolved = load_config(config, overrides)
    check_given_place(resolved, load_place(place) if place is not None else None)
    check_inputs(resolved)
    home = resolved.root / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    refusal = f"schedule {name} is served by process {{holder}} already; stop it, or give another --name"
    with hold_file(home / f"serve-{name}.lock", refusal), LocalServer(home, schedules=True) as server:
        with show_activity(LOADING["Prefect"]):
            from pipelines.flows.schedule import serve_flow  # prefect, loaded while the server starts
            from pipelines.flows.train import name_server

            server.wait_until_ready()
        with suppress(KeyboardInterrupt, CancelledError), name_server():
            serve_flow(config, overrides, timetable, name, limit, place)
    print("stopped; the schedule is paused until you start it again")
    return 0


def report_interrupt(error: KeyboardInterrupt, resume: str, console: Console) -> int:
    """Print how the command ended and how to resume it; return its exit code."""
    text = f"\n{describe_interrupt(error)}; finished work is kept. Resume with:\n  {resume}"
    console.print(text, markup=False, soft_wrap=True)
    return find_exit_code(error)
