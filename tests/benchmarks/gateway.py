"""The wall time of a program beside that of the built-in environment: see :mod:`tests.benchmarks.measure`."""

import tempfile
from collections import defaultdict
from statistics import median

from rich.console import Console
from rich.table import Table

from magrpo.config.run import load_config
from magrpo.run.store import RunStore
from pipelines.arguments import ConfigFile, Overrides
from pipelines.flows.launch import run_stages

ITERATIONS = 10


def bench_gateway(config: ConfigFile, /, *overrides: Overrides, like: ConfigFile, pairs: int = 3) -> int:
    """Run ``config``, whose environment is a program, and ``like`` by turns, and print the ratio of their wall times.

    Each run takes 10 iterations (or ``train.num_iterations``) in a temporary folder, without Prefect. The first run of
    each is a warm-up. Rollouts pair completions by index in both.

    Args:
        config: TOML file of a program, or the name of one that ships.
        like: The same task with a built-in environment.
        pairs: Number of measured runs of each.
    """
    console = Console(highlight=False, soft_wrap=True)
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="magrpo-bench-") as folder:
        for number in range(pairs + 1):
            for name, path in (("built-in", like), ("program", config)):
                settings = [f"train.num_iterations={ITERATIONS}", *overrides, "rollout.joint_mode=aligned"]
                run_id = f"{name}-{number}"
                store = RunStore.create(load_config(path, [*settings, f"root={folder}"]), run_id)
                timing = run_stages(store, local=True).timing
                if number > 0:
                    for stage in ("rollout", "evaluate"):
                        seconds[name][stage].append(timing.stages[stage])
                    seconds[name]["all"].append(sum(timing.stages.values()))
    table = Table("", "built-in, s", "program, s", "ratio", box=None, title=f"median of {pairs} runs")
    for stage in ("rollout", "evaluate", "all"):
        built_in, program = (median(seconds[name][stage]) for name in ("built-in", "program"))
        table.add_row(stage, f"{built_in:.2f}", f"{program:.2f}", f"{program / built_in:.2f}")
    console.print(table)
    return 0
