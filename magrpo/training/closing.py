"""The closing lines of a finished run: its verdict, time and files, and the commands to type next."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from magrpo.config.run import RunConfig
from magrpo.process.environment import find_command, shorten_path
from magrpo.reports.evaluations import EvaluatedRun
from magrpo.reports.figures import format_budget, format_duration, format_wall_time, tabulate_quantities
from magrpo.reports.health import answer_rows, list_advice, list_findings, list_warnings
from magrpo.reports.origin import suggest_commands
from magrpo.reports.publish import REPORT
from magrpo.reports.series import StageMetrics
from magrpo.reports.tables import print_tables
from magrpo.reports.verdict import judge_evaluations
from magrpo.run.files import AGENTS, checkpoint_weights, committed_iterations, read_evaluations, read_place
from magrpo.run.steps import makes_tables
from magrpo.run.store import RunStore
from magrpo.text import format_count
from magrpo.tracking.wall_time import read_wall_time
from magrpo.training.execute import Result, Timing
from magrpo.types import EvalReport

STYLES = {
    "better": "green",
    "better with reservations": "yellow",
    "worse": "red",
    "no reliable change": "yellow",
    "measured once": "",
}
"""The colour of each verdict."""
_LABEL = 9
"""Width in columns of a label such as ``result:``."""


def print_closing(result: Result, console: Console, *, brief: bool = False) -> None:
    """Print results, paths of the artifacts and next commands; if ``brief``, only verdict, paths and team."""
    store = result.store
    config = store.config()
    if brief and not makes_tables(config):
        print_verdict(list(store.stage_metrics()), read_evaluations(store), config, console)
        print_files(store, console)
        _print_team(result, config, console)
        return
    console.print()
    if makes_tables(config):
        from magrpo.reports.baselines import BaselineTable, read_baselines  # matplotlib
        from magrpo.reports.page import print_banners  # matplotlib

        table = BaselineTable(config, read_baselines(store, config))
        print_tables([table.paper_table(), table.summary_table(brief=True), *table.cross_play_tables()], console)
        print_banners([table.judge_rows()], console)
        for name, reason in config.baselines.left_out.items():
            print_entry(console, "skipped:", f"{name}: {reason}")
    else:
        _print_results(store, config, console)
    print_place(store, console)
    print_entry(console, "time:", _describe_time(store, result.timing))
    print_files(store, console)
    _print_team(result, config, console)
    _print_services(result, console)
    print_next(store, config, console)


def print_next(store: RunStore, config: RunConfig, console: Console) -> None:
    """Print commands for after a run: one opens its report, the others use its agents."""
    commands = {f"{store.format_command('show')} --open": "open the report"}
    if not makes_tables(config):
        commands |= {command: purpose for purpose, command in suggest_commands(store, config, find_command("magrpo"))}
    print_commands("next:", commands, console)


def print_entry(console: Console, label: str, text: str, style: str = "") -> None:
    """Print a label and its text; a terminal wraps the text between words in the column beside the label."""
    width = max(_LABEL, len(label) + 1)
    if not console.is_terminal:
        console.print(f"{label:<{width}}{text}", markup=False, soft_wrap=True)
        return
    grid = Table.grid(padding=0)
    grid.add_column(width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(label, Text(text, style))
    console.print(grid, soft_wrap=False)


def print_path(console: Console, label: str, path: Path) -> None:
    """Print a label and a path on one line, which a terminal shows as a link."""
    _print_link(console, label, shorten_path(path), path.as_uri())


def _print_link(console: Console, label: str, text: str, address: str) -> None:
    """Print a label and a text on one line, which a terminal shows as a link to the address."""
    link = Style(link=address) if console.is_terminal else Style()
    console.print(Text(f"{label:<{_LABEL}}").append(text, link), soft_wrap=True)


def print_commands(label: str, commands: Mapping[str, str], console: Console) -> None:
    """Print commands below each other, each with its comment where the line has room for it."""
    width = max(map(len, commands))
    room = console.width if console.is_terminal else 200
    shows_comments = _LABEL + width + 4 + max(map(len, commands.values())) <= room
    for command, comment in commands.items():
        print_command(label, f"{command:<{width}}  # {comment}" if shows_comments else command, console)
        label = ""


def print_command(label: str, command: str, console: Console) -> None:
    """Print a command on one line, which a terminal may wrap, so that it can be copied whole."""
    console.print(f"{label:<{_LABEL}}{command}", markup=False, soft_wrap=True)


def print_files(store: RunStore, console: Console) -> None:
    """Print the paths of a run's report and agents, as far as they exist."""
    if (store.path / REPORT).exists():
        print_path(console, "report:", store.path / REPORT)
    if makes_tables(store.config()):
        return
    agents = find_agents(store)
    if agents is not None:
        print_path(console, "agents:", agents)


