"""Executes the runs of a study, one after the other or several side by side, and reports them.

Starting a study again goes on where it stopped. This module does not import Prefect.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from uuid import uuid4

from rich.console import Console

from magrpo.config.run import RunConfig
from magrpo.config.study import StudyRun
from magrpo.errors import first_line
from magrpo.experiments.study import Study, fix_study
from magrpo.process.environment import set_verbosity
from magrpo.process.parent import exit_with_parent
from magrpo.process.signals import find_exit_code, find_interrupt, is_interrupt, raise_on_signals
from magrpo.progress.activity import end_startup
from magrpo.reports.study import StudyReport
from magrpo.run.files import keep_place, read_place
from magrpo.run.store import RunStore
from magrpo.tracking.mlflow_runs import PARENT_FOLDER_TAG, PARENT_TAG, STUDY_TAG, MlflowTracker
from magrpo.tracking.outbox import FOLDER_TAG, Outbox, find_folder_id

RunOne = Callable[[RunStore], object]


def run_study(study: Study, run_one: RunOne, console: Console, workers: int = 1) -> dict[str, str]:
    """Execute the unfinished runs, pilots first, even after failures; return the reason of each failure.

    Then prints and writes the report. An arm begins only when its pilots are finished, all of them, because a rate that
    was chosen without some of them might change later.

    Args:
        study: The study.
        run_one: Executes a run to its end. It must be picklable for several ``workers``.
        console: Names each run when it begins.
        workers: How many runs to execute side by side. Several have a process each, whose progress is not shown.
    """
    record = fix_study(study)
    pilots, reported = study.list_pilots(), study.list_reported({})
    some_config = study.configure_run(study.list_samples()[0])
    open_tracker = partial(MlflowTracker, some_config.tracking, study.root, study.name, study.folder, STUDY_TAG)
    parent = open_tracker()
    parent.record_start()
    parent.params({"digest": record["digest"], **record["fixed"]})
    parent.flush()  # before the runs, which look the parent up
    runs = _Runs(study, run_one, console, workers, len(pilots) + len(reported))
    failures, status = runs.failures, "FAILED"
    try:
        runs.execute(pilots)
        rates = study.choose_rates()
        runs.execute(study.list_ready(rates))
        waiting = [run.run_id for run in reported if run.arm not in rates]
        failures |= dict.fromkeys(waiting, "not started: pilots of its arm are not finished")
        status = "FAILED" if failures else "FINISHED"
    except BaseException as error:
        status = "KILLED" if is_interrupt(error) else "FAILED"
        raise
    finally:
        console.quiet = False  # --quiet hides the progress of the runs, not the result
        parent = open_tracker()
        rates = study.choose_rates()
        report = StudyReport(study.name, study.config, study.read_finished(rates), rates, failures, record)
        for path in report.write_files(study.folder, study.read_remembered()):
            parent.artifact(path, "study")
        report.print(console, study.folder)
        parent.close(status)
    return failures


@dataclass(slots=True)
class _Runs:
    """The runs of a study while they are executed."""

    study: Study
    run_one: RunOne
    console: Console
    workers: int
    total: int
    number: int = 0
    """Number of the run that was begun last, from 1 to ``total``."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why runs failed, by name."""

    def execute(self, runs: Iterable[StudyRun]) -> None:
        """Execute the runs that are not finished."""
        apart: list[_RunApart] = []
        try:
            for run in runs:
                if len(apart) == self.workers:
                    self._await_one(apart)
                if not self._announce(run):
                    continue
                if self.workers == 1:
                    self._note(run, execute_run(self.study, self.run_one, run))
                else:
                    end_startup()  # the first run would end it, in this process
                    apart.append(_RunApart(self.study, self.run_one, run, self.workers))
            while apart:
                self._await_one(apart)
        finally:  # none are left but after an interrupt
            for one in apart:
                one.process.terminate()
            for one in apart:
                one.process.join()

    def _announce(self, run: StudyRun) -> bool:
        """Name the run and say whether it is to be executed."""
        self.number += 1
        already = self.study.is_finished(run)
        rate = "" if run.rate is None else f", optim.lr={run.rate:g}"
        remark = ", finished already" if already else ""
        self.console.print(f"\n[{self.number}/{self.total}] {run.run_id}{rate}{remark}", markup=False)
        return not already

    def _await_one(self, apart: list["_RunApart"]) -> None:
        """Wait until one of the runs ends."""
        ended = wait([one.process.sentinel for one in apart])
        for one in [one for one in apart if one.process.sentinel in ended]:
            apart.remove(one)
            reason = one.read_reason()
            self._note(one.run, reason)
            if not reason:
                self.console.print(f"{one.run.run_id} is finished", markup=False)

    def _note(self, run: StudyRun, reason: str) -> None:
        if reason:
            self.failures[run.run_id] = reason
            self.console.print(f"{run.run_id} failed: {reason}", markup=False)


