"""A model of tokens per second, bottleneck and price of a run at a place, before anything is started.

Symbols: C completions of at most L tokens and m L on average, in groups of G with a prompt of p tokens; P parameters;
S servers of g GPUs, each with at most B completions at once; R ranks. The functions give one equation each.
"""

import math
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pydantic import Field

from magrpo.config.place import Place
from magrpo.config.run import RunConfig
from magrpo.planning.sizes import estimate_memory, estimate_work, read_base_model
from magrpo.planning.starts import count_bases
from magrpo.plugins import Section, read_toml, validate_config

RATES_FILE = "rates.toml"
"""Name of the file with measured constants in a folder of runs, and of that with the constants that ship."""


class Rates(Section):
    """What one GPU, or what runs in its place, and the driver's machine can do."""

    source: str
    """Where the numbers come from."""
    update_flops: float = Field(gt=0)
    """Floating-point operations that a rank reaches in a second of an update."""
    decode_flops: float = Field(gt=0)
    """Floating-point operations that a GPU of a server reaches in a second."""
    bandwidth: float = Field(gt=0)
    """Bytes that a GPU of a server reads in a second."""
    memory_bytes: float = Field(gt=0)
    """Memory of a GPU."""
    step_s: float = Field(ge=0)
    """Seconds of a decoding step that do not depend on its batch."""
    handover_s: float = Field(ge=0)
    """Seconds from the end of an update to the next rollout with its weights."""
    switch_s: float = Field(ge=0)
    """Seconds for servers to sleep and to wake, once an iteration, if they share GPUs with ranks."""
    programs_per_s: float = Field(gt=0)
    """Programs that one machine's jails run in a second."""
    driver_s_per_token: float = Field(ge=0)
    """Seconds of the driver's CPU for a token generated."""
    prompt_tokens: float = Field(ge=0)
    """Mean length of a prompt."""
    length_frac: float = Field(gt=0, le=1)
    """Mean length of a completion as a fraction of the limit."""
    rollout_factor: float = Field(1.0, gt=0)
    """Measured seconds of a rollout over those of the model."""
    update_factor: float = Field(1.0, gt=0)
    """Measured seconds of an update over those of the model."""
    dollars_per_gpu_hour: float = Field(ge=0)
    """Price of a GPU."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one iteration."""

    completions: int
    max_tokens: int
    """Length limit of a completion."""
    group_size: int
    parameters: float
    """Of the base model; of several the mean over agents."""
    dtype_bytes: int
    cache_bytes: float
    """Bytes of the key-value cache for a token."""
    programs: int
    """Programs run in the sandbox at most."""
    num_bases: int = 1
    """Base models, and full copies, each with servers of its own."""
    full_weights: bool = False
    """Whether all parameters are trained."""
    adapter_bytes: float = 0.0
    """Bytes of the adapters that a server holds: of all agents of a base and, with a lag, of several versions."""

    @classmethod
    def of(cls, config: RunConfig) -> "Workload":
        """The work of a configuration. Raises ConfigError if the configuration of a base model cannot be read."""
        dtype_bytes = 4 if config.model.dtype == "float32" or config.model.device == "cpu" else 2
        work, sizes = estimate_work(config), [read_base_model(agent, config) for agent in config.agents]
        adapters = Counter[str]()
        for agent, size in zip(config.agents, sizes, strict=True):
            adapters[agent.model] += size.adapter_parameters
        return cls(
            completions=work.completions,
            max_tokens=config.rollout.max_new_tokens,
            group_size=config.rollout.group_size,
            parameters=sum(size.num_parameters for size in sizes) / len(sizes),
            dtype_bytes=dtype_bytes,
            cache_bytes=max(size.token_cache for size in sizes) * dtype_bytes,
            programs=work.programs or 0,
            num_bases=count_bases(config),
            full_weights=any(agent.weights == "full" for agent in config.agents),
            adapter_bytes=max(adapters.values()) * (config.train.lag + 1) * dtype_bytes,
        )

    def count_tokens(self, rates: Rates) -> float:
        """Tokens generated in an iteration: C m L."""
        return self.completions * self.max_tokens * rates.length_frac


