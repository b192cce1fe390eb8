"""``magrpo show``: prints a run on one screen, and opens its report in the browser."""

import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich import box
from rich.table import Table

from magrpo.config.run import RunConfig
from magrpo.progress.activity import open_console, show_activity
from magrpo.reports.budget import build_ledger
from magrpo.reports.figures import (
    SPLIT_TITLES,
    UNDEFINED,
    format_budget,
    format_interval,
    format_wall_time,
    quantity_title,
    sort_summary_keys,
)
from magrpo.reports.health import read_findings
from magrpo.reports.publish import REPORT, find_report, rebuild_report
from magrpo.reports.verdict import judge_evaluations
from magrpo.run.files import read_evaluations, read_place
from magrpo.run.store import CONFIG, RunStore
from magrpo.tracking.wall_time import read_wall_time
from magrpo.training.closing import (
    find_agents,
    print_answers,
    print_commands,
    print_entry,
    print_files,
    print_next,
    print_path,
    print_place,
    print_verdict,
)
from magrpo.types import HEADLINE, PENALTY, EvalReport
from pipelines.arguments import Json, Root, RunId
from pipelines.commands.runs import Summary, summarize_folder

MAX_ROWS = 9
"""Number of evaluations shown at most: the first, the last and evenly spaced ones in between."""


def show_run(
    run: RunId,
    /,
    *,
    open_report: Annotated[bool, Parameter(name="--open", negative=())] = False,
    rebuild: Annotated[bool, Parameter(negative=())] = False,
    as_json: Json = False,
    root: Root = Path("runs"),
) -> int:
    """Print a run on one screen: state, verdict, evaluations, cost, files and the next commands; the exit code is 0.

    Args:
        run: Id of a run, or its folder.
        open_report: Open the report in the browser, if there is a display; that of an unfinished run is written first.
        rebuild: Write the report again from the evaluations so far.
    """
    store = locate_run(run, root)
    if open_report or rebuild:
        with show_activity("writing the report"):
            page = rebuild_report(store) if rebuild else find_report(store)
        if open_report and has_display():
            webbrowser.open(page.as_uri())
    config = store.config()
    with show_activity("reading the run"):
        summary = summarize_folder(store.path)
        reports = read_evaluations(store)
        facts = _collect_facts(store, config, summary, reports) if as_json else {}
    if as_json:
        print(json.dumps(facts, indent=2, default=asdict))  # records as objects, numbers unrounded
    else:
        _print_screen(store, config, summary, reports)
    return 0


def locate_run(name: str, root: Path) -> RunStore:
    """Find the run with the id ``name`` in ``root``, or in the folder ``name``; ConfigError if neither exists."""
    folder = Path(name).resolve()
    return RunStore(folder.parent, folder.name) if (folder / CONFIG).is_file() else RunStore.open(root, name)


def has_display() -> bool:
    """Whether a browser can open a window on this machine."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def _collect_facts(
    store: RunStore, config: RunConfig, summary: Summary, reports: Sequence[EvalReport]
) -> dict[str, object]:
    wall_time = read_wall_time(store.path)
    report = store.path / REPORT
    agents = find_agents(store)
    return {
        "run": store.run_id,
        "folder": str(store.path),
        "state": summary.state,
        "iterations": summary.iterations,
        "num_iterations": summary.config["train.num_iterations"],
        "place": read_place(store).describe(),
        "verdict": judge_evaluations(reports, config) if reports else None,
        "findings": read_findings(store),
        "evaluations": [{"iteration": one.policy_version, "summary": one.summary} for one in reports],
        "budget": build_ledger(store.stage_metrics())[-1],
        "wall_time": wall_time,
        "report": str(report) if report.exists() else None,
        "agents": str(agents) if agents else None,
        "config": dict(summary.config),
    }


def _print_screen(store: RunStore, config: RunConfig, summary: Summary, reports: Sequence[EvalReport]) -> None:
    console = open_console()
    done = f"{summary.iterations} of {config.train.num_iterations} iterations"
    print_entry(console, "run:", f"{store.run_id}, {summary.state}, {done}, seed {config.train.seed}", "bold")
    agents = ", ".join(f"{agent.name} ({agent.model.rstrip('/').rpartition('/')[2]})" for agent in config.agents)
    kinds = f"problems {config.problems.kind}, environment {config.env.kind}, reward {config.reward.kind}"
    print_entry(console, "task:", f"{agents}; {kinds}")
    metrics = list(store.stage_metrics())
    if reports:
        print_verdict(metrics, reports, config, console)
        console.print(tabulate_evaluations(reports, narrow=console.is_terminal and console.width < 80))
        print_answers(metrics, reports, config, console)
    budget = build_ledger(metrics)[-1]
    if budget.updates:
        print_entry(console, "budget:", format_budget(budget))
    print_place(store, console)
    wall_time = read_wall_time(store.path)
    if wall_time is not None:
        started = f"{datetime.fromtimestamp(summary.started_s):%Y-%m-%d %H:%M}"
        print_entry(console, "time:", f"{format_wall_time(wall_time)}; started {started}")
    print_path(console, "folder:", store.path)
    print_files(store, console)
    if summary.state in ("finished", "running"):
        print_next(store, config, console)
    else:
        print_commands("next:", {store.format_command("resume"): "resume it where it stopped"}, console)


def tabulate_evaluations(reports: Sequence[EvalReport], *, narrow: bool) -> Table:
    """Tabulate the mean return of each split at each evaluation, with its interval unless ``narrow``.

    On held-out problems it also tabulates the penalty and pass@1, as far as they were measured. A dash: not measured.
    """
    last = len(reports) - 1
    chosen: Sequence[int] = range(last + 1)
    if last >= MAX_ROWS:
        chosen = sorted({round(i * last / (MAX_ROWS - 1)) for i in range(MAX_ROWS)})
    measured = {key for report in reports for key in report.summary}
    keys = [key for key in sort_summary_keys(measured) if key.endswith("/sampled")]
    title = "return, % of the maximum" if narrow else "return, % of the maximum [95 %]"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("iteration", justify="right")
    for key in keys:
        table.add_column(SPLIT_TITLES[key.partition("/")[0]], justify="right")
    others = [name for name in (PENALTY, "pass_at_1") if name in reports[-1].summary[HEADLINE]]
    for name in others:
        table.add_column(f"{quantity_title(name)} (held-out)", justify="right")
    for report in (reports[i] for i in chosen):
        cells = []
        for key in keys:
            value = format_interval("return", report.summary.get(key, {}).get("return"))
            cells.append(value.partition(" [")[0] if narrow else value)
        headline = report.summary[HEADLINE]
        cells += [f"{headline[name].mean:.1%}" if name in headline else UNDEFINED for name in others]
        table.add_row(str(report.policy_version), *cells)
    return table
