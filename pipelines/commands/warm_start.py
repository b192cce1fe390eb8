"""An embedded base model from random weights, as a Prefect flow: demonstrate, train, save.

Imports prefect only where the recipe is run with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from magrpo.embedded.conventions import Divisions
from magrpo.embedded.demonstrations import Example, Recipe, make_revisions
from magrpo.embedded.voices import Voices
from magrpo.embedded.warm_start import WarmStartConfig, train_base_model
from magrpo.envs import diagnosis, writing
from magrpo.envs.coding import CodingEnv
from magrpo.interfaces import Problems, SandboxPlugin
from magrpo.interfaces import Progress as Advance
from magrpo.plugins import TABLES, ConfigError, build_plugin, list_choices
from magrpo.rewards.coding import CodingReward
from magrpo.rewards.writing import WritingReward
from magrpo.sandboxes.none import NoSandbox
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.store import read_records, write_records
from magrpo.types import Problem
from pipelines.flows.local_server import LocalServer

Step = Callable[[], None]
AsStep = Callable[[str, Step], Step]
"""Wraps a step, for example as a Prefect task."""

RECIPES: Mapping[str, tuple[Recipe, SandboxPlugin]] = {
    "coopcode": (
        Recipe(CodingEnv(prompt="bare", num_turns=2), CodingReward(), Divisions(), diagnosis.BARE_LINES),
        PoolSandbox(test_s=0.5, total_s=1.0),
    ),
    "notes": (
        Recipe(writing.WritingEnv(prompt="bare", num_turns=2), WritingReward(), Voices(), writing.BARE_LINES, 0.9),
        NoSandbox(),
    ),
}
"""By ``problems``: what is demonstrated, and where programs run."""
_RECENT = 100


def warm_start(output: Path, overrides: Sequence[str] = (), *, local: bool = False) -> int:
    """Train a base model into the folder ``output``; ``overrides`` are ``key=value`` of the recipe.

    Raises:
        ConfigError: the folder is there already, or a key or value is unusable.
    """
    config = parse(overrides)
    if output.exists():
        raise ConfigError(f"{output}: is there already; remove it, or give another --output")
    console = Console(highlight=False, soft_wrap=True)
    work = output.with_name(f".{output.name}.partial")
    work.mkdir(parents=True, exist_ok=True)
    steps = {"demonstrate": partial(_demonstrate, work, config), "train": partial(_train, work, config, console)}
    if local:
        _run(steps, lambda _, step: step)
    else:
        _with_prefect(steps, console)
    (work / "model").rename(output)
    shutil.rmtree(work)
    console.print(
        f"base model: {output}\nnext:       magrpo train CONFIG agents.0.model={output} agents.1.model={output}"
    )
    return 0


def parse(overrides: Sequence[str]) -> WarmStartConfig:
    """The recipe with ``key=value`` overrides.

    Raises:
        ConfigError: a key is unknown or a value is unusable.
    """
    values = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r}: an override is written key=value")
        if key not in WarmStartConfig.model_fields:
            raise ConfigError(f"{key}: unknown key; {list_choices(key, WarmStartConfig.model_fields)}")
        values[key] = value
    try:
        return WarmStartConfig.model_validate(values)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}, got {item['input']!r}" for item in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _run(steps: Mapping[str, Step], as_step: AsStep) -> None:
    for name, step in steps.items():
        as_step(name, step)()


def _with_prefect(steps: Mapping[str, Step], console: Console) -> None:
    with LocalServer(Path("runs") / "prefect") as server:
        console.print("starting Prefect (the first time in a folder takes up to half a minute; --local goes without)")
        from prefect import flow, task
        from prefect.cache_policies import NO_CACHE

        def as_task(name: str, step: Step) -> Step:
            return task(name=name, cache_policy=NO_CACHE)(_named(name, step))

        server.wait()
        flow(name="magrpo-warm-start")(_named("recipe", partial(_run, steps, as_task)))()


def _named(name: str, function: Step) -> Step:
    """Prefect asks a function for its name, which a partial one has not."""

    def step() -> None:
        function()

    step.__name__ = name
    return step


def _problems(config: WarmStartConfig) -> list[Problem]:
    chosen: Problems = build_plugin(TABLES["problems"], {"kind": config.problems, "num_train": config.num_problems})
    return list(chosen.load()["train"])


def _demonstrate(folder: Path, config: WarmStartConfig) -> None:
    """Second turns: what first completions really score decides their feedback, so the sandbox runs them."""
    problems = _problems(config)
    chosen = (
        problems[:: max(1, len(problems) // config.num_revisions)][: config.num_revisions]
        if config.num_revisions
        else []
    )
    recipe, plugin = RECIPES[config.problems]
    sandbox = plugin.open()
    try:
        examples = make_revisions(chosen, recipe, sandbox, config.seed)
    finally:
        sandbox.close()
    write_records(folder / "second_turns.jsonl.gz", examples)


def _train(folder: Path, config: WarmStartConfig, console: Console) -> None:
    second_turns = read_records(folder / "second_turns.jsonl.gz", Example)
    with _progress(config.num_steps, console) as advance:
        result = train_base_model(_problems(config), second_turns, RECIPES[config.problems][0], config, advance)
    loss = fmean(result.losses[-_RECENT:])
    result.save(folder / "model")
    recipe = {**config.model_dump(), "loss": round(loss, 4), "parameters": result.model.num_parameters()}
    (folder / "model" / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    console.print(f"{config.num_steps} steps; {loss:.3f} nats per completion token at the end")


@contextmanager
def _progress(num_steps: int, console: Console) -> Iterator[Advance]:
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("· left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as live:
        bar = live.add_task("", total=num_steps)
        done = 0

        def advance(steps: int) -> None:
            nonlocal done
            done += steps
            live.update(bar, completed=done)
            if not console.is_terminal and done % 250 == 0:
                console.print(f"  {done}/{num_steps} steps")

        yield advance
