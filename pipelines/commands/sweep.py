"""``magrpo sweep``: run a sweep, with one Prefect server for all of its runs."""

from __future__ import annotations

from contextlib import ExitStack

from rich.console import Console

from pipelines.commands.train import INTERRUPTED, resume_command
from pipelines.environment import shorten_path
from pipelines.experiments.sweep_grid import Sweep
from pipelines.experiments.sweep_run import run_sweep
from pipelines.flows.launch import run_stages
from pipelines.flows.local_server import LocalServer


def launch_sweep(sweep: Sweep, *, local: bool) -> int:
    """Execute the unfinished runs of ``sweep``; the exit code is 1 if a run failed, 130 after Ctrl-C."""
    console = Console(highlight=False, soft_wrap=True)
    folder = shorten_path(sweep.folder)
    console.print(f"sweep {sweep.name}, {len(sweep.children)} runs, in {folder}", markup=False)
    resume = resume_command("sweep", sweep.name, sweep.root, local=local)
    with ExitStack() as stack:
        if not local:
            stack.enter_context(LocalServer(sweep.root / "prefect")).wait_until_ready()
        try:
            failures = run_sweep(sweep, lambda store: run_stages(store, console, local=local), console)
        except KeyboardInterrupt:
            console.print(f"\ninterrupted; every committed stage is kept. To resume:\n  {resume}", markup=False)
            return INTERRUPTED
    for run_id, reason in failures.items():
        console.print(f"failed: {run_id}: {reason}", markup=False)
    if failures:
        console.print(f"tracebacks: {folder}/RUN.error.txt. To retry these:\n  {resume}", markup=False)
    return 1 if failures else 0
