"""``magrpo place``: what would start where; and the forecast of ``magrpo train --dry-run --place``."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from magrpo.config.place import Place
from magrpo.config.run import RunConfig, load_config
from magrpo.planning.card import GIB
from magrpo.planning.fit import check_place
from magrpo.planning.starts import Start, count_bases, count_gpus, list_starts
from pipelines.arguments import ConfigFile, GivenPlace, Json
from pipelines.commands.config_help import format_place_help, print_wrapped


def show_place(file: GivenPlace | None = None, config: ConfigFile | None = None, /, *, as_json: Json = False) -> int:
    """Print what would start at a place, and return 0. Raises ConfigError if the configuration does not fit.

    Args:
        file: Cluster file (TOML) that says where to run, or none for one process. Without it, its keys are explained.
        config: Configuration to run there: its models are counted, and the two are checked against each other.
    """
    if file is None:
        print_wrapped(format_place_help())
        return 0
    place = file
    resolved = load_config(config) if config is not None else None
    if resolved is not None:
        check_place(resolved, place)
    num_bases = count_bases(resolved) if resolved is not None else 1
    on_gpus = resolved is None or resolved.model.device != "cpu"
    starts = list(list_starts(place, num_bases, on_gpus=on_gpus))
    gpus = count_gpus(place, starts)
    if as_json:
        print(json.dumps({"place": place.model_dump(), "starts": [asdict(start) for start in starts], "gpus": gpus}))
        return 0
    lines = [f"place    {place.describe()}", *map(_describe_start, starts), f"GPUs     {gpus} for these processes"]
    lines += [f"config   {config}: fits"] if config is not None else []
    print_wrapped("\n".join([*lines, "nothing was started"]))
    return 0


def forecast_lines(config: RunConfig, place: Place, root: Path) -> Iterator[str]:
    """The forecast of a run at ``place``, with the constants measured in ``root`` or those that ship."""
    yield f"place    {place.describe()}"
    if config.model.device == "cpu":
        yield '  no forecast for model.device = "cpu": the model covers GPUs only'
        return
    from magrpo.planning import throughput  # torch, transformers

    rates, lag = throughput.load_rates(root), config.train.lag
    load = throughput.Workload.of(config)
    machines = throughput.Machines.of(place, load.num_bases)
    forecast = throughput.forecast_run(load, machines, rates, lag)
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in forecast.seconds.items())
    yield f"  a model, not a measurement: {forecast.tokens_per_s:,.0f} tokens/s on {forecast.gpus} GPUs"
    yield f"  {forecast.period_s:.3g} s per iteration at lag {lag}: {parts}"
    working = f"servers work {forecast.serving_frac:.0%} of the time, ranks {forecast.updating_frac:.0%}"
    yield f"  bottleneck: {forecast.bottleneck}; {working}"
    server = throughput.server_memory(load, machines, rates) / GIB
    num_shards = place.update.ranks if place.update.shard != "none" else 1
    rank = throughput.rank_memory(config, load.dtype_bytes, num_shards) / GIB
    yield f"  memory per GPU: server {server:.1f} GiB, rank {rank:.1f} GiB, of {rates.memory_bytes / GIB:.1f} GiB"
    if max(server, rank) > rates.memory_bytes / GIB:
        remedy = "optim.micro_batch_tokens" if rank > server else "engine.max_batch in the cluster file (place)"
        yield f"  more than a GPU has: lower {remedy}, or use a smaller model"
    price = f"${forecast.dollars_per_million:.3g} per million tokens"
    yield f"  {price}, at ${rates.dollars_per_gpu_hour:.2f} per GPU hour"
    yield f"  constants: {rates.source}"


def _describe_start(start: Start) -> str:
    """``servers  8 on this machine; 1 GPU each, port chosen when it starts: ...``."""
    label = {"driver": "driver", "server": "servers", "rank": "ranks", "sandbox": "sandbox"}[start.what]
    where = f"{start.count} at {start.port}" if "://" in start.port else f"{start.count} on {start.where}"
    facts = [f"{start.gpus} GPU{'s' * (start.gpus != 1)} each"] if start.gpus else []
    facts += [f"port {start.port}"] if start.port and "://" not in start.port else []
    return f"{label:8} {'; '.join([where, *facts])}: {start.note}"
