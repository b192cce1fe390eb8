"""The runs of a sweep: every combination of some values, each with several seeds.

The folder ``<root>/sweeps/<name>`` lists the runs. Each run's own directory shows whether it is finished, so resuming a
sweep means going through its runs again. This module does not import Prefect.
"""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from magrpo.config.place import Place
from magrpo.config.run import load_config, load_resolved
from magrpo.files.writing import atomic_write
from magrpo.planning.fit import check_place
from magrpo.plugins import ConfigError, list_choices
from magrpo.run.files import is_finished, keep_place
from magrpo.run.store import RunStore, check_run_name, read_json

SWEEP_FILE = "sweep.json"
_SLUG = 60
"""Longest run name, in characters, that spells out its values; runs with longer ones are numbered."""


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep. ``setting``: the values that set it apart, by key, as they were written."""

    run_id: str
    setting: dict[str, str]
    seed: int
    config: str
    """Resolved configuration of the run, as JSON."""

    @property
    def title(self) -> str:
        """``algo.estimator=marloo``: the setting, shared by runs that differ only in their seed."""
        return " ".join(f"{key}={value}" for key, value in self.setting.items()) or "as configured"


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs that belong together, in the order in which they are executed."""

    name: str
    root: Path
    children: tuple[SweepRun, ...]

    @property
    def folder(self) -> Path:
        return self.root / "sweeps" / self.name

    @property
    def folder_store(self) -> RunStore:
        """Return the sweep's folder as a store, which keeps the place for runs that have not begun."""
        return RunStore(self.root / "sweeps", self.name)

    def store(self, child: SweepRun) -> RunStore:
        return RunStore(self.root, child.run_id)


def plan_sweep(
    config: Path, overrides: Sequence[str], settings: Sequence[str], seeds: int, name: str | None, root: Path | None
) -> Sweep:
    """List the runs of a sweep without writing anything. Raises ConfigError if a value is unusable or the name taken.

    Every combination of ``settings``, each ``section.key=value,value,...``, runs with ``seeds`` seeds, from
    ``train.seed`` on.
    """
    grid = dict(map(_parse_setting, settings))
    if len(grid) < len(settings):
        raise ConfigError("--set: a key is given twice; list all its values once: section.key=value,value")
    fixed = [*overrides]
    if root:
        fixed.append(f"root={root}")
    name = name or f"sweep-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    # A run's name spells out its values; combinations are numbered where the values cannot be part of a name.
    words = [
        "".join("-" + re.sub(r"[^A-Za-z0-9_.]+", "-", v).strip("-") for v in setting.values())
        for setting in combinations
    ]
    if len(set(words)) < len(words) or max(map(len, words)) > _SLUG:
        words = [f"-{number:02}" for number in range(len(words))]
    children = []
    for setting, word in zip(combinations, words, strict=True):
        changes = [*fixed, *(f"{key}={value}" for key, value in setting.items())]
        first_seed = load_config(config, changes).train.seed
        for seed in range(first_seed, first_seed + seeds):
            resolved = load_config(config, [*changes, f"train.seed={seed}"])
            children.append(SweepRun(f"{name}{word}-s{seed}", setting, seed, resolved.resolved(secrets=True)))
    sweep = Sweep(name, resolved.root, tuple(children))
    taken = [sweep.folder, *(sweep.store(child).path for child in children)]
    clash = next((path for path in taken if path.exists()), None)
    if clash is not None:
        raise ConfigError(f"{clash} exists: choose another --name, or --resume {name}")
    return sweep


def _parse_setting(setting: str) -> tuple[str, list[str]]:
    """Split a setting into its key and values; commas inside brackets or quotes do not separate values."""
    key, equals, text = setting.partition("=")
    values = re.findall(r"""(?:[^,\["']|\[[^\]]*\]|"[^"]*"|'[^']*')+""", text)
    if not key or not equals or not values:
        raise ConfigError(f"--set {setting!r}: must be written section.key=value,value")
    if key in ("train.seed", "root"):
        flag = "--seeds" if key == "train.seed" else "--root"
        raise ConfigError(f"--set {key}: use {flag}")
    return key, list(dict.fromkeys(value.strip() for value in values))


def save_sweep(sweep: Sweep) -> None:
    """Create the folder of the sweep, from which :func:`load_sweep` reads it."""
    try:
        sweep.folder.mkdir(parents=True)
    except FileExistsError:  # another command created it first
        raise ConfigError(f"{sweep.folder} exists: choose another --name, or --resume {sweep.name}") from None
    tree = {"children": [asdict(child) for child in sweep.children]}
    atomic_write(sweep.folder / SWEEP_FILE, json.dumps(tree, indent=1).encode())


def load_sweep(root: Path, name: str) -> Sweep:
    """Load an existing sweep. Raises ConfigError if there is none with this name."""
    path = root / "sweeps" / check_run_name(name) / SWEEP_FILE
    if not path.is_file():
        known = [found.parent.name for found in root.glob(f"sweeps/*/{SWEEP_FILE}")]
        choices = list_choices(name, known) if known else "there are none"
        raise ConfigError(f"no sweep {name!r} in {root}; {choices}")
    return Sweep(name, root, tuple(SweepRun(**child) for child in read_json(path)["children"]))


def check_sweep_place(sweep: Sweep, place: Place | None) -> None:
    """Raise ConfigError if an unfinished run of the sweep cannot run at ``place``."""
    if place is not None:
        for child in _list_unfinished(sweep):
            check_place(load_resolved(child.config), place)


def keep_sweep_place(sweep: Sweep, place: Place | None) -> None:
    """Make ``place`` the place of the sweep's unfinished runs; None leaves it as it is."""
    if place is None:
        return
    for store in [sweep.folder_store, *map(sweep.store, _list_unfinished(sweep))]:
        if store.path.exists():
            keep_place(store, place)


def _list_unfinished(sweep: Sweep) -> list[SweepRun]:
    return [child for child in sweep.children if not is_finished(sweep.store(child))]


def show_sweep(sweep: Sweep) -> None:
    """Print the runs of the sweep and mark the finished ones."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    width = max(len(child.run_id) for child in sweep.children)
    for child in sweep.children:
        state = "finished" if is_finished(sweep.store(child)) else ""
        console.print(f"  {child.run_id:{width}}  {child.title}  train.seed={child.seed}  {state}".rstrip())
