"""Whether a configuration fits a place; each misfit is told with the keys that make it and the remedy."""

import importlib.util
from collections.abc import Iterator

from magrpo.config.agents import trained_holders
from magrpo.config.place import Place
from magrpo.config.run import RunConfig
from magrpo.plugins import ConfigError


def check_place(config: RunConfig, place: Place) -> None:
    """Raise ConfigError, one line for each misfit, if the run cannot run at ``place``."""
    if misfits := list(find_misfits(config, place)):
        raise ConfigError("\n".join(f"the cluster file (place) does not fit the run: {misfit}" for misfit in misfits))


def find_misfits(config: RunConfig, place: Place) -> Iterator[str]:
    """What keeps the run from running at ``place``, in words; nothing if it can."""
    if place.fleet.kind == "ray" and importlib.util.find_spec("ray") is None:
        yield 'fleet.kind = "ray", but Ray is not installed: pip install "magrpo[ray]"'
    if place.engine.is_remote:
        yield from _find_engine_misfits(config, place)
    ranks, units = place.update.ranks, count_units(config)
    if ranks and units % ranks:
        fitting = [str(number) for number in range(1, units + 1) if units % number == 0]
        yield (
            f"update.ranks = {ranks} must divide {units}, optim.lanes times the trained adapters and copies: set it to "
            f"{', '.join(fitting)}, or start a new run with other optim.lanes"
        )
    if place.update.shard != "none" and (num_models := count_models(config)) > 1 and config.optim.lanes % ranks:
        yield (
            f'update.shard = "base" lets all ranks run one model at a time, but {num_models} are trained: '
            f"update.ranks = {ranks} must divide optim.lanes = {config.optim.lanes}; remove update.shard, or start "
            "a new run with more optim.lanes"
        )
    gpus, device = place.update.gpus, config.model.device
    if ranks and gpus is not None and device != "auto" and bool(gpus) != (device == "cuda"):
        yield f'update.gpus = {gpus}, but model.device = "{device}": set update.gpus = {int(device == "cuda")}'
    if place.update.colocate and config.train.lag:
        yield (
            f"update.colocate makes servers and ranks take turns, but train.lag = {config.train.lag} runs them at the "
            "same time: remove update.colocate, or set train.lag = 0"
        )
    if place.sandbox.nodes and config.sandbox.kind == "none":
        yield 'sandbox.nodes has no effect with sandbox.kind = "none": remove it'


def count_units(config: RunConfig) -> int:
    """The number of units of work of an update, of which each rank takes equally many: lanes of each trained holder."""
    return config.optim.lanes * len(trained_holders(config.agents))


def count_models(config: RunConfig) -> int:
    """The number of models that an update runs: bases of trained adapters, and full copies."""
    trained = [agent for agent in config.agents if agent.trained]
    return len({agent.name if agent.weights == "full" else ("base", agent.model) for agent in trained})


def _find_engine_misfits(config: RunConfig, place: Place) -> Iterator[str]:
    engine = place.engine
    if config.engine.kind not in ("vllm", "auto"):
        yield (
            f'engine.servers are vLLM servers, but engine.kind = "{config.engine.kind}" in the configuration: remove '
            'engine.servers, or start a new run with engine.kind = "vllm"'
        )
    if isinstance(engine.servers, tuple):
        return
    if engine.gpus and config.model.device == "cpu":
        yield f'engine.gpus = {engine.gpus}, but model.device = "cpu": set engine.gpus = 0'
    elif not engine.gpus and config.model.device == "cuda":
        yield 'engine.gpus = 0 puts the servers on CPUs, but model.device = "cuda": set engine.gpus = 1 or more'
