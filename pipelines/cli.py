"""The command line ``magrpo``. Each command imports its libraries when it runs."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TextIO, TypedDict

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from magrpo.config.validate import find_keys
from magrpo.errors import ConfigError, cut_lines, list_choices
from magrpo.process.environment import prepare_environment, set_verbosity
from magrpo.process.faults import describe_fault
from magrpo.process.signals import find_exit_code, keep_printing, raise_on_signals
from pipelines.arguments import (
    ConfigFile,
    GivenPlace,
    Json,
    Overrides,
    PlaceFile,
    Positive,
    Quiet,
    Root,
    RunId,
    RunName,
    RunOrConfig,
    StudyFile,
    Verbose,
    locate_config,
    locate_source,
)

log = logging.getLogger(__name__)
app = App(
    name="magrpo",
    help="Train LLM agents that cooperate, with Multi-Agent Group Relative Policy Optimization.",
    help_epilogue="""Examples:
  magrpo train embedded
  magrpo train embedded train.seed=1 rollout.group_size=16 --name seed-1
  magrpo resume seed-1
  magrpo ask seed-1
  magrpo evaluate seed-1 eval.num_samples=16
  magrpo study tiny
  magrpo runs
  magrpo compare seed-0 seed-1
  magrpo score --problems p.jsonl.gz --completions c.jsonl --output r.jsonl
  magrpo config show rollout
  magrpo doctor

For details: `magrpo COMMAND --help`.""",
    help_format="plaintext",
    group_commands=Group("Options", sort_key=9),
    default_parameter=Parameter(show_default=lambda value: value or None),
    error_formatter=lambda error: f"magrpo: {error}",
    suppress_keyboard_interrupt=False,
    version=lambda: __import__("magrpo").__version__,
)

TRAIN, LOOK = Group("Train", sort_key=1), Group("Look at runs", sort_key=2)
USE, OPERATE = Group("Use the agents", sort_key=3), Group("Operate", sort_key=4)
COMMANDS = {
    TRAIN: ("train", "resume", "study", "evaluate", "schedule"),
    LOOK: ("runs", "show", "compare"),
    USE: ("ask", "export", "score"),
    OPERATE: ("config", "doctor", "sync", "bench"),
}
"""The commands as ``magrpo --help`` lists them: the daily ones of each group first."""


class HelpPlace(TypedDict):
    """The position of a command in ``magrpo --help``."""

    group: Group
    sort_key: int


def place_in_help(name: str) -> HelpPlace:
    """Return the group of a command and its position there, for ``app.command``."""
    [group] = [group for group, names in COMMANDS.items() if name in names]
    return {"group": group, "sort_key": COMMANDS[group].index(name)}


def _make_group(name: str, text: str) -> App:
    """Make a command that has commands of its own."""
    made = App(name=name, help=text, help_epilogue="", group_commands="Commands", **place_in_help(name))
    app.command(made)
    return made


bench = _make_group("bench", "Measure parts of this project on this machine.")
config = _make_group("config", "Explain and show configurations.")
app.register_install_completion_command(help="Install shell completion of commands, runs and configurations.")

LAZY_COMMANDS = {
    "runs": ("commands.runs:list_runs", "List the runs in a folder, newest first."),
    "show": (
        "commands.show:show_run",
        "Show a run on one screen: state, verdict, evaluations, cost, files, next commands; or open its report.\n\n"
        "Example: magrpo show seed-0 --open",
    ),
    "compare": (
        "commands.compare:compare_runs",
        "Compare two or more runs: configuration, learning curves, evaluations, cost.\n\nBaseline runs are merged into "
        "one table, with intervals over problems and seeds.",
    ),
    "score": (
        "commands.score:score_files",
        "Score completions from a file: run their problems' tests in the sandbox.\n\nExample: magrpo score "
        "--problems HumanEval.jsonl.gz --completions mine.jsonl --output report.jsonl",
    ),
    "export": (
        "commands.export:export_agents",
        "Export the agents of a run to a folder that others can use.\n\nExample: magrpo export seed-0 --merge",
    ),
    "doctor": (
        "commands.doctor:check_machine",
        "Check that this machine has everything that training needs, and print how to fix what is missing.",
    ),
    "sync": (
        "commands.runs:sync_run",
        "Deliver the tracking records in a run's outbox to MLflow.",
    ),
    "config show": (
        "commands.config_help:show_config",
        "Explain a section or a key, or print every value of a configuration.\n\nExample: magrpo config show rollout",
    ),
    "config schema": (
        "commands.config_help:print_schema",
        "Print the JSON schema of configuration files, for editors.",
    ),
    "bench iteration": (
        "benchmarks.iteration:bench_iteration",
        "Time sampling and update of one iteration on a CPU, compared with a plain implementation.",
    ),
    "bench sandbox": (
        "benchmarks.sandbox:bench_sandbox",
        "Time the sandbox, compared with one bubblewrap process per candidate.",
    ),
}
"""The function and the help of each command that is imported when it runs; its docstring explains its arguments."""
for command, (function, text) in LAZY_COMMANDS.items():
    parent = {"bench": bench, "config": config}.get(command.partition(" ")[0], app)
    name, path = command.split()[-1], f"pipelines.{function}"
    if parent is app:
        app.command(path, name=name, help=text, help_epilogue="", **place_in_help(command))
    else:
        parent.command(path, name=name, help=text, help_epilogue="")


LEAVE_OUT = "leave it out"
NO_OVERRIDES = {
    "resume": "a run keeps its values; magrpo train starts another",
    "study": "write values into the study's file",
    "ask": "write --set before each value",
}
"""Where values of the configuration are changed instead, for commands without ``section.key=value``."""
LONG_COMMANDS = ("train", "resume", "study", "evaluate", "schedule")
"""Commands that keep running when their output is no longer read."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code.

    0 done, 1 failed, 2 a mistake of the user, 130 interrupted; 143 and 129 after SIGTERM and SIGHUP.
    """
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    with keep_printing() if set(tokens[:1]) & set(LONG_COMMANDS) else nullcontext():
        try:
            with raise_on_signals():
                message, code = _run_command(tokens, from_shell=arguments is None)
        except KeyboardInterrupt as error:
            return find_exit_code(error)
        except BrokenPipeError:  # the reader of the pipe has closed it: magrpo runs | head
            # Python flushes stdout when it exits, which would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if message:
            print("\n".join(f"magrpo: {line}" for line in cut_lines(message).splitlines()), file=sys.stderr)
        return code


class CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to the ``sys.stderr`` of the moment, which a live line replaces to show messages above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def _run_command(tokens: list[str], *, from_shell: bool) -> tuple[str, int]:
    """Run a command line; return the message about the error that ended it, and the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[CurrentStderr()])
    prepare_environment()
    sys.path.append(str(Path.cwd()))  # so that `kind = "my_pkg.rewards:Mine"` is found there
    try:
        with _show_startup(tokens, from_shell=from_shell):
            code = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _explain_mistake(error, tokens), 2
    except ConfigError as error:
        return str(error), 2
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError) or not (message := describe_fault(error)):
            raise
        log.info("", exc_info=True)  # with --verbose
        return message, 1
    return "", code if isinstance(code, int) else 0


