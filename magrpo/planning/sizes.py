"""Sizes of a run known before it begins: upper bounds of an iteration's work, and memory by purpose."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from magrpo.assets import locate_model
from magrpo.config import AgentConfig, RunConfig, count_levels, weight_holders
from magrpo.interfaces import HasHiddenTests, HasMaxExecutions
from magrpo.layout import evaluates_after
from magrpo.lineup import UNLOADABLE, device_of, load_pretrained
from magrpo.plugins import ConfigError, quote_error

ACTIVATIONS = 32
"""Numbers that an update holds per token, layer and hidden unit: the slope of its peak memory over the tokens.

Measured: 31 for Llama models in float32 on a CPU, adapters and full copies alike. Section 4.1 of arXiv 2205.05198
counts 17 for a GPT layer, without attention scores: a gated feed-forward and rotary positions keep more.
"""


RECORD_BYTES = 50
"""Bytes of a sampled token in the files of rollout, score and credit; measured: 28 in large batches, 110 in tiny."""
POLICY = ("frozen parameters", "adapters", "full copies")
"""Purposes of memory of every policy; the others are those of updates and sampling."""
KV_CACHE, SECOND_POLICY = "KV cache of completions", "second policy, which samples"
"""Purposes of memory of an engine in the run's own process; the second policy is there with ``train.lag``."""


@dataclass(frozen=True, slots=True)
class Work:
    """Upper bounds for one iteration: no episode ends early, every completion has the maximal length."""

    completions: int
    tokens: int
    joint_actions: int
    programs: int | None
    """Runs in the sandbox, equal programs counted each time; None if the reward does not declare it."""


def estimate_work(config: RunConfig) -> Work:
    """Count the nodes of all trees of an iteration, if no episode ends early."""
    rollout, turns = config.rollout, range(config.env.num_turns)
    levels = list(count_levels(rollout, (len(config.env.acting(turn)) for turn in turns)))
    completions, joint_actions = (sum(counts) * rollout.problems_per_iteration for counts in zip(*levels, strict=True))
    programs = None
    if isinstance(config.reward, HasMaxExecutions):
        has_hidden_tests = isinstance(config.problems, HasHiddenTests) and config.problems.hidden_tests
        programs = joint_actions * config.reward.max_executions * (2 if has_hidden_tests else 1)
    return Work(completions, completions * rollout.max_new_tokens, joint_actions, programs)


@dataclass(frozen=True, slots=True)
class BaseSize:
    """Sizes of one base model, without its weights."""

    num_parameters: int
    outer_parameters: int
    """Those of embeddings and head."""
    adapter_parameters: int
    token_units: int
    """Hidden units of all layers."""
    token_cache: int
    """Numbers that the key-value cache holds for a token."""


