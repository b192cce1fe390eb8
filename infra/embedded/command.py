"""Train a base model like the shipped ones: the command line of ``python -m infra.embedded``."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from infra.embedded.warm_start import WarmStartConfig, demonstrate_second_turns, train_on_demonstrations
from magrpo.config.validate import validate_config
from magrpo.errors import ConfigError

_STEPS_PER_LINE = 250
"""Number of steps between two lines of progress without a terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after a mistake of the user."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.embedded", description="Train a base model like the shipped ones."
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to create for the model and its recipe.json")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="change one value of the recipe")
    given = parser.parse_args(arguments)
    try:
        make_base_model(given.output, given.overrides)
    except ConfigError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def make_base_model(output: Path, overrides: Sequence[str] = ()) -> None:
    """Train a base model into the new folder ``output``. Raises ConfigError if it exists, or a value is unusable.

    The folder holds a transformers model, its tokenizer, and recipe.json.
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
    with console.status("writing demonstrations"):
        demonstrate_second_turns(work, config)
    loss = _train_with_progress(work, config, console)
    console.print(f"{config.num_steps} steps; {loss:.3f} nats per completion token at the end")
    (work / "model").rename(output)
    shutil.rmtree(work)
    console.print(
        f"base model: {output}\nnext:       magrpo train CONFIG agents.0.model={output} agents.1.model={output}"
    )


def _train_with_progress(work: Path, config: WarmStartConfig, console: Console) -> float:
    """Train the model and return its final loss, with a bar on a terminal and lines elsewhere."""
    columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("· left"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=config.num_steps)

        def advance(steps: int) -> None:
            progress.advance(bar, steps)
            done = int(progress.tasks[bar].completed)
            if not console.is_terminal and done % _STEPS_PER_LINE == 0:
                console.print(f"  {done}/{config.num_steps} steps")

        return train_on_demonstrations(work, config, advance)
