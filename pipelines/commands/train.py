"""What ``magrpo train`` and ``magrpo sync`` do: start what a run needs, let it run, say what came of it.

Imports prefect only where a run is made with it.
"""

from __future__ import annotations

import shutil
import sys
from asyncio import CancelledError
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from magrpo.config import load_config
from magrpo.layout import rerun
from magrpo.plugins import ConfigError
from magrpo.reports.baselines import BaselineTable, read_baselines
from magrpo.reports.budget import build_ledger
from magrpo.reports.figures import closing_table, format_budget, format_difference, judge_gain, start_title
from magrpo.reports.problem_means import mean_returns, paired_gain
from magrpo.reports.tables import print_tables
from magrpo.store import RunStore
from magrpo.tracking import MlflowTracker, without_password
from magrpo.types import HEADLINE
from pipelines.flows.local_server import LocalServer
from pipelines.progress.notify import Notices
from pipelines.training.execute import Result, execute, only_one
from pipelines.training.stages import load_report

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def train(store: RunStore, *, local: bool) -> int:
    """Run or go on with ``store``; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    root, run_id = store.path.parent, store.run_id
    console.print(f"run {run_id} in {near(store.path)}")
    again = f"{tool('magrpo')} train --resume {run_id} --root {near(root)}{' --local' if local else ''}"
    try:
        result = run_stages(store, console, local=local)
    except KeyboardInterrupt:
        console.print(f"\ninterrupted; every committed stage is kept. Go on with:\n  {again}")
        return INTERRUPTED
    except ConfigError:
        raise
    except BaseException:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"the run stopped; every committed stage is kept. When the cause is gone, go on with:\n  {again}"
        )
        raise
    conclude(result, console)
    return 0


def rewind(store: RunStore, name: str) -> None:
    """Take the stage ``name``, ``STAGE[:ITERATION]``, and what follows it out of the run; nothing is deleted.

    Raises:
        ConfigError: there is no such stage, or another process works on the run.
    """
    with only_one(store):
        again = rerun(store, store.config(), name)
        if again:
            folder = store.set_aside([step.folder for step in again])
            print(f"{len(again)} committed stages from {again[0]} on are set aside in {near(folder)}")


def run_stages(store: RunStore, console: Console, *, local: bool) -> Result:
    """Go through the stages of ``store``, as a Prefect flow or, ``local``, without."""
    root, run_id = store.path.parent, store.run_id
    if local:
        return execute(root, run_id, lambda stages: stages, {}, observers=[Notices()])
    return _with_prefect(root, run_id, console)


def _with_prefect(root: Path, run_id: str, console: Console) -> Result:
    with LocalServer(root / "prefect") as server:
        with only_one(RunStore.open(root, run_id)):  # the flow run of a process that lives must not be marked
            if server.starts:
                console.print(
                    "starting Prefect (the first time in a folder takes up to half a minute; --local goes without)"
                )
            # Loaded while the server starts.
            import magrpo.policy  # noqa: F401
            from pipelines.flows.train import mark_killed
            from pipelines.flows.train import train as flow

            server.wait()
            mark_killed(run_id)
        return flow(str(root), run_id)


def conclude(result: Result, console: Console) -> None:
    """What came of it, where it lies, and what to type next."""
    store, config = result.store, result.store.config()
    if config.baselines.rows:
        console.print()
        print_tables([BaselineTable(config, read_baselines(store, config)).summary_table()], _wide(console))
        for name, reason in config.baselines.left_out.items():
            console.print(f"left out: {name}: {reason}")
        _where_it_lies(result, console)
        return
    pointers = [result.outcome.evaluations[iteration] for iteration in sorted(result.outcome.evaluations)]
    reports = [load_report(store, pointer) for pointer in pointers]
    console.print()
    console.print(closing_table(reports, config.reward.maxima, start_title(config)))
    first, last = (report.summary[HEADLINE]["return"] for report in (reports[0], reports[-1]))
    if len(reports) == 1:
        console.print(
            f"measured: the joint return on held-out problems is {last.mean:.1%} [{last.low:.1%}, {last.high:.1%}] "
            "of the maximum"
        )
    else:
        then, now = (mean_returns(report, HEADLINE, config.reward) for report in (reports[0], reports[-1]))
        gain = paired_gain(then, now, config.eval.seed)
        console.print(
            f"result:  {judge_gain(gain)}: the joint return on held-out problems went from {first.mean:.1%} to "
            f"{last.mean:.1%} of the maximum in {config.train.num_iterations} iterations, {format_difference(gain)} "
            "percentage points paired by problem"
        )
    budget = build_ledger(store.stage_metrics())[-1]
    if budget.updates:
        console.print(f"budget:  {format_budget(budget)}")
    _where_it_lies(result, console)


def _where_it_lies(result: Result, console: Console) -> None:
    store, config = result.store, result.store.config()
    rows = config.baselines.rows
    console.print(f"time:    {_spent(result)}")
    page = "baselines.html" if rows else "report.html"
    console.print(f"report:  {near(store.folder(result.outcome.report) / page)}; pictures and tables beside it")
    if not rows:
        console.print(f"agents:  {near(store.folder(result.outcome.checkpoint) / 'weights')}")
    if result.promotion is not None:
        console.print(f"team:    {result.promotion}")
    elif config.registry.model is not None and config.train.num_iterations:
        console.print(f"team:    not registered; {tool('magrpo')} train --resume {store.run_id} goes on with it")
    command, look = result.look
    if result.undelivered:
        console.print(f"waiting: {result.undelivered} records for MLflow; {tool('magrpo')} sync {store.run_id}")
    if command:
        console.print(f"next:    {tool('mlflow')}{command.removeprefix('mlflow')}\n         then open {look}")
    else:
        console.print(f"next:    open {look}")


def _wide(console: Console) -> Console:
    """The console, with room for a wide table where nothing has a width to keep to."""
    if not console.is_terminal:
        console.width = 160
    return console


def serve(
    config: Path, overrides: Sequence[str], when: tuple[str | None, str | None, str | None, str], name: str, limit: int
) -> int:
    """Start runs by a schedule until interrupted; ``when`` is cron, interval, rrule, time zone."""
    resolved = load_config(config, overrides)
    with LocalServer(resolved.root / "prefect", schedules=True) as server:
        print("starting Prefect (the first time in a folder takes up to half a minute)", flush=True)
        from pipelines.flows import schedule

        timetable = schedule.Timetable(*when)
        timetable.schedule()
        server.wait()
        with suppress(KeyboardInterrupt, CancelledError):
            schedule.serve(config, overrides, timetable, name, limit)
    print("ended; what is missed until this schedule is served again is made up for then, once")
    return 0


def _spent(result: Result) -> str:
    timing = result.timing
    shares = {**timing.stages, "orchestration": timing.orchestration + timing.loop, "tracking": timing.tracking}
    shown = ", ".join(f"{name} {seconds / timing.wall:.0%}" for name, seconds in shares.items() if seconds > 0)
    return f"{timing.wall:.0f} s ({shown})"


def sync(run_id: str, root: Path) -> int:
    """Deliver the tracking records that still wait; the exit code is 1 if they still do."""
    store = RunStore.open(root, run_id)
    tracker = MlflowTracker(store.config().tracking, root, run_id, run_id, store.path)
    tracker.flush()
    waiting = f"{tracker.undelivered} records of {run_id} still wait for {without_password(tracker.uri)}"
    print(waiting if tracker.undelivered else f"everything of {run_id} is delivered")
    return int(tracker.undelivered > 0)


def near(path: Path) -> str:
    """The path as a person here would type it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def tool(name: str) -> str:
    """How to call a command of this environment from here."""
    beside = Path(sys.executable).parent / name
    return name if shutil.which(name) or not beside.exists() else near(beside)
