"""The commands of ``magrpo bench``. Each imports its libraries when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators

from pipelines.commands.arguments import Overrides, Positive

bench = App(name="bench", help="Measure parts of this project on this machine.", help_epilogue="")


@bench.command(help_epilogue="")
def orchestration(config: Path, /, *overrides: Overrides, local: bool = False) -> int:
    """Split the wall time of a run into its stages, orchestration and tracking.

    Args:
        config: TOML file.
        local: Measure the loop without Prefect.
    """
    from pipelines.benchmarks.orchestration import bench_orchestration

    return bench_orchestration(config, overrides, local=local)


@bench.command(help_epilogue="")
def credit(
    config: Path, /, *overrides: Overrides, batches: Annotated[int, Parameter(validator=validators.Number(gte=2))] = 8
) -> int:
    """Compare the gradient's variance under aligned and crossed credit, from the same completions.

    Args:
        config: TOML file of a run with one turn.
        batches: Number of iterations to sample problems for.
    """
    from pipelines.benchmarks.credit import bench_credit

    return bench_credit(config, overrides, batches)


@bench.command(help_epilogue="")
def sandbox(*, workers: Positive = 2) -> int:
    """Time the sandbox, and for comparison one bubblewrap per candidate.

    Args:
        workers: Parallel jails.
    """
    from pipelines.benchmarks.sandbox import bench_sandbox

    return bench_sandbox(workers)
