"""``magrpo config init``: writes a new configuration file from the answers to five questions."""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

from rich.console import Console
from rich.prompt import IntPrompt, Prompt

from magrpo.config.run import RunConfig, load_config
from magrpo.plugins import TABLES, ConfigError, list_choices
from magrpo.process.environment import find_command, shorten_path
from pipelines.arguments import (
    CONFIGS,
    SCHEMA_FILE,
    find_properties,
    list_choices_or_default,
    list_shipped,
    read_schema,
)
from pipelines.commands.config_help import format_value

Weights = Literal["lora", "shared", "full"]
Device = Literal["auto", "cpu", "cuda"]


def write_own_config(
    file: Path = Path("magrpo.toml"),
    /,
    *,
    start: str | None = None,
    model: str | None = None,
    weights: Weights | None = None,
    device: Device | None = None,
    iterations: int | None = None,
) -> int:
    """Write ``file``; the exit code is 0. Raises ConfigError if it exists, or a question remains without a terminal.

    Args:
        file: File to write.
        start: Shipped configuration to start from.
        model: Base model of the agents: a folder, a hub id, or a shipped model.
        weights: What each agent trains: its own adapter, one shared adapter, or all weights.
        device: Device of the run.
        iterations: Number of training iterations.
    """
    if file.exists():
        raise ConfigError(f"{file} exists: choose another name, or remove it")
    if not sys.stdin.isatty() and None in (start, model, weights, device, iterations):
        raise ConfigError(
            "config init asks questions, so it needs a terminal; "
            "or give all answers as flags: --start, --model, --weights, --device, --iterations"
        )
    console = Console(highlight=False)
    if start is None:
        for name in list_shipped():
            console.print(f"  {name:<20} {read_title(name)}", markup=False)
        start = Prompt.ask("Which of these is closest to what you want", choices=list_shipped(), default="embedded")
    if start not in list_shipped():
        raise ConfigError(f"--start {start!r}: {list_choices(start, list_shipped())}")
    tree = tomllib.loads((CONFIGS / f"{start}.toml").read_text(encoding="utf-8"))
    config = load_config(CONFIGS / f"{start}.toml")
    agent = config.agents[0]
    model = model or Prompt.ask("Base model: a folder, a hub id or a shipped model", default=agent.model)
    weights = weights or Prompt.ask("Weights to train", choices=["lora", "shared", "full"], default=agent.weights)  # type: ignore[assignment]
    device = device or Prompt.ask("Device", choices=["auto", "cpu", "cuda"], default=config.model.device)  # type: ignore[assignment]
    if iterations is None:
        iterations = IntPrompt.ask("Training iterations", default=config.train.num_iterations)
    for table in tree["agents"]:
        table |= {"model": model, "weights": weights}
    tree.setdefault("model", {})["device"] = device
    tree.setdefault("train", {})["num_iterations"] = iterations
    RunConfig.model_validate(tree)
    title = f"{read_title(start)}\n# Based on the shipped configuration {start}."
    file.write_text("\n".join(format_commented(tree, title)) + "\n", encoding="utf-8")
    magrpo = find_command("magrpo")
    console.print(f"written to {file}; next:", markup=False)
    for command in (f"{magrpo} train {shorten_path(file)} --dry-run", f"{magrpo} train {shorten_path(file)}"):
        console.print(f"  {command}", markup=False)
    return 0


def read_title(name: str) -> str:
    """Return the first sentence of the comment at the top of a shipped configuration."""
    lines = (CONFIGS / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line[2:] for line in lines[:6] if line.startswith("# "))
    return f"{comment.partition('. ')[0].rstrip('.')}."


def format_commented(tree: Mapping[str, Any], title: str) -> Iterator[str]:
    """Yield ``tree`` as lines of TOML, each value below its meaning and choices; the first item explains a list."""
    schema = read_schema()
    yield f"#:schema {SCHEMA_FILE.as_uri()}"
    yield f"# {title}"
    yield "# Keys that are not listed here keep their defaults: magrpo config show"
    for section, value in tree.items():
        for index, table in enumerate(value if isinstance(value, list) else [value]):
            yield ""
            yield f"[[{section}]]" if isinstance(value, list) else f"[{section}]"
            fields = find_properties(schema, section, table) if index == 0 else {}
            for key, entry in table.items():
                if (field := fields.get(key)) is not None:
                    choices = list(TABLES[section]) if key == "kind" else list_choices_or_default(field)
                    also = f" Choices: {', '.join(choices)}." if len(choices) > 1 else ""
                    yield from (f"# {line}" for line in wrap(field.get("description", "") + also, 110))
                yield f"{key} = {format_value(entry)}"