@dataclass(frozen=True, slots=True)
class Machines:
    """What works on a run: all servers together, all ranks together."""

    servers: int
    gpus_per_server: int
    ranks: int
    max_batch: int
    shared: bool
    """Whether servers and ranks use the same GPUs by turns."""
    nodes: int = 1
    """Machines with jails."""

    @classmethod
    def of(cls, place: Place, num_bases: int) -> "Machines":
        """The machines of a place; one process is a server and a rank that share a GPU."""
        engine, ranks = place.engine, max(place.update.ranks, 1)
        if isinstance(engine.servers, tuple):
            return cls(len(engine.servers), 1, ranks, engine.max_batch, False, max(place.sandbox.nodes, 1))
        shared = place.update.colocate or not engine.servers
        servers = engine.servers * num_bases or ranks
        size = max(engine.gpus, 1) if engine.servers else 1
        return cls(servers, size, ranks, engine.max_batch, shared, max(place.sandbox.nodes, 1))

    @property
    def gpus(self) -> int:
        """GPUs, or processes in their place."""
        serving = self.servers * self.gpus_per_server
        return max(serving, self.ranks) if self.shared else serving + self.ranks


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the model says of a run at a place."""

    seconds: dict[str, float]
    """Of one iteration by part: rollout, score, driver, update, handover."""
    period_s: float
    """From one update to the next."""
    tokens_per_s: float
    """Generated and trained."""
    bottleneck: str
    gpus: int
    dollars_per_million: float
    """Price of a million tokens."""
    serving_frac: float
    """Share of the period in which servers work."""
    updating_frac: float
    """Share of the period in which ranks work."""


def load_rates(root: Path) -> Rates:
    """The constants that ``magrpo bench scale`` measured in ``root``, or else those that ship. Raises ConfigError."""
    path = root / RATES_FILE
    if not path.exists():
        path = Path(str(files("magrpo.planning") / RATES_FILE))
    return validate_config(Rates, read_toml(path), (), str(path))


def decode_step_s(load: Workload, machines: Machines, batch: float, rates: Rates) -> float:
    """Seconds of one decoding step of a server with ``batch`` completions in flight.

    t(b) = step + max((2 P b) / (g decode_flops), (bytes of weights + b (p + m L) bytes of cache) / (g bandwidth)).
    """
    context = rates.prompt_tokens + rates.length_frac * load.max_tokens
    read = load.parameters * load.dtype_bytes + batch * context * load.cache_bytes
    computed = 2 * load.parameters * batch / rates.decode_flops
    return rates.step_s + max(computed, read / rates.bandwidth) / machines.gpus_per_server


def rollout_s(load: Workload, machines: Machines, rates: Rates) -> float:
    """Seconds from the first request to the last answer.

    With n = C / S completions a server and b = min(n, B): prefill + max(n m / b, 1) L t(b). The one is the longest
    completion, which takes L steps however many servers there are.
    """
    each = load.completions / machines.servers
    batch = min(each, machines.max_batch)
    steps = max(each * rates.length_frac / batch, 1.0) * load.max_tokens
    return rates.rollout_factor * (
        _prefill_s(load, machines, rates) + steps * decode_step_s(load, machines, batch, rates)
    )


def serving_s(load: Workload, machines: Machines, rates: Rates, lag: int) -> float:
    """Seconds of the servers for an iteration if the lag + 1 rollouts in flight keep them full.

    prefill + n m L t(b) / b, where b = min(B, (lag + 1) n m).
    """
    each = load.completions / machines.servers * rates.length_frac
    batch = min(machines.max_batch, max((lag + 1) * each, 1.0))
    decoding = each * load.max_tokens / batch * decode_step_s(load, machines, batch, rates)
    return rates.rollout_factor * (_prefill_s(load, machines, rates) + decoding)


def update_s(load: Workload, machines: Machines, rates: Rates) -> float:
    """Seconds of an update: f P (C m L + C p / G) / (R update_flops), siblings sharing the pass over their prompt.

    f = 4 for adapters (forward, and backward through the frozen base), 6 for full weights.
    """
    factor = 6 if load.full_weights else 4
    tokens = load.count_tokens(rates) + _prompt_tokens(load, rates)
    return rates.update_factor * factor * load.parameters * tokens / (machines.ranks * rates.update_flops)


def forecast_run(load: Workload, machines: Machines, rates: Rates, lag: int = 0) -> Forecast:
    """Tokens per second at ``lag`` (0: rollout, score and update in turn).

    With lag k, rollout i + 1 + k waits for update i: period = max(sum of all parts / (k + 1), servers, ranks, driver).
    """
    seconds = {
        "rollout": rollout_s(load, machines, rates),
        "score": load.programs / (rates.programs_per_s * machines.nodes),
        "driver": load.count_tokens(rates) * rates.driver_s_per_token,
        "update": update_s(load, machines, rates),
        "handover": rates.handover_s + rates.switch_s * machines.shared,
    }
    chain, serving = sum(seconds.values()), serving_s(load, machines, rates, lag)
    limits = {"servers": serving, "update": seconds["update"], "driver": seconds["driver"], "score": seconds["score"]}
    limits = {name: value for name, value in limits.items() if lag}
    period = max([chain / (lag + 1), *limits.values()])
    longest = max(seconds, key=lambda part: seconds[part])
    bottleneck = next((name for name, value in limits.items() if value == period), longest)
    if bottleneck == "rollout" and load.completions <= machines.servers * machines.max_batch:
        bottleneck = "longest completion"
    tokens_per_s = load.count_tokens(rates) / period
    price = machines.gpus * rates.dollars_per_gpu_hour / 3600 / tokens_per_s * 1e6
    serving = seconds["rollout"] if lag == 0 else min(serving, period)
    return Forecast(
        seconds,
        period,
        tokens_per_s,
        bottleneck,
        machines.gpus,
        price,
        serving_frac=serving / period,
        updating_frac=seconds["update"] / period,
    )


def server_memory(load: Workload, machines: Machines, rates: Rates) -> float:
    """Bytes on each GPU of a server: weights, adapters and the cache of B completions at mean length, over g GPUs."""
    batch = min(machines.max_batch, math.ceil(load.completions / machines.servers))
    context = rates.prompt_tokens + rates.length_frac * load.max_tokens
    weights = load.parameters * load.dtype_bytes + load.adapter_bytes
    return (weights + batch * context * load.cache_bytes) / machines.gpus_per_server


def rank_memory(config: RunConfig, dtype_bytes: int, num_shards: int = 1) -> float:
    """Bytes on the GPU of a rank: all that an update holds, on each rank or spread over ``num_shards``."""
    return sum(estimate_memory(config, dtype_bytes, None, num_shards).values())


def _prompt_tokens(load: Workload, rates: Rates) -> float:
    """Tokens of all prompts, each counted once for a group."""
    return load.completions / load.group_size * rates.prompt_tokens


def _prefill_s(load: Workload, machines: Machines, rates: Rates) -> float:
    """2 P C p / (G S g decode_flops)."""
    gpus = machines.servers * machines.gpus_per_server
    return 2 * load.parameters * _prompt_tokens(load, rates) / (gpus * rates.decode_flops)
