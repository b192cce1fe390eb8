"""The wall time of a run, split by stage: see :mod:`tests.benchmarks.measure`."""

import tempfile

from rich.console import Console
from rich.table import Table

from magrpo.config.run import load_config
from magrpo.run.store import RunStore
from pipelines.arguments import ConfigFile, Overrides
from pipelines.flows.launch import run_stages

ITERATIONS = 20


def bench_orchestration(config: ConfigFile, /, *overrides: Overrides, local: bool = False) -> int:
    """Run ``config`` for 20 iterations (or ``train.num_iterations``) in a temporary folder and print the split.

    The wall time is that of the loop, without the start of the Prefect server and the imports. Loading the model counts
    for the stage that needs it first.

    Args:
        config: TOML file, or the name of one that ships.
        local: Measure the loop without Prefect.
    """
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="magrpo-bench-") as folder:
        settings = [f"train.num_iterations={ITERATIONS}", *overrides, f"root={folder}"]
        store = RunStore.create(load_config(config, settings), "bench")
        timing = run_stages(store, local=local).timing
        iterations = store.config().train.num_iterations
    table = Table("", "seconds", "an iteration", "share", box=None, title=f"{iterations} iterations")
    for column in table.columns[1:]:
        column.justify = "right"
    overheads = {"orchestration": timing.orchestration, "loop": timing.loop, "tracking": timing.tracking}
    for name, seconds in {**timing.stages, **overheads, "all": timing.steps}.items():
        table.add_row(name, f"{seconds:.2f}", f"{seconds / iterations:.3f}", f"{seconds / timing.steps:.1%}")
    console.print(table)
    per_iteration = (timing.stages["rollout"] + timing.stages["update"]) / iterations
    console.print(
        f"rollout + update: {per_iteration:.2f} s an iteration\n"
        f"orchestration and tracking: {sum(overheads.values()) / timing.steps:.1%} of the wall time"
    )
    return 0