@contextmanager
def _show_startup(tokens: Sequence[str], *, from_shell: bool) -> Iterator[None]:
    """Show the activity of a command that runs stages from the start; ``from_shell``: it has the process to itself."""
    runs_stages = tokens[:1] in (["train"], ["resume"], ["study"], ["evaluate"])
    if not runs_stages or {"-h", "--help", "--dry-run"} & set(tokens):
        yield
        return
    import psutil  # psutil and rich: a tenth of a second, which other commands need not spend

    from magrpo.progress.activity import begin_startup, end_startup  # rich

    quiet = bool({"-q", "--quiet"} & set(tokens))
    begin_startup(psutil.Process().create_time() if from_shell else None, quiet=quiet)
    try:
        yield
    finally:
        end_startup()


def _explain_mistake(error: CycloptsError, tokens: Sequence[str]) -> str:
    """Explain why a command line cannot be parsed; a key written as a flag is shown as an override."""
    if isinstance(error.__cause__, ConfigError):
        return str(error.__cause__)
    chain = error.command_chain or ()
    command, see = " ".join(chain), f"(see {' '.join(['magrpo', *chain, '--help'])})"
    words = error.unused_tokens or [""]
    if isinstance(error, UnknownCommandError):  # its text would import the module of every command
        choices = list_choices(words[0], _list_commands(command))
        return f"Unknown command: {' '.join([*chain, words[0]])}; {choices} {see}"
    if isinstance(error, UnusedCliTokensError):
        remedy = NO_OVERRIDES.get(command, LEAVE_OUT) if "=" in words[0] else LEAVE_OUT
        return f"{command} takes no {' '.join(words)}: {remedy} {see}"
    if isinstance(error, UnknownOptionError) and tokens[0] in ("train", "evaluate", "schedule"):
        from magrpo.config.run import RunConfig  # a twentieth of a second, which --help need not spend

        flag, _, value = (error.token.keyword or error.token.value).partition("=")
        name = flag.lstrip("-").replace("-", "_")
        keys = [key for key in find_keys(name.rpartition(".")[2], RunConfig, {}) if key.endswith(name)]
        if keys:
            after = [text for word, text in pairwise(tokens) if word == flag]
            shown = value or next((text for text in after if not text.startswith("-")), "VALUE")
            written = " or ".join(f"{key}={shown}" for key in keys)
            return f"Unknown option: {flag}. Keys of the configuration are written {written}"
    if isinstance(error, CoercionError) and error.target_type is timedelta:
        return f"{error} It is a number with a unit: write it like 90s, 30m, 6h or 1d {see}"
    return f"{error} {see}"


