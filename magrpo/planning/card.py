"""Whether a run fits one GPU that trainer and engine use in turn, and which micro-batches fill it."""

from dataclasses import dataclass, replace

import torch

from magrpo.config.agents import count_models
from magrpo.config.run import RunConfig
from magrpo.engines.auto import AutoEngine
from magrpo.engines.vllm import VllmEngine
from magrpo.interfaces import EnginePlugin, HasMaxBatch
from magrpo.planning.sizes import (
    ACTIVATIONS_OF,
    SAMPLING,
    UPDATING,
    count_micro_batch_tokens,
    count_token_activations,
    estimate_memory,
    read_base_model,
)

GIB = 2**30
CARDS = (16, 24, 32, 40, 48, 64, 80, 96, 141, 180)
"""Common GPU memory sizes, in GiB."""
CONTEXT = 1.0 * GIB
"""Bytes of the driver's context and workspaces of a process on a GPU: an estimate, not measured."""
SERVER_WORK = 2.0 * GIB
"""Bytes that a vLLM server holds beside weights and cache, CUDA graphs included: an estimate, not measured."""
FEWEST_TOKENS, MOST_TOKENS = 2048, 65_536
"""Bounds of micro-batches that ``optim.micro_batch_tokens = "auto"`` fits to a GPU. Fewer tokens would leave the GPU
waiting for Python, more make nothing faster."""
SPARE = 2.0
"""Safety factor: ``"auto"`` reserves this multiple of the estimated memory of activations."""


@dataclass(frozen=True, slots=True)
class CardUse:
    """Memory that a run needs on one GPU, in bytes."""

    resting_bytes: float
    """Bytes that the trainer holds while the engine samples: weights and optimizer."""
    fixed_bytes: float
    """Bytes that the trainer holds in an update, whatever the size of its micro-batches."""
    token_bytes: float
    """Bytes per token of a micro-batch."""
    update_bytes: float
    """Bytes that the trainer holds in an update with full micro-batches."""
    least_bytes: float
    """Bytes that the trainer holds in an update whose micro-batches are single completions."""
    cache_bytes: float
    """Bytes that an engine in the trainer's process holds while it samples; 0: vLLM servers sample."""
    num_servers: int
    """Number of vLLM servers beside the trainer; 0: the engine runs in the trainer's process."""
    memory_frac: float
    """Share of the GPU's memory that all servers together take (``engine.memory_frac``)."""
    server_bytes: float
    """Fewest bytes that one server needs: weights, and the cache of one completion that fills the context window."""
    in_turn: bool
    """Whether the engine releases its memory for the update."""

    def fits_server(self, card: float) -> bool:
        """Whether each server's share of a GPU of ``card`` bytes holds what it needs."""
        return self.num_servers == 0 or self.memory_frac * card / self.num_servers >= self.server_bytes

    def find_room(self, card: float) -> float:
        """The number of bytes that a GPU of ``card`` bytes leaves for an update."""
        return card if self.in_turn else card * (1.0 - self.memory_frac) - self.cache_bytes

    def count_tokens(self, card: float) -> float:
        """The number of tokens of a micro-batch for which a GPU of ``card`` bytes has room."""
        return (self.find_room(card) - self.fixed_bytes) / self.token_bytes

    def fits(self, card: float) -> bool:
        """Whether trainer and engine can use a GPU of ``card`` bytes; micro-batches may have to be smaller."""
        beside = self.memory_frac * card if self.num_servers else self.cache_bytes
        has_room = self.least_bytes <= self.find_room(card) and self.resting_bytes + beside <= card
        return has_room and self.fits_server(card)

    def find_card(self) -> int | None:
        """The smallest GPU that the run fits with full micro-batches, in GiB; None if there is none."""
        fitting = (gib for gib in CARDS if self.fits(gib * GIB) and self.update_bytes <= self.find_room(gib * GIB))
        return next(fitting, None)


def estimate_card(
    config: RunConfig, dtype_bytes: int, engine: EnginePlugin, prompt_tokens: int | None = None
) -> CardUse:
    """The memory of a run in one process on its GPU, with the servers of ``engine`` if it is vLLM.

    ``prompt_tokens``: as in :func:`magrpo.planning.sizes.estimate_memory`.
    Raises ConfigError if the configuration of a base model cannot be read.
    """
    sizes = estimate_memory(config, dtype_bytes, count_decoded_at_once(engine), prompt_tokens)
    cache_bytes = sum(sizes.pop(purpose, 0.0) for purpose in SAMPLING)
    update_bytes = sum(sizes.values()) + CONTEXT
    fixed_bytes = update_bytes - sizes[ACTIVATIONS_OF]
    completion = (prompt_tokens or config.rollout.max_new_tokens) + config.rollout.max_new_tokens
    use = CardUse(
        resting_bytes=update_bytes - sum(sizes.get(purpose, 0.0) for purpose in UPDATING),
        fixed_bytes=fixed_bytes,
        token_bytes=sizes[ACTIVATIONS_OF] / count_micro_batch_tokens(config, prompt_tokens),
        update_bytes=update_bytes,
        least_bytes=fixed_bytes + completion * count_token_activations(config, dtype_bytes),
        cache_bytes=cache_bytes,
        num_servers=0,
        memory_frac=0.0,
        server_bytes=0.0,
        in_turn=not config.train.lag,
    )
    if not isinstance(engine, VllmEngine):
        return use
    models = [read_base_model(agent, config) for agent in config.agents]
    adapters = sum(model.adapter_parameters for model in models) * (config.train.lag + 1)
    parameters = max(model.num_parameters for model in models) + adapters
    window = max(model.token_cache * model.window for model in models)
    return replace(
        use,
        cache_bytes=0.0,
        num_servers=count_models(config.agents),  # each model has one
        memory_frac=engine.memory_frac,
        server_bytes=(parameters + window) * dtype_bytes + SERVER_WORK,
    )


def count_decoded_at_once(engine: EnginePlugin) -> int | None:
    """The number of completions of an agent that an engine in the run's own process decodes at once; None: vLLM's
    servers decode, or the engine does not say."""
    return engine.max_batch if isinstance(engine, HasMaxBatch) and not isinstance(engine, VllmEngine) else None


def choose_engine(config: RunConfig, device: torch.device) -> EnginePlugin:
    """The engine that will sample, where the configuration leaves the choice to ``auto``."""
    if isinstance(config.engine, AutoEngine):
        return config.engine.choose_engine(config.agents, config.model, config.lora, device)
    return config.engine


def settle_micro_batches(config: RunConfig, dtype_bytes: int, card: float) -> RunConfig:
    """The configuration with a number for ``optim.micro_batch_tokens = "auto"``, for a GPU of ``card`` bytes.

    The number depends on the whole memory of the GPU, not on what is free, so that a run that is resumed on the same
    kind of GPU computes the same bits. Raises ConfigError if the configuration of a base model cannot be read.
    """
    if config.optim.micro_batch_tokens != "auto":
        return config
    use = estimate_card(config, dtype_bytes, choose_engine(config, torch.device("cuda")))
    fitting = use.count_tokens(card) / SPARE
    tokens = min(max(_round_down(fitting), FEWEST_TOKENS), MOST_TOKENS)
    return config.model_copy(update={"optim": config.optim.model_copy(update={"micro_batch_tokens": tokens})})


def _round_down(count: float) -> int:
    """The largest power of two that does not exceed ``count``, at least 1."""
    return 1 << max(int(count).bit_length() - 1, 0)
