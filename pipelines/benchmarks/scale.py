"""``magrpo bench scale``: tokens per second of each stage at a place and in one process, by turns in one command."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from time import process_time

from rich.console import Console
from rich.table import Table

from magrpo.algo.stats import seed_interval
from magrpo.config.place import Place
from magrpo.config.run import RunConfig, load_config
from magrpo.files.writing import atomic_write
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
from magrpo.run.files import keep_place
from magrpo.run.steps import TRAINING_STAGES, steps
from magrpo.run.store import RunStore
from magrpo.tracking.provenance import collect_provenance
from pipelines.arguments import ConfigFile, GivenPlace, Overrides, Positive
from pipelines.flows.launch import run_stages

SETTINGS = ("train.num_iterations=4", "eval.max_problems=2", "eval.num_samples=1", "tracking.system_metrics=false")


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean iteration of a run, without its first, which loads everything; or of several runs."""

    seconds: dict[str, float]
    """By stage."""
    period_s: float
    """From one iteration's end to the next."""
    tokens: float
    completions: float
    cpu_s: float
    """CPU time of the driver's process, in the whole run, for each completion of the whole run."""
    periods_s: tuple[float, ...] = ()
    """From the end of the iteration before to the end of each iteration."""

    @classmethod
    def merge(cls, runs: Sequence["Measured"]) -> "Measured":
        """The mean over runs of equally many iterations."""
        return cls(
            {stage: fmean(run.seconds[stage] for run in runs) for stage in runs[0].seconds},
            fmean(run.period_s for run in runs),
            fmean(run.tokens for run in runs),
            fmean(run.completions for run in runs),
            fmean(run.cpu_s for run in runs),
            tuple(period for run in runs for period in run.periods_s),
        )


def bench_scale(
    config: ConfigFile,
    /,
    *overrides: Overrides,
    place: GivenPlace | None = None,
    rounds: Positive = 2,
    output: Path | None = None,
) -> int:
    """Train ``config`` for 4 iterations (or ``train.num_iterations``) at a place and in one process; print both.

    Both sample with the same engine.

    Args:
        config: TOML file, or the name of one that ships.
        place: Cluster file (TOML) that says where to run; by default one process.
        rounds: Number of runs of each kind, alternately. Each loads everything again.
        output: File for the measured constants; by default rates.toml in the configuration's run folder.
    """
    chosen = place or Place()
    settings = [*SETTINGS, *overrides, *(["engine.kind=vllm"] if chosen.engine.is_remote else [])]
    resolved = load_config(config, settings)
    check_place(resolved, chosen)
    places = {chosen.describe(): chosen, Place().describe(): Place()}
    console = Console(highlight=False, soft_wrap=True)
    runs: dict[str, list[Measured]] = {name: [] for name in places}
    with tempfile.TemporaryDirectory(prefix="magrpo-scale-") as folder:
        local = load_config(config, [*settings, f"root={folder}"])
        for number in range(rounds):
            for name, at in places.items():
                console.print(f"run {number + 1} of {rounds}: {name}")
                store = RunStore.create(local, f"scale-{sum(map(len, runs.values()))}")
                keep_place(store, at)
                before = process_time()
                run_stages(store, local=True)
                runs[name].append(measure_run(store, process_time() - before))
    measured = {name: Measured.merge(of_place) for name, of_place in runs.items()}
    first = measured[chosen.describe()]
    path = output or resolved.root / RATES_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    rates = fit_rates(resolved, chosen, first, load_rates(resolved.root))
    atomic_write(path, format_rates(rates).encode())
    for name, of_place in measured.items():
        console.print(_build_table(name, of_place))
        console.print(_describe_use(of_place, places[name]))
    if len(measured) > 1:
        console.print(describe_ratio(first, measured[Place().describe()]))
    console.print(f"constants for --dry-run --place: {path}")
    return 0


def describe_ratio(at_place: Measured, alone: Measured) -> str:
    """Seconds of an iteration at the place over those in one process, iterations with equal numbers compared."""
    if len(at_place.periods_s) < 2:
        return f"an iteration: {at_place.period_s:.3f} s at the place, {alone.period_s:.3f} s in one process"
    ratios = [ours / theirs for ours, theirs in zip(at_place.periods_s, alone.periods_s, strict=True)]
    ratio = seed_interval(ratios)
    interval = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}, {len(ratios)} pairs of iterations"
    return (
        f"an iteration: {at_place.period_s:.3f} s at the place, {alone.period_s:.3f} s in one process; "
        f"ratio {ratio.mean:.2f} ({interval})"
    )


def measure_run(store: RunStore, cpu_s: float) -> Measured:
    """The mean iteration of a finished run; ``cpu_s`` of the driver went into all of it."""
    config = store.config()
    last = config.train.num_iterations
    counted = range(min(2, last), last + 1)
    seconds: dict[str, float] = dict.fromkeys(TRAINING_STAGES, 0.0)
    tokens = completions = all_completions = 0.0
    intervals: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for step in steps(config):
        pointer = store.find(step.folder)
        if step.stage not in TRAINING_STAGES or pointer is None:
            continue
        metrics = store.metrics(pointer)
        sampled = metrics.get("rollout/tokens", 0.0) / max(metrics.get("rollout/response_tokens", 1.0), 1e-9)
        all_completions += sampled
        if step.iteration in counted:
            intervals[step.iteration].append(store.work_interval(pointer))
            seconds[step.stage] += metrics[f"time/{step.stage}_s"] / len(counted)
            tokens += metrics.get("rollout/tokens", 0.0) / len(counted)
            completions += sampled / len(counted)
    begin = min(start for start, _ in intervals[counted[0]])
    ends = [max(end for _, end in intervals[iteration]) for iteration in counted]
    periods = tuple(end - start for start, end in pairwise([begin, *ends]))
    cpu_each = cpu_s / max(all_completions, 1.0)
    return Measured(seconds, (ends[-1] - begin) / len(counted), tokens, completions, cpu_each, periods)


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
    table = Table("", "s per iteration", "tokens/s", box=None, title=title, title_justify="left")
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
        f"driver's CPU: {measured.cpu_s * 1000:.2f} ms per completion of {measured.tokens / measured.completions:.0f} "
        f"tokens{beside}\n"
    )
