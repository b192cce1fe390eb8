"""``magrpo warm-start``: train an embedded base model from random weights, as a Prefect flow or without Prefect."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from magrpo.embedded.warm_start import WarmStartConfig, demonstrate_second_turns, train_on_demonstrations
from magrpo.plugins import ConfigError, validate_config
from magrpo.progress.activity import LOADING, show_activity
from pipelines.flows.local_server import LocalServer


def make_base_model(
    *overrides: Annotated[str, Parameter(help="key=value changes one value of the recipe.")],
    output: Path,
    local: bool = False,
) -> int:
    """Train a base model into a new folder and return 0. Raises ConfigError if it exists, or a value is unusable.

    Args:
        output: Folder to create: a transformers model, its tokenizer, and recipe.json.
        local: Run the same steps without Prefect.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"{override!r}: an override is written key=value")
    config = validate_config(WarmStartConfig, {}, overrides, "recipe")
    if output.exists():
        raise ConfigError(f"{output}: already exists; remove it, or choose another --output")
    console = Console(highlight=False, soft_wrap=True)
    work = output.with_name(f".{output.name}.partial")
    work.mkdir(parents=True, exist_ok=True)

    def demonstrate() -> None:
        with show_activity("writing demonstrations", console):
            demonstrate_second_turns(work, config)

    def train() -> None:
        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("· left"), TimeRemainingColumn()
        alive = console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=not alive) as progress:
            bar = progress.add_task("", total=config.num_steps)

            def advance(steps: int) -> None:
                progress.advance(bar, steps)
                done = int(progress.tasks[bar].completed)
                if not alive and done % 250 == 0:
                    console.print(f"  {done}/{config.num_steps} steps")

            loss = train_on_demonstrations(work, config, advance)
        console.print(f"{config.num_steps} steps; {loss:.3f} nats per completion token at the end")

    if local:
        demonstrate()
        train()
    else:
        _run_in_flow([demonstrate, train], console)
    (work / "model").rename(output)
    shutil.rmtree(work)
    console.print(
        f"base model: {output}\nnext:       magrpo train CONFIG agents.0.model={output} agents.1.model={output}"
    )
    return 0


def _run_in_flow(steps: Sequence[Callable[[], None]], console: Console) -> None:
    with LocalServer(Path("runs") / "prefect") as server:
        with show_activity(LOADING["Prefect"], console):
            from prefect import flow, task  # prefect, loaded while the server starts
            from prefect.cache_policies import NO_CACHE

            server.wait_until_ready()

        @flow(name="magrpo-warm-start")
        def recipe() -> None:
            for step in steps:
                task(name=step.__name__, cache_policy=NO_CACHE)(step)()

        recipe()
