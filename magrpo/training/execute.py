"""One attempt at a run, as a Prefect flow or with ``--local``: opens resources, runs steps, registers the team."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter, time

from magrpo.config.place import Place
from magrpo.config.run import RunConfig
from magrpo.planning.place_check import check_place
from magrpo.planning.warnings import list_config_warnings
from magrpo.process.faults import name_full_disk
from magrpo.process.signals import is_interrupt
from magrpo.progress.activity import end_startup, show_activity
from magrpo.progress.console import RunConsole
from magrpo.progress.state import Attempt, Observer, RunState, observe_attempt
from magrpo.reports.publish import publish_report
from magrpo.run.config_diff import flatten_config
from magrpo.run.files import read_place
from magrpo.run.lock import hold_run
from magrpo.run.steps import Step, makes_tables
from magrpo.run.store import Pointer, RunStore
from magrpo.tracking.mlflow_runs import MlflowTracker
from magrpo.tracking.provenance import collect_provenance
from magrpo.training.champion import start_from_champion
from magrpo.training.keys import set_aside_stale
from magrpo.training.loop import Outcome, RunStep, run_steps
from magrpo.training.promotion import Promotion, register_team
from magrpo.training.recorder import FLOW_RUN_URL, RunRecorder, describe_run
from magrpo.training.stages import StageRunner

WrapStep = Callable[[RunStep], RunStep]
"""Wraps the function that runs a step, for example as Prefect tasks."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """How an attempt spent its time, in seconds."""

    wall: float
    """Seconds from the start of the command to the end of the last stage."""
    stages: Mapping[str, float]
    """Seconds of each stage."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run."""

    store: RunStore
    outcome: Outcome
    timing: Timing
    mlflow_page: tuple[str, str]
    """The command that serves MLflow (empty for a server), and the address of the run's page."""
    runs_page: str
    """Address of the page in MLflow that compares the runs; empty if MLflow was not reached."""
    undelivered: int
    """Number of tracking records that are not delivered to MLflow yet."""
    mlflow_run_id: str
    """Id of the run in MLflow; empty if MLflow was not reached."""
    promotion: Promotion | None = None
    """The registered version and the gate's decision; None if the team is not registered, or not yet."""


def execute(
    root: Path, run_id: str, wrap: WrapStep, tags: Mapping[str, str], observers: Sequence[Observer] = ()
) -> Result:
    """Run the steps of a run from the first uncommitted one on, and register its team.

    ``tags`` are added to the MLflow run. Raises ConfigError if there is no such run, another process works on it, or
    its configuration is unusable here; RegistryError if the run is to start from the champion but MLflow does not
    answer.
    """
    store = RunStore.open(root, run_id)
    config = store.config()
    attempt = Attempt(store, config.notify, RunState.begin(store.planned_config()))
    with hold_run(store), observe_attempt(attempt, observers), name_full_disk(store.path):
        result = _run_loop(attempt, wrap, tags, observers)
        with _correct_status(store, tags):
            return _close_run(config, store, result, observers)


def _close_run(config: RunConfig, store: RunStore, result: Result, observers: Sequence[Observer]) -> Result:
    """Write the agents and the report of a run whose stages are committed, and register its team."""
    if config.train.num_iterations and not makes_tables(config):
        with show_activity("writing the agents' folder"):
            from magrpo.export.agents_folder import write_run_agents  # torch, transformers and peft

            write_run_agents(store)
    publish_report(store)
    promotion = register_team(store, result.outcome, result.mlflow_run_id)
    if promotion is not None and promotion.promoted and promotion.fresh:
        for observer in observers:
            observer.team_promoted(str(promotion))
    return replace(result, promotion=promotion)


def _run_loop(attempt: Attempt, wrap: WrapStep, tags: Mapping[str, str], observers: Sequence[Observer]) -> Result:
    """Settle the configuration, open everything the steps need, and run them."""
    store, seconds = attempt.store, dict[str, float]()
    start = start_from_champion(store)
    began_s = end_startup()
    with RunConsole(attempt.state) as console:
        place = read_place(store)
        config = _settle_config(store, place, console)
        for warning in list_config_warnings(config):
            log.warning("%s", warning)
        for line in filter(None, [start, "" if place.is_default else f"at {place.describe()}"]):
            console.say(line)
        with _record_attempt(attempt, config, {**place.list_tags(), **tags}, console, began_s) as tracker:

            def describe_evaluation() -> None:
                if attempt.state.num_computed:  # not for each one that was committed before: it reads the whole run
                    _describe(store, tracker, tags, "RUNNING")

            recorder = RunRecorder(config, store, tracker, describe_evaluation)
            with StageRunner(config, store, console, tracker.tags) as stages:
                run_step = _watch_steps(wrap(stages.run_step), seconds, observers)
                outcome = run_steps(config, store, run_step, recorder, stages.abort_steps)
            wall = time() - began_s
    return Result(
        store=store,
        outcome=outcome,
        timing=Timing(wall, seconds),
        mlflow_page=tracker.mlflow_page(),
        runs_page=tracker.runs_page(),
        undelivered=tracker.num_undelivered,
        mlflow_run_id=tracker.mlflow_run_id,
    )