def execute_run(study: Study, run_one: RunOne, run: StudyRun) -> str:
    """Execute a run; return why it failed, or nothing. A traceback goes to the study's folder."""
    store, traceback_file = study.find_store(run.run_id), study.folder / f"{run.run_id}.error.txt"
    traceback_file.unlink(missing_ok=True)  # of an earlier attempt
    try:
        if not store.exists():
            RunStore.create(_avoid_measured_dtype(study.configure_run(run)), run.run_id)
        keep_place(store, read_place(study.folder_store))
        with closing(Outbox(store.path)) as outbox:
            if not outbox.size:  # attach the run to the study before its first record, with an identity of its own
                parent = {PARENT_TAG: study.name, PARENT_FOLDER_TAG: find_folder_id(study.folder)}
                outbox.append({"kind": "tags", "values": {**parent, FOLDER_TAG: uuid4().hex}})
        run_one(store)
    except Exception as error:  # whatever ends one run, the others are made, unless the study is to end
        if is_interrupt(error):
            raise
        traceback_file.write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(error).__name__}: {first_line(error)}"
    return "" if study.is_finished(run) else f"its evaluations have no {study.config.quantity}"


def _avoid_measured_dtype(config: RunConfig) -> RunConfig:
    """On a CPU, name float32 for ``auto``: runs that are compared do not choose their precision by measurement."""
    if config.model.dtype != "auto" or config.model.device == "cuda":
        return config
    from magrpo.model.lineup import device_of  # torch, transformers

    if device_of(config.model).type != "cpu":
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})


class _RunApart:
    """A run in a process of its own, one of ``workers`` that share the processors of this machine."""

    def __init__(self, study: Study, run_one: RunOne, run: StudyRun, workers: int) -> None:
        self.run = run
        self._receiver, sender = Pipe(duplex=False)
        # Forking a process in which torch or Prefect has threads may deadlock the child.
        self.process: SpawnProcess = get_context("spawn").Process(
            target=_work, args=(study, run_one, run, os.getpid(), sender), name=run.run_id
        )
        with _share_processors(workers):
            self.process.start()
        sender.close()

    def read_reason(self) -> str:
        """Return why the run failed, or nothing, once its process has ended."""
        self.process.join()
        try:
            reason: str = self._receiver.recv()
        except EOFError:
            status = self.process.exitcode or 0
            reason = f"its process ended with status {status if status >= 0 else 128 - status}"
        return reason


@contextmanager
def _share_processors(workers: int) -> Iterator[None]:
    """Let each of ``workers`` processes compute with its share of the processors, unless the user chose a number."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // workers))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


def _work(study: Study, run_one: RunOne, run: StudyRun, parent: int, sender: Connection) -> None:
    """Execute a run in this process, and send why it failed."""
    exit_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the study ends its runs by SIGTERM
    set_verbosity(quiet=True, verbose=False)
    with raise_on_signals():
        try:
            sender.send(execute_run(study, run_one, run))
        except BaseException as error:
            interrupt = find_interrupt(error)
            if not isinstance(interrupt, KeyboardInterrupt):
                raise
            sys.exit(find_exit_code(interrupt))
