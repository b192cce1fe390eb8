"""A sweep as a Prefect flow, for a deployment: each run is a subflow."""

from datetime import UTC
from pathlib import Path
from typing import Annotated

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field
from rich.console import Console

from magrpo.experiments.sweep_grid import check_sweep_place, keep_sweep_place, load_sweep, plan_sweep, save_sweep
from magrpo.experiments.sweep_run import run_sweep
from pipelines.arguments import locate_config, parse_place
from pipelines.flows.train import train


class SweepFailed(RuntimeError):
    """Some runs of a sweep failed; the others are finished."""


@flow(name="magrpo-sweep", flow_run_name="{name}", validate_parameters=False)
def swept(
    config: str,
    settings: list[str],
    seeds: Annotated[int, Field(ge=1)],
    overrides: list[str],
    root: str,
    name: str,
    place: str = "",
) -> None:
    """Train every combination of ``settings`` with ``seeds`` seeds each.

    A retry resumes the unfinished runs. Raises SweepFailed if runs failed; the message names all of them.

    Args:
        config: TOML file on the machine that trains, or the name of a configuration that ships.
        settings: Values to try, each key written section.key=value,value, such as optim.lr=1e-3,2e-3.
        seeds: Number of runs of each combination, seeded train.seed, train.seed + 1 and so on.
        overrides: Changes of the configuration for all runs, each written section.key=value.
        root: Folder of run directories on the machine that trains.
        name: Prefix of the names of the sweep and its runs; the date and time of its start follow.
        place: TOML file on the machine that trains that says where to run; empty: in one process there.
    """
    sweep_id = f"{name}-{flow_run.scheduled_start_time.astimezone(UTC):%Y%m%d-%H%M%S}"
    given = parse_place(place) if place else None
    if (Path(root) / "sweeps" / sweep_id).exists():
        sweep = load_sweep(Path(root), sweep_id)
    else:
        sweep = plan_sweep(locate_config(config), overrides, settings, seeds, sweep_id, Path(root))
        check_sweep_place(sweep, given)
        save_sweep(sweep)
    keep_sweep_place(sweep, given)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    failures = run_sweep(sweep, lambda store: train(str(store.path.parent), store.run_id), console)
    if failures:
        raise SweepFailed("; ".join(f"{run_id}: {reason}" for run_id, reason in failures.items()))
