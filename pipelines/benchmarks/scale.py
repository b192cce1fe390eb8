"""``magrpo bench scale``: tokens per second of each stage at a place and in one process."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import process_time

from rich.console import Console
from rich.table import Table

from magrpo.config import RunConfig, load_config
from magrpo.layout import TRAINING_STAGES, keep_place, steps
from magrpo.place import Place
from magrpo.planning.fit import check_place
from magrpo.planning.throughput import (
    RATES_FILE,
    Machines,
    Rates,
    Workload,
    load_rates,
    rollout_s,
    update_s,
)
from magrpo.store import RunStore, atomic_write
from magrpo.tracking.provenance import collect_provenance
from pipelines.arguments import ConfigFile, GivenPlace, Overrides
from pipelines.flows.launch import run_stages

SETTINGS = ("train.num_iterations=4", "eval.max_problems=2", "eval.num_samples=1", "tracking.system_metrics=false")


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean iteration of a run, without its first, which loads everything."""

    seconds: dict[str, float]
    """By stage."""
    period_s: float
    """From one iteration's end to the next."""
    tokens: float
    completions: float
    cpu_s: float
    """CPU time of the driver's process, in the whole run, for each completion of the whole run."""


def bench_scale(
    config: ConfigFile, /, *overrides: Overrides, place: GivenPlace | None = None, output: Path | None = None
) -> int:
    """Train ``config`` for 4 iterations (or ``train.num_iterations``) at a place, then in one process; print both.

    Args:
        config: TOML file, or the name of one that ships.
        place: TOML file that says where to run; by default one process.
        output: File for the measured constants; by default rates.toml in the configuration's folder of runs.
    """
    chosen = place or Place()
    resolved = load_config(config, [*SETTINGS, *overrides])
    check_place(resolved, chosen)
    places = {chosen.describe(): chosen, Place().describe(): Place()}
    console = Console(highlight=False, soft_wrap=True)
    measured = {}
    with tempfile.TemporaryDirectory(prefix="magrpo-scale-") as folder:
        for number, at in enumerate(places.values()):
            local = load_config(config, [*SETTINGS, *overrides, f"root={folder}"])
            store = RunStore.create(local, f"scale-{number}")
            keep_place(store, at)
            before = process_time()
            run_stages(store, local=True)
            measured[at.describe()] = measure_run(store, process_time() - before)
    first = measured[chosen.describe()]
    path = output or resolved.root / RATES_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    rates = fit_rates(resolved, chosen, first, load_rates(resolved.root))
    atomic_write(path, format_rates(rates).encode())
    for name, of_place in measured.items():
        console.print(_build_table(name, of_place))
        console.print(_describe_use(of_place, places[name]))
    if len(measured) > 1:
        ratio = measured[Place().describe()].period_s / first.period_s
        console.print(f"{chosen.describe()}: {ratio:.2f} times as fast as one process")
    console.print(f"constants for --dry-run --place: {path}")
    return 0


def measure_run(store: RunStore, cpu_s: float) -> Measured:
    """The mean iteration of a finished run; ``cpu_s`` of the driver went into all of it."""
    config = store.config()
    last, every = config.train.num_iterations, steps(config)
    counted = range(min(2, last), last + 1)
    seconds: dict[str, float] = dict.fromkeys(TRAINING_STAGES, 0.0)
    tokens = completions = all_completions = 0.0
    intervals = []
    for step in every:
        pointer = store.find(step.folder)
        if step.stage not in TRAINING_STAGES or pointer is None:
            continue
        metrics = store.metrics(pointer)
        sampled = metrics.get("rollout/tokens", 0.0) / max(metrics.get("rollout/response_tokens", 1.0), 1e-9)
        all_completions += sampled
        if step.iteration in counted:
            intervals.append(store.work_interval(pointer))
            seconds[step.stage] += metrics[f"time/{step.stage}_s"] / len(counted)
            tokens += metrics.get("rollout/tokens", 0.0) / len(counted)
            completions += sampled / len(counted)
    period = (max(end for _, end in intervals) - min(start for start, _ in intervals)) / len(counted)
    return Measured(seconds, period, tokens, completions, cpu_s / max(all_completions, 1.0))


def fit_rates(config: RunConfig, place: Place, measured: Measured, rates: Rates) -> Rates:
    """``rates`` with the factors that make the model agree with a measurement at ``place``."""
    load = Workload.of(config)
    machines = Machines.of(place, load.num_bases)
    frac = measured.tokens / max(measured.completions * load.max_tokens, 1.0)
    plain = rates.model_copy(update={"length_frac": frac, "rollout_factor": 1.0, "update_factor": 1.0})
    machine = collect_provenance()["machine"]
    changes = {
        "source": f"rollout and update measured by magrpo bench scale on {machine}, at {place.describe()}",
        "rollout_factor": measured.seconds["rollout"] / rollout_s(load, machines, plain),
        "update_factor": measured.seconds["update"] / update_s(load, machines, plain),
    }
    if _is_free(place):
        changes["driver_s_per_token"] = measured.cpu_s * measured.completions / measured.tokens
    return plain.model_copy(update=changes)


def format_rates(rates: Rates) -> str:
    """The constants as TOML."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in rates.model_dump().items()]
    return "\n".join(["# Written by `magrpo bench scale`; read by `magrpo train --dry-run --place`.", *lines, ""])


def _is_free(place: Place) -> bool:
    """Whether the driver neither generates nor updates."""
    return place.engine.is_remote and place.update.ranks > 0


def _build_table(title: str, measured: Measured) -> Table:
    table = Table("", "s an iteration", "tokens/s", box=None, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for stage, seconds in {**measured.seconds, "all": measured.period_s}.items():
        table.add_row(stage, f"{seconds:.3f}", f"{measured.tokens / seconds:,.0f}" if seconds else "")
    return table


def _describe_use(measured: Measured, place: Place) -> str:
    idle = {
        name: max(0.0, 1 - measured.seconds[stage] / measured.period_s)
        for name, stage in (("servers", "rollout"), ("ranks", "update"))
    }
    beside = "" if _is_free(place) else ", generation and updates in its process included"
    return (
        f"idle: servers {idle['servers']:.0%}, ranks {idle['ranks']:.0%}\n"
        f"driver's CPU: {measured.cpu_s * 1000:.2f} ms a completion of {measured.tokens / measured.completions:.0f} "
        f"tokens{beside}\n"
    )