def print_place(store: RunStore, console: Console) -> None:
    """Print where a run is executed, if not in one process."""
    place = read_place(store)
    if not place.is_default:
        print_entry(console, "place:", place.describe())


def find_agents(store: RunStore) -> Path | None:
    """Find the exported agents of the run, else its last weights; None if it has neither."""
    if (store.path / AGENTS).is_dir():
        return store.path / AGENTS
    iterations = committed_iterations(store, "update")
    return checkpoint_weights(store, iterations[-1]) if iterations else None


def print_answers(metrics: StageMetrics, reports: Sequence[EvalReport], config: RunConfig, console: Console) -> None:
    """Print a table of the agents: length and faults of their answers, entropy and gradient norm."""
    table = Table(box=box.SIMPLE_HEAD, title="held-out answers and updates, before -> after")
    table.add_column("")
    for agent in config.agents:
        table.add_column(agent.name, justify="right")
    for title, cells, _ in answer_rows(metrics, reports, config):
        table.add_row(f"  {title}", *cells)
    console.print(table)


def print_verdict(metrics: StageMetrics, reports: Sequence[EvalReport], config: RunConfig, console: Console) -> None:
    """Print the verdict on a run, problems that its return hides, and remedies for both, the most useful first."""
    verdict = judge_evaluations(reports, config)
    findings = list_findings(metrics, reports, config)
    print_entry(console, "result:", verdict.sentence, STYLES[verdict.word])
    for warning in list_warnings(findings, verdict.sentence):
        print_entry(console, "warning:", warning, "yellow")
    label = "advice:"
    for advice in list_advice(findings, verdict.advice):
        print_entry(console, label, advice)
        label = ""


def _print_results(store: RunStore, config: RunConfig, console: Console) -> None:
    run = EvaluatedRun.read(store)
    tables = tabulate_quantities(run)
    print_tables([tables[key] for key in tables if key.endswith("/sampled")], console)
    print_answers(run.stage_metrics, run.reports, config, console)
    print_verdict(run.stage_metrics, run.reports, config, console)
    if run.budgets[-1].updates:
        print_entry(console, "budget:", format_budget(run.budgets[-1]))


def _describe_time(store: RunStore, timing: Timing) -> str:
    """Describe the wall time of the run and the seconds of this attempt by activity."""
    wall_time = read_wall_time(store.path)
    assert wall_time is not None, "a finished run has been started"
    rest = timing.wall - sum(timing.stages.values())
    shown = [f"{stage} {seconds:.0f} s" for stage, seconds in timing.stages.items() if seconds >= 0.5]
    # With a lag stages run side by side, so the sum of their seconds may exceed the wall time.
    if store.config().train.lag:
        shown.append("some of them at the same time")
    else:
        shown.append(f"loading and everything else {rest:.0f} s")
    attempt = f"; this attempt {format_duration(timing.wall)}" if wall_time.num_attempts > 1 else ""
    return f"{format_wall_time(wall_time)}{attempt}; {', '.join(shown)}"


def _print_team(result: Result, config: RunConfig, console: Console) -> None:
    """Print the version of the registered model that the agents became, and whether it was promoted."""
    if result.promotion is not None:
        print_entry(console, "team:", str(result.promotion))
    elif config.registry.model is not None and config.train.num_iterations:
        print_entry(console, "team:", "not registered; to register it:")
        print_command("", result.store.format_command("resume"), console)


def _print_services(result: Result, console: Console) -> None:
    if result.undelivered:
        print_entry(
            console,
            "waiting:",
            f"{format_count(result.undelivered, 'records')} for MLflow in the outbox; to deliver them:",
        )
        print_command("", result.store.format_command("sync"), console)
    command, page = result.mlflow_page
    if command:
        print_command("MLflow:", command.replace("mlflow ui", f"{find_command('mlflow')} ui", 1), console)
    _print_link(console, "" if command else "MLflow:", page, page)
    if result.runs_page:
        _print_link(console, "runs:", result.runs_page, result.runs_page)
