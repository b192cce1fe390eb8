"""Checks whether a configuration can run at a place; each error names the keys and the remedy."""

import importlib.util
import os
from collections.abc import Iterator

from magrpo.config.agents import count_models, trained_holders
from magrpo.config.place import Place
from magrpo.config.run import RunConfig
from magrpo.errors import ConfigError
from magrpo.run.rewind import list_remaining_steps
from magrpo.run.store import RunStore


def check_place(config: RunConfig, place: Place, store: RunStore | None = None, from_stage: str | None = None) -> None:
    """Raise ConfigError, one line for each misfit, if the run cannot run at ``place``, or nowhere on this machine.

    ``store``: a run that has begun, resumed from ``from_stage`` if given.
    """
    if misfits := list(find_misfits(config, place)):
        raise ConfigError("\n".join(f"the cluster file (place) does not fit the run: {misfit}" for misfit in misfits))
    if config.algo.kernel == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        _check_triton(config, store, from_stage)


def check_device(
    config: RunConfig,
    place: Place,
    store: RunStore | None = None,
    from_stage: str | None = None,
    *,
    is_fixed: bool = False,
) -> None:
    """Raise ConfigError if this process would hold models on a GPU, but the machine has none.

    ``store``: a run that has begun, resumed from ``from_stage`` if given. ``is_fixed``: whether the configuration
    cannot change any more, as that of a run in ``store`` cannot.
    """
    if config.model.device != "cuda" or place.is_elsewhere:
        return
    remaining = [step.spec for step in list_remaining_steps(config, store, from_stage)]
    if not any(spec.shows_prompts or spec.writes_checkpoint for spec in remaining):  # these need the models
        return
    from magrpo.model.lineup import device_of  # torch, transformers

    try:
        device_of(config.model)
    except ConfigError as error:
        if store is None and not is_fixed:
            raise
        raise ConfigError(
            f"{error}: this needs a new run; or use a machine that has one, or a cluster file (--place) with samplers "
            "and ranks"
        ) from None


def _check_triton(config: RunConfig, store: RunStore | None, from_stage: str | None) -> None:
    """Raise ConfigError if updates that are left would compute a loss in Triton on a CPU."""
    from magrpo.planning.sizes import find_planned_device  # torch, transformers

    updates_left = any(step.stage == "update" for step in list_remaining_steps(config, store, from_stage))
    if updates_left and find_planned_device(config.model).type == "cpu":
        raise ConfigError(
            'algo.kernel = "triton" needs a CUDA device: use a machine that has one, set TRITON_INTERPRET=1 for a '
            'test, or start a new run with algo.kernel = "auto"'
        )


def find_misfits(config: RunConfig, place: Place) -> Iterator[str]:
    """Yield each reason why the run cannot run at ``place``."""
    if place.uses_ray and importlib.util.find_spec("ray") is None:
        yield 'samplers, ranks and jails are Ray actors, but Ray is not installed: pip install "magrpo[ray]"'
    yield from _find_rank_misfits(config, place)
    yield from _find_gpu_misfits(config, place)
    if place.jails.nodes and config.sandbox.kind != "pool":
        yield f'jails.nodes has no effect with sandbox.kind = "{config.sandbox.kind}": remove it'
    if place.jails.nodes > 1 and not place.address:
        yield (
            f"jails.nodes = {place.jails.nodes} needs a cluster, and this machine is one node: remove jails.nodes, or "
            "set address"
        )


def _find_rank_misfits(config: RunConfig, place: Place) -> Iterator[str]:
    """Yield each reason why the ranks cannot compute the run's updates together."""
    ranks = place.ranks.count
    units = config.optim.lanes * len(trained_holders(config.agents))  # pieces of an update, dealt to ranks equally
    num_models = count_models(agent for agent in config.agents if agent.trained)
    if ranks and units % ranks:
        fitting = [str(number) for number in range(1, units + 1) if units % number == 0]
        yield (
            f"ranks.count = {ranks} must divide {units}, optim.lanes times the trained adapters and copies: set it to "
            f"{', '.join(fitting)}, or start a new run with other optim.lanes"
        )
    if place.ranks.shard != "none" and num_models > 1 and config.optim.lanes % ranks:
        yield (
            f'ranks.shard = "base" lets all ranks run one model at a time, but {num_models} are trained: '
            f"ranks.count = {ranks} must divide optim.lanes = {config.optim.lanes}; remove ranks.shard, or start "
            "a new run with more optim.lanes"
        )
    if ranks and config.trains_critics:
        yield (
            f"ranks.count = {ranks} keeps the base models out of this process, where critics read observations: remove "
            "ranks, or start a new run with an estimator without a critic"
        )


def _find_gpu_misfits(config: RunConfig, place: Place) -> Iterator[str]:
    """Yield each reason why samplers and ranks cannot get the GPUs that the run needs, or do not need theirs."""
    for section, gpus in (("samplers", place.samplers.gpus), ("ranks", place.ranks.gpus)):
        if gpus is not None and config.model.device != "auto" and bool(gpus) != (config.model.device == "cuda"):
            yield f'{section}.gpus = {gpus}, but model.device = "{config.model.device}": remove {section}.gpus'
    if place.address and place.is_elsewhere and config.model.device == "auto":
        yield (
            'model.device = "auto" goes by this machine\'s GPUs, but actors elsewhere hold the models: start a new run '
            'with model.device = "cuda" or "cpu"'
        )
    if place.colocate and config.model.device == "cpu":
        yield 'colocate shares GPUs, but model.device = "cpu": remove colocate'
    if place.colocate and config.train.lag:
        yield (
            f"colocate makes samplers and ranks take turns, but train.lag = {config.train.lag} runs them at the "
            "same time: remove colocate, or set train.lag = 0"
        )
