"""The commands of ``magrpo bench``. What they need is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators

from pipelines.commands.arguments import Overrides, Positive

bench = App(name="bench", help="Measure parts of this project on this machine.", help_epilogue="")


@bench.command(help_epilogue="")
def orchestration(config: Path, /, *overrides: Overrides, local: bool = False) -> int:
    """Split the wall time of a run into its stages, orchestration and tracking.

    Parameters
    ----------
    config
        TOML file.
    local
        Measure the loop without Prefect.
    """
    from pipelines.benchmarks.orchestration import orchestration

    return orchestration(config, overrides, local=local)


@bench.command(help_epilogue="")
def credit(
    config: Path, /, *overrides: Overrides, batches: Annotated[int, Parameter(validator=validators.Number(gte=2))] = 8
) -> int:
    """Compare the gradient's variance under aligned and crossed credit, from the same completions.

    Parameters
    ----------
    config
        TOML file of a run with one turn.
    batches
        Iterations' worth of problems to sample.
    """
    from pipelines.benchmarks.credit import bench_credit

    return bench_credit(config, overrides, batches)


@bench.command(help_epilogue="")
def sandbox(*, workers: Positive = 2) -> int:
    """Time the sandbox, and one bubblewrap per candidate beside it in the same run.

    Parameters
    ----------
    workers
        Jails side by side.
    """
    from pipelines.benchmarks.sandbox import bench_sandbox

    return bench_sandbox(workers)
