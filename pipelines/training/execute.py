"""One training run from its run directory: opens what a run needs, goes through the loop, and says what came of it.

The same function serves the Prefect flow and ``--local``; they differ in ``as_stages`` only. Imports no prefect.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

from magrpo.config_diff import flatten_config
from magrpo.plugins import ConfigError
from magrpo.store import RunStore
from magrpo.tracking import MlflowTracker, provenance
from pipelines.progress.console import RunConsole
from pipelines.progress.state import Attempt, Observer, Standing, observed
from pipelines.training import loop as chain
from pipelines.training.champion import begin
from pipelines.training.description import FLOW_RUN_URL, description
from pipelines.training.promotion import Promotion, Undo, settle, undoing
from pipelines.training.stages import Session

STAGES = ("prepare", "start", "rollout", "score", "credit", "update", "evaluate", "baseline", "report")
"""The methods of :class:`pipelines.training.loop.Stages`."""

AsStages = Callable[[chain.Stages], chain.Stages]
"""Wraps the stages, for example as Prefect tasks."""


@dataclass(slots=True)
class Timing:
    """Where the wall time of a run went, in seconds.

    ``stages`` is measured inside the wrapping of the stages, ``wrapped`` outside; so the difference is what the
    orchestrator takes. ``tracking`` is the time the loop spent in calls of the tracker.
    """

    wall: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    wrapped: dict[str, float] = field(default_factory=dict)
    tracking: float = 0.0

    @property
    def orchestration(self) -> float:
        return sum(self.wrapped.values()) - sum(self.stages.values())

    @property
    def loop(self) -> float:
        """Outside stages, orchestrator and tracker: the loop itself, mostly reading manifests."""
        return self.wall - sum(self.wrapped.values()) - self.tracking


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run."""

    store: RunStore
    outcome: chain.Outcome
    timing: Timing
    look: tuple[str, str]
    """The command that shows the MLflow run (empty for a server), and the address of its page."""
    undelivered: int
    """Tracking records that wait for their server."""
    mlflow_run_id: str
    """Empty if MLflow was not reached."""
    promotion: Promotion | None = None
    """What became of the team in the model registry; None: it is not registered, or not yet."""


def execute(
    root: Path,
    run_id: str,
    as_stages: AsStages,
    tags: Mapping[str, str],
    undo: Undo = undoing,
    observers: Sequence[Observer] = (),
) -> Result:
    """Go through the loop, from the first uncommitted stage on, and register what came of it.

    ``tags`` are added to the MLflow run; ``undo`` guards the move of the champion's alias; ``observers`` are told.

    Raises:
        ConfigError: there is no such run, another process works on it, or its configuration is unusable here.
        RegistryError: the run is to start from the champion, and MLflow does not answer.
    """
    store = RunStore.open(root, run_id)
    config = store.config()
    attempt = Attempt(store, config.notify, Standing(config.train.num_iterations, config.reward.fraction))

    def evaluate(name: str) -> chain.Outcome:
        return execute(root, name, as_stages, tags).outcome

    with only_one(store), observed(attempt, observers):
        result = _go_through(attempt, begin(store), as_stages, tags, observers)
        promotion = settle(store, result.outcome, result.mlflow_run_id, evaluate, undo)
        if promotion is not None and promotion.promoted and promotion.fresh:
            for observer in observers:
                observer.promoted(str(promotion))
        return replace(result, promotion=promotion)


def _go_through(
    attempt: Attempt, start: str, as_stages: AsStages, tags: Mapping[str, str], observers: Sequence[Observer]
) -> Result:
    """The loop; ``start`` says what the agents start from, if that is worth saying."""
    store, timing = attempt.store, Timing()
    config = store.config()
    with RunConsole(attempt.standing) as console:
        if start:
            console.say(start)
        tracker = MlflowTracker(config.tracking, store.path.parent, store.run_id, store.run_id, store.path)
        attempt.look = tracker.how_to_look

        def describe(status: str) -> None:
            tracker.tags(description(store, status, tags.get(FLOW_RUN_URL)))

        with recorded(tracker, describe, timing):
            tracker.params(flatten_config(config))
            tracker.tags({**provenance(), "magrpo.seed": str(config.train.seed), **tags})
            describe("RUNNING")
            watched = tracker.watch_system() if config.tracking.system_metrics else nullcontext()
            with watched, Session(config, store, console, tracker.tags) as session:
                stages = clocked(session, timing.stages)
                stages = clocked(reported(as_stages(stages), observers), timing.wrapped)
                started = perf_counter()
                outcome = chain.run(config, stages, store, tracker, lambda: describe("RUNNING"))
                timing.wall = perf_counter() - started
    return Result(store, outcome, timing, tracker.how_to_look(), tracker.undelivered, tracker.mlflow_run_id)


@contextmanager
def recorded(tracker: MlflowTracker, describe: Callable[[str], None], timing: Timing) -> Iterator[None]:
    """Record what happens inside as under way, and then how it ended; ``describe`` is told that, too."""
    status = "KILLED"  # by Ctrl-C, or by Prefect's cancelling
    try:
        tracker.begin()
        yield
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        timing.tracking = tracker.blocked_s
        describe(status)
        tracker.close(status)


def clocked(stages: chain.Stages, seconds: dict[str, float]) -> chain.Stages:
    """The same stages, adding up in ``seconds`` how long each takes."""

    @contextmanager
    def clock(name: str) -> Iterator[None]:
        started = perf_counter()
        try:
            yield
        finally:
            seconds[name] = seconds.get(name, 0.0) + perf_counter() - started

    return _inside(clock, stages)


def reported(stages: chain.Stages, observers: Sequence[Observer]) -> chain.Stages:
    """The same stages; ``observers`` are told of each that has passed."""

    @contextmanager
    def report(_name: str) -> Iterator[None]:
        yield
        for observer in observers:
            observer.passed()

    return _inside(report, stages)


def _inside(context: Callable[[str], AbstractContextManager[None]], stages: chain.Stages) -> chain.Stages:
    """The same stages, each call of one inside ``context`` of its name."""

    def wrap(name: str) -> Callable[..., Any]:
        method = getattr(stages, name)

        @wraps(method)  # Prefect reads its signature
        def call(*args: Any, **kwargs: Any) -> Any:
            with context(name):
                return method(*args, **kwargs)

        return call

    return cast(chain.Stages, SimpleNamespace(**{name: wrap(name) for name in STAGES}))


@contextmanager
def only_one(store: RunStore) -> Iterator[None]:
    """Hold the run directory; a lock of this process, which the kernel takes back when the process ends.

    Raises:
        ConfigError: another process holds it.
    """
    with (store.path / "lock").open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ConfigError(f"run {store.run_id}: process {file.read() or '?'} is working on it already") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_held(folder: Path) -> bool:
    """Whether another process works on the run in ``folder``; takes no lock itself."""
    try:
        with (folder / "lock").open("rb") as file:
            # struct flock of Linux: type, whence, start, length, process
            question = struct.pack("hhlli", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            answer = struct.unpack("hhlli", fcntl.fcntl(file, fcntl.F_GETLK, question))
    except FileNotFoundError:
        return False
    return bool(answer[0] != fcntl.F_UNLCK)
