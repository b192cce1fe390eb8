"""A sweep as a Prefect flow, for a deployment: each run is a subflow."""

from datetime import UTC
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run
from rich.console import Console

from pipelines.experiments.sweep_grid import load_sweep, plan_sweep, save_sweep
from pipelines.experiments.sweep_run import run_sweep
from pipelines.flows.train import train


class SweepFailed(RuntimeError):
    """Some runs of a sweep failed; the others are finished."""


@flow(name="magrpo-sweep", flow_run_name="{name}", validate_parameters=False)
def swept(config: str, settings: list[str], seeds: int, overrides: list[str], root: str, name: str) -> None:
    """Train every combination of ``settings`` (``section.key=value,value``) with ``seeds`` seeds each.

    A retry resumes the unfinished runs. Raises SweepFailed if runs failed; the message names all of them.
    """
    sweep_id = f"{name}-{flow_run.scheduled_start_time.astimezone(UTC):%Y%m%d-%H%M%S}"
    if (Path(root) / "sweeps" / sweep_id).exists():
        sweep = load_sweep(Path(root), sweep_id)
    else:
        sweep = plan_sweep(Path(config), overrides, settings, seeds, sweep_id, Path(root))
        save_sweep(sweep)
    console = Console(highlight=False, soft_wrap=True)
    failures = run_sweep(sweep, lambda store: train(str(store.path.parent), store.run_id), console)
    if failures:
        raise SweepFailed("; ".join(f"{run_id}: {reason}" for run_id, reason in failures.items()))