def _settle_config(store: RunStore, place: Place, console: RunConsole) -> RunConfig:
    """Settle the precision, check the place, set aside outputs made with other prompts; return the configuration."""
    _settle_dtype(store, place, console)
    config = store.config()  # read after the champion and the precision, which may have changed it
    check_place(config, place, store)
    set_aside_stale(store, config)
    config = store.config()  # training may now last longer than before
    check_place(config, place, store)  # updates may have been set aside
    return config


def _settle_dtype(store: RunStore, place: Place, console: RunConsole) -> None:
    """Choose the precision of a new run that leaves it to ``auto``, and keep it: it is a part of the results.

    On a cluster, this machine says nothing about those that compute.
    """
    config = store.config()
    if config.model.dtype == "auto" and not place.address and store.find(Step("prepare", 0).output) is None:
        from magrpo.planning.precision import settle_dtype  # torch, transformers

        settled = settle_dtype(config, console.say)
        if settled != config:
            store.write_config(settled)


@contextmanager
def _record_attempt(
    attempt: Attempt, config: RunConfig, tags: Mapping[str, str], console: RunConsole, began_s: float
) -> Iterator[MlflowTracker]:
    """Yield the tracker of an attempt that began at ``began_s``, and record its configuration, ``tags`` and status."""
    store = attempt.store
    tracker = MlflowTracker(config.tracking, store.path.parent, store.run_id, store.path, began_s=began_s)
    attempt.mlflow_page = tracker.mlflow_page
    if config.tracking.system_metrics:
        tracker.watch_system()
    describe = partial(_describe, store, tracker, tags)
    with _record_status(tracker, describe, console, began_s):
        tracker.params(flatten_config(store.planned_config()))
        tracker.tags({**collect_provenance(), "magrpo.seed": str(config.train.seed), **tags})
        describe("RUNNING")
        yield tracker


@contextmanager
def _record_status(
    tracker: MlflowTracker, describe: Callable[[str], None], console: RunConsole, began_s: float
) -> Iterator[None]:
    """Record when the run began and how it ended; ``describe`` receives the status, too."""
    status = "KILLED"  # stays so on Ctrl-C, or when Prefect cancels the run
    try:
        tracker.record_start(began_s)
        yield
        status = "FINISHED"
    except Exception as error:
        status = "KILLED" if is_interrupt(error) else "FAILED"
        raise
    finally:
        console.show_work("delivering records to MLflow")
        _record_end(tracker, describe, status)


def _describe(store: RunStore, tracker: MlflowTracker, tags: Mapping[str, str], status: str) -> None:
    """Describe the run in MLflow, with a link to its flow run if ``tags`` name one."""
    tracker.tags(describe_run(store, status, tags.get(FLOW_RUN_URL)))


@contextmanager
def _correct_status(store: RunStore, tags: Mapping[str, str]) -> Iterator[None]:
    """Record the failure of the block, which works on a run whose end is recorded as FINISHED already."""
    try:
        yield
    except BaseException as error:
        tracker = MlflowTracker(store.config().tracking, store.path.parent, store.run_id, store.path)
        status = "KILLED" if is_interrupt(error) else "FAILED"
        _record_end(tracker, partial(_describe, store, tracker, tags), status)
        raise


def _record_end(tracker: MlflowTracker, describe: Callable[[str], None], status: str) -> None:
    tracker.record_end(status)
    try:
        describe(status)
    finally:
        tracker.flush()


def _watch_steps(run_step: RunStep, seconds: dict[str, float], observers: Sequence[Observer]) -> RunStep:
    """Add up the seconds of each stage in ``seconds``, and notify ``observers`` after each step."""

    one_at_a_time = Lock()  # with train.lag, steps run in several threads

    def watched(step: Step, inputs: Sequence[Pointer]) -> Pointer:
        started = perf_counter()
        try:
            pointer = run_step(step, inputs)
            with one_at_a_time:
                for observer in observers:
                    observer.step_finished(step)
            return pointer
        finally:
            with one_at_a_time:
                seconds[step.stage] = seconds.get(step.stage, 0.0) + perf_counter() - started

    return watched
