"""``magrpo place``: what would start where; and the forecast of ``magrpo train --dry-run --place``."""

import json
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from magrpo.config import RunConfig, load_config
from magrpo.place import Place
from magrpo.planning.fit import check_place
from magrpo.planning.starts import Start, count_bases, count_gpus, list_starts
from pipelines.arguments import ConfigFile, GivenPlace, Json

_LABEL = 9
"""Columns of the labels of lines."""


def show_place(place: GivenPlace, config: ConfigFile | None = None, /, *, as_json: Json = False) -> int:
    """Print what would start at a place, and return 0. Raises ConfigError if the configuration does not fit.

    Args:
        place: TOML file that says where to run, or none.
        config: Configuration to run there: its models are counted, and whether it fits is checked.
    """
    resolved = load_config(config) if config is not None else None
    if resolved is not None:
        check_place(resolved, place)
    num_bases = count_bases(resolved) if resolved is not None else 1
    starts, gpus = list(list_starts(place, num_bases)), count_gpus(place, num_bases)
    if as_json:
        print(json.dumps({"place": place.model_dump(), "starts": [asdict(start) for start in starts], "gpus": gpus}))
        return 0
    lines = [f"place    {place.describe()}", *map(_describe_start, starts), f"GPUs     {gpus} for what is started"]
    lines += [f"config   {config}: fits"] if config is not None else []
    lines += ["nothing was started"]
    width = max(40, min(shutil.get_terminal_size().columns, 120))
    for line in lines:
        print(
            textwrap.fill(line, width, subsequent_indent=" " * _LABEL, break_long_words=False, break_on_hyphens=False)
        )
    return 0


def forecast_lines(config: RunConfig, place: Place, root: Path) -> Iterator[str]:
    """The forecast of a run at ``place``, with the constants measured in ``root`` or those that ship."""
    from magrpo.planning import throughput  # torch, transformers

    rates, lag = throughput.load_rates(root), config.train.lag
    load = throughput.Workload.of(config, 2 if config.model.dtype != "float32" else 4)
    machines = throughput.Machines.of(place, load.num_bases)
    forecast = throughput.forecast_run(load, machines, rates, lag)
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in forecast.seconds.items())
    yield f"place    {place.describe()}"
    yield f"  a model, not a measurement: {forecast.tokens_per_s:,.0f} tokens/s on {forecast.gpus} GPUs"
    yield f"  {forecast.period_s:.3g} s an iteration at lag {lag}: {parts}"
    yield f"  bottleneck: {forecast.bottleneck}; servers work {forecast.serving_frac:.0%}, ranks {forecast.updating_frac:.0%}"
    gib = 2**30
    server = throughput.server_memory(load, machines, rates) / gib
    rank = throughput.rank_memory(config, place, load.dtype_bytes) / gib
    yield f"  memory of a GPU: server {server:.1f} GiB, rank {rank:.1f} GiB, of {rates.memory_bytes / gib:.1f} GiB"
    price = f"${forecast.dollars_per_million:.3g} for a million tokens"
    yield f"  {price}, at ${rates.dollars_per_gpu_hour:.2f} for a GPU and hour"
    yield f"  constants: {rates.source}"


def _describe_start(start: Start) -> str:
    what = start.what if start.count == 1 else f"{start.count} x {start.what}"
    gpus = f", {start.gpus} GPU{'s' * (start.gpus != 1)} each" if start.gpus else ""
    port = f"; port {start.port}" if start.port and "://" not in start.port else f" at {start.port}" * bool(start.port)
    label = {"driver": "driver", "server": "servers", "rank": "ranks", "pool of jails": "jails"}[start.what]
    note = f": {start.note}" if start.note else ""
    return f"{label:{_LABEL}}{what} on {start.where}{port}{gpus}{note}".replace(" on a node", ", a node")
