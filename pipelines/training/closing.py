"""What a finished run prints: what was learned, where its artifacts are, and the next command to type."""

from collections.abc import Iterator

from rich.console import Console

from magrpo.layout import AGENTS, WEIGHTS, makes_tables, read_evaluation
from magrpo.reports.baselines import BaselineTable, read_baselines
from magrpo.reports.budget import build_ledger
from magrpo.reports.figures import closing_table, format_budget, start_title
from magrpo.reports.page import print_tables
from magrpo.reports.verdict import judge_evaluations
from pipelines.environment import find_command, shorten_path
from pipelines.training.execute import Result


def print_closing(result: Result, console: Console) -> None:
    """Print what was learned, where the artifacts are, and what to type next."""
    store, timing, config = result.store, result.timing, result.store.config()
    console.print()
    if makes_tables(config):
        if not console.is_terminal:
            console.width = 160  # a file or a pipe has no width; the table is wide
        print_tables([BaselineTable(config, read_baselines(store, config)).summary_table()], console)
        for name, reason in config.baselines.left_out.items():
            console.print(f"left out: {name}: {reason}")
    else:
        _print_learned(result, console)
    seconds_by_part = timing.stages | {
        "orchestration": timing.orchestration + timing.loop,
        "tracking": timing.tracking,
    }
    shares = [f"{part} {seconds / timing.wall:.0%}" for part, seconds in seconds_by_part.items() if seconds > 0]
    console.print(f"time:    {timing.wall:.0f} s ({', '.join(shares)})")
    for line in _describe_artifacts(result):
        console.print(line)


def _print_learned(result: Result, console: Console) -> None:
    store, config = result.store, result.store.config()
    reports = [read_evaluation(store.folder(pointer)) for pointer in result.outcome.evaluations.values()]
    console.print(closing_table(reports, config.reward.maxima, start_title(config)))
    verdict = judge_evaluations(reports, config)
    console.print(f"result:  {verdict.sentence}")
    if verdict.advice:
        console.print(f"advice:  {verdict.advice}")
    budget = build_ledger(store.stage_metrics())[-1]
    if budget.updates:
        console.print(f"budget:  {format_budget(budget)}")


def _describe_artifacts(result: Result) -> Iterator[str]:
    store, outcome, config = result.store, result.outcome, result.store.config()
    page = "baselines.html" if makes_tables(config) else "report.html"
    yield f"report:  {shorten_path(store.folder(outcome.report) / page)}; pictures and tables beside it"
    if not makes_tables(config):
        trained = store.path / AGENTS
        yield f"agents:  {shorten_path(trained if trained.exists() else store.folder(outcome.checkpoint) / WEIGHTS)}"
    magrpo = find_command("magrpo")
    if result.promotion is not None:
        yield f"team:    {result.promotion}"
    elif config.registry.model is not None and config.train.num_iterations:
        yield f"team:    not registered; to register it: {magrpo} train --resume {store.run_id}"
    if result.undelivered:
        yield f"waiting: {result.undelivered} records for MLflow; to deliver them: {magrpo} sync {store.run_id}"
    command, page = result.mlflow_page
    if command:
        yield f"next:    {find_command('mlflow')}{command.removeprefix('mlflow')}\n         then open {page}"
    else:
        yield f"next:    open {page}"