def _list_commands(group: str) -> list[str]:
    """List the commands of ``magrpo`` or of one of them that has its own: ``show`` and ``schema`` of ``config``."""
    if not group:
        return [name for names in COMMANDS.values() for name in names]
    return [name.removeprefix(f"{group} ") for name in LAZY_COMMANDS if name.startswith(f"{group} ")]


@app.command(
    usage="Usage: magrpo train CONFIG [KEY=VALUE...] [OPTIONS]",
    help_epilogue="""Examples:
  magrpo train embedded
  magrpo train embedded train.num_iterations=20 optim.lr=1e-3 --name short
Keys of a configuration: magrpo config show""",
    **place_in_help("train"),
)
def train(
    config: ConfigFile,
    /,
    *overrides: Overrides,
    name: RunName | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    root: Root | None = None,
    place: GivenPlace | None = None,
    local: bool = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Train the agents of a configuration.

    Args:
        config: TOML file, or the name of one that ships: embedded.
        name: Name of the run; a date and a random suffix by default.
        dry_run: Check the inputs; print the plan and prompts only.
        local: Run the same loop without Prefect.
    """
    set_verbosity(quiet=quiet, verbose=verbose)
    from magrpo.config.run import load_config
    from magrpo.config.validate import write_override
    from pipelines.commands.inputs import check_inputs

    changes = list(overrides)
    if root is not None:
        changes.append(write_override("root", root))
    resolved = load_config(config, changes)
    if dry_run:
        check_inputs(resolved, for_plan=True)
        from pipelines.commands.dry_run import show_plan  # torch, transformers

        return show_plan(resolved, given_place=place)
    from pipelines.commands.train import start_run

    return start_run(resolved, name, place, local=local)


@app.command(
    usage="Usage: magrpo resume RUN [OPTIONS]",
    help_epilogue="""Examples:
  magrpo resume seed-1
  magrpo resume seed-1 --from-stage credit:7""",
    **place_in_help("resume"),
)
def resume(
    run: RunId,
    /,
    *,
    from_stage: str | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    root: Root = Path("runs"),
    place: GivenPlace | None = None,
    local: bool = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Resume a run where it stopped, with its own configuration.

    Args:
        run: Id of a run.
        from_stage: Repeat this stage and all later ones: STAGE[:ITERATION], as rollout.0:7.
        dry_run: Print the plan: which stages are committed, and which would run.
        local: Run the same loop without Prefect.
    """
    set_verbosity(quiet=quiet, verbose=verbose)
    from magrpo.run.store import RunStore

    store = RunStore.open(root, run)
    if dry_run:
        from pipelines.commands.dry_run import show_plan  # torch, transformers

        return show_plan(store.config(), store, from_stage, place)
    from pipelines.commands.train import resume_run

    return resume_run(store, from_stage, place, local=local)


@app.command(usage="Usage: magrpo study FILE [OPTIONS]", help_epilogue="", **place_in_help("study"))
def study(
    file: StudyFile,
    /,
    *,
    name: RunName | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    root: Root | None = None,
    place: GivenPlace | None = None,
    workers: Positive = 1,
    local: bool = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Compare ways to train: arms, seeds, a budget and an outcome, fixed in a file before the first run.

    Started again, a study goes on where it stopped. Example: magrpo study tiny

    Args:
        file: TOML file of the study, or the name of a shipped study.
        name: Name of the study and prefix of its runs' names; by default the file's name.
        dry_run: Check the study, its problems and models, and list its runs; train nothing.
        workers: How many runs to execute side by side, each in a process of its own.
        local: Run without Prefect.
    """
    set_verbosity(quiet=quiet, verbose=verbose)
    from magrpo.experiments.study import load_study
    from pipelines.commands.study import list_study_runs, start_study

    chosen = load_study(file, name, root, locate_config)
    return list_study_runs(chosen, place) if dry_run else start_study(chosen, place, workers, local=local)


@app.command(usage="Usage: magrpo evaluate RUN [KEY=VALUE...] [OPTIONS]", help_epilogue="", **place_in_help("evaluate"))
def evaluate(
    run: RunOrConfig,
    /,
    *overrides: Overrides,
    checkpoint: int | None = None,
    baselines: str | None = None,
    single_run: RunId | None = None,
    partner: Annotated[tuple[RunId, ...], Parameter(negative=())] = (),
    name: RunName | None = None,
    root: Root | None = None,
    place: GivenPlace | None = None,
    local: bool = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Evaluate a run's agents on held-out problems, as a run of its own.

    Example: magrpo evaluate seed-0 --baselines all --single-run grpo-0 --partner seed-1

    Args:
        run: Id of a run; or a TOML file or shipped configuration, whose agents are evaluated before training.
        checkpoint: Iteration whose weights to evaluate; the last one by default.
        baselines: Compare the agents with baselines, in the columns of the paper: all, or names separated by commas
            (docs/baselines.md lists them).
        single_run: With --baselines: id of a run that trained a single agent.
        partner: With --baselines: id of a run whose agents play with this run's agents; repeatable.
        name: Name of the evaluation's run; by default RUN-eval-ITERATION, or RUN-baselines.
        local: Run the same stages without Prefect.
    """
    set_verbosity(quiet=quiet, verbose=verbose)
    from magrpo.experiments.derive import RUNS, Source, create_baselines, create_evaluation
    from pipelines.commands.train import launch_run

    source = Source(locate_source(run, root or RUNS), checkpoint, root, overrides, place)
    if baselines is not None:
        made = create_baselines(source, baselines, name, single_run, partner)
        return launch_run(made, place, local=local, is_new=True)
    if single_run or partner:
        raise ConfigError("--single-run and --partner need --baselines")
    return launch_run(create_evaluation(source, name), place, local=local, is_new=True)


@app.command(usage="Usage: magrpo ask RUN [PROBLEM] [OPTIONS]", help_epilogue="", **place_in_help("ask"))
def ask(
    run: RunId,
    problem: str | None = None,
    /,
    *,
    problem_id: Annotated[str | None, Parameter(name="--problem")] = None,
    test: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    checkpoint: int | None = None,
    seed: int | None = None,
    trained_only: Annotated[bool, Parameter(negative=())] = False,
    show_prompts: Annotated[bool, Parameter(negative=())] = False,
    settings: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = (),
    as_json: Json = False,
    root: Root = Path("runs"),
) -> int:
    """Give trained agents a problem, and compare their answer with that of their base models.

    Example: magrpo ask seed-0 "Keep the even numbers, then multiply every number by 2."

    Args:
        run: Id or folder of a run, a folder of agents (RUN/agents), or a champion: MODEL@champion.
        problem: A sentence, or a function's signature and docstring; for agents that write texts, the text to work on.
            By default the first held-out problem of the run.
        problem_id: A problem of the run: its id or a part of it.
        test: An assert about the function, used to compute the reward; repeatable.
        checkpoint: Iteration whose agents to ask; the last one by default.
        seed: Sample the answer at the run's temperature with this seed; by default decode greedily.
        trained_only: Do not show the answer of the base models.
        show_prompts: Show each agent's prompt as its model sees it.
        settings: section.key=value: change one value of the run's configuration; repeatable. rollout.temperature, top_p
            and top_k matter only with --seed.
    """
    from pipelines.commands.ask import Question, ask_agents

    question = Question(problem, problem_id, test, seed, not trained_only, as_json, show_prompts)
    return ask_agents(run, root, checkpoint, settings, question)


@app.command(
    usage="Usage: magrpo schedule CONFIG [KEY=VALUE...] [OPTIONS]", help_epilogue="", **place_in_help("schedule")
)
def schedule(
    config: ConfigFile,
    /,
    *overrides: Overrides,
    cron: str | None = None,
    interval: timedelta | None = None,
    timezone: str = "UTC",
    limit: Positive = 1,
    name: RunName | None = None,
    place: PlaceFile | None = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Train on a schedule until interrupted.

    Example: magrpo schedule embedded --cron "0 2 * * *" --timezone Europe/Berlin

    Args:
        config: TOML file, or the name of a shipped configuration; read again for every run.
        cron: Cron expression: minute, hour, day, month, day of the week.
        interval: Time between starts: 90s, 30m, 6h, 1d.
        timezone: Time zone of the cron expression; the names of runs are in UTC.
        limit: Maximum number of runs at the same time.
        name: Name of the schedule and prefix of its runs' names; by default the file's name.
        place: Cluster file (TOML) that says where to run, read again for every run; by default one process.
    """
    set_verbosity(quiet=quiet, verbose=verbose)
    from pipelines.flows.timetable import Timetable

    timetable = Timetable(cron, interval, timezone)
    from magrpo.run.store import name_after  # the configuration: --help need not load it
    from pipelines.commands.train import serve_schedule  # torch: a mistake is reported at once

    return serve_schedule(config, overrides, timetable, name or name_after(config), limit, place)