def estimate_memory(
    config: RunConfig, dtype_bytes: int, max_batch: int | None, num_shards: int = 1
) -> dict[str, float]:
    """Bytes by purpose. Models are built without weights: only their configurations are read.

    ``max_batch`` completions are decoded at once by an engine in this process, which with ``train.lag`` has a policy of
    its own; None: the engine and its memory are elsewhere. ``num_shards`` ranks share layers and full copies.
    Raises ConfigError if the configuration of a base model cannot be read.
    """
    models = {agent.model: read_base_model(agent, config) for agent in config.agents}
    holder = weight_holders(config.agents)
    apart = [agent for agent in config.agents if holder[agent.name] == agent.name]
    adapted = [agent.model for agent in apart if agent.weights != "full"]
    full = [agent.model for agent in apart if agent.weights == "full"]
    references = set(full) if config.algo.beta > 0 else set()
    trained = [
        models[agent.model].num_parameters / num_shards
        if agent.weights == "full"
        else models[agent.model].adapter_parameters
        for agent in apart
        if agent.trained
    ]
    per_token = max(model.token_units for model in models.values()) * ACTIVATIONS * dtype_bytes
    frozen = [models[name] for name in [*set(adapted), *references]]
    layers = sum(model.num_parameters - model.outer_parameters for model in frozen)
    sizes = {
        "frozen parameters": (layers / num_shards + sum(model.outer_parameters for model in frozen)) * dtype_bytes,
        "adapters": sum(models[name].adapter_parameters for name in adapted) * 4,
        "full copies": sum(models[name].num_parameters for name in full) / num_shards * 4,
        "gradients of one agent": max(trained) * 4,
        "optimizer": sum(trained) * 8,
        "activations": _count_micro_batch_tokens(config, holder) * per_token,
    }
    if max_batch is not None:
        at_once = min(max_batch, estimate_work(config).completions // len(config.agents))
        token_bytes = max(model.token_cache for model in models.values()) * dtype_bytes
        side_by_side = len(config.agents) if _find_device(config) == "cpu" else 1
        sizes[KV_CACHE] = side_by_side * at_once * config.rollout.max_new_tokens * token_bytes
        if config.train.lag:
            sizes[SECOND_POLICY] = sum(sizes[purpose] for purpose in POLICY)
    return {purpose: float(size) for purpose, size in sizes.items() if size}


def estimate_disk(config: RunConfig, *, copies: bool) -> dict[str, float]:
    """Bytes on disk by purpose, of a whole run; problems, evaluations and reports are not counted.

    ``copies``: whether MLflow's copies of weights and records are on this disk, too. Raises as :func:`estimate_memory`.
    """
    models = {agent.model: read_base_model(agent, config) for agent in config.agents}
    length, optim = config.train.num_iterations, config.optim
    sizes = {
        agent.name: models[agent.model].num_parameters
        if agent.weights == "full"
        else models[agent.model].adapter_parameters
        for agent in config.agents
    }
    holders = set(weight_holders(config.agents).values())
    trained = sum(sizes[agent.name] for agent in config.agents if agent.trained and agent.name in holders)
    evaluated = [i for i in range(length + 1) if evaluates_after(config, i)]
    newest = range(max(length + 1 - max(optim.keep, config.train.lag + 1), 0), length + 1)
    kept = len({*evaluated, *newest}) if config.train.keep_weights == "evaluated" else length + 1
    with_states = {*evaluated, *range(max(length + 1 - optim.keep, 0), length + 1)} - {0}
    weights = sum(sizes.values()) * 4
    records = estimate_work(config).tokens * RECORD_BYTES * length
    found = {
        f"weights of {kept} checkpoints": weights * kept,
        f"optimizer states of {len(with_states)}": trained * 8 * len(with_states),
        "completions, rewards and samples": records,
        "copies for MLflow": (weights * len(evaluated) + records) * copies,
    }
    return {purpose: float(size) for purpose, size in found.items() if size}


def _count_micro_batch_tokens(config: RunConfig, holder: Mapping[str, str]) -> int:
    """Tokens of the largest micro-batch: a lane has a share of an agent's; prompts as long as completions at most."""
    completions = estimate_work(config).completions // len(config.agents) * max(Counter(holder.values()).values())
    share = 2 * completions * config.rollout.max_new_tokens // config.optim.lanes
    return max(min(config.optim.count_micro_batch_tokens(_find_device(config)), share), 1)


def _find_device(config: RunConfig) -> str:
    """The type of the run's device. A run for a GPU can be planned on a machine without one."""
    return "cuda" if config.model.device == "cuda" else device_of(config.model).type


def read_base_model(agent: AgentConfig, config: RunConfig) -> BaseSize:
    """The sizes of an agent's base model. Raises ConfigError if its configuration cannot be read."""
    located = agent.model_copy(update={"model": locate_model(agent.model)})
    described = load_pretrained(AutoConfig, "the configuration of", located)
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(described)  # type: ignore[no-untyped-call]
        except UNLOADABLE as error:
            raise ConfigError(f"agent {agent.name!r}: {agent.model!r} cannot be made: {quote_error(error)}") from error
        num_parameters, adapter_parameters = model.num_parameters(), 0
        outer = {*model.get_input_embeddings().parameters(), *model.get_output_embeddings().parameters()}
        if agent.weights != "full":
            wanted = LoraConfig(r=config.lora.rank, target_modules=list(config.lora.target_modules))
            adapter_parameters, _ = get_peft_model(model, wanted).get_nb_trainable_parameters()
    text = described.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = text.num_hidden_layers
    outer_parameters = sum(parameter.numel() for parameter in outer)
    cache = 2 * layers * heads * width
    return BaseSize(num_parameters, outer_parameters, adapter_parameters, layers * text.hidden_size, cache)
