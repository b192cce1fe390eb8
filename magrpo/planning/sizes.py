"""Sizes of a run known before it begins: upper bounds of an iteration's work, and memory by purpose."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf, log2
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from magrpo.assets import locate_model
from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig, trained_holders, weight_holders
from magrpo.config.run import RunConfig, count_levels
from magrpo.config.sections import RolloutConfig
from magrpo.engines.local.llama_steps import KNOWN_MODELS
from magrpo.errors import ConfigError, quote_error
from magrpo.interfaces import HasHiddenTests, HasMaxExecutions
from magrpo.model.collate import ROW_TOKENS, collate, make_probe_sample
from magrpo.model.forward import hidden_states, takes_positions
from magrpo.model.lineup import UNLOADABLE, device_of, load_pretrained, read_sizes
from magrpo.model.policy import add_adapter
from magrpo.model.rounding import list_untied_layers
from magrpo.model.side_by_side import count_updated_at_once
from magrpo.run.steps import evaluates_after
from magrpo_kernels.hidden import slice_chunks

ACTIVATIONS = 32
"""Numbers that an update holds per token, layer and hidden unit, of models that do not run on meta tensors.

Measured: 31 for Llama models in float32 on a CPU. Section 4.1 of arXiv 2205.05198 counts 17 for a GPT layer, without
attention scores: a gated feed-forward and rotary positions keep more.
"""

LIKE_LAYERS = (LlamaConfig, Qwen2Config, Qwen3Config)
"""Configurations of models each of whose layers keeps as much for the backward pass as every other."""
RECORD_BYTES = 50
"""Bytes of a sampled token in the files of rollout, score and credit; measured: 28 in large batches, 110 in tiny."""
SUPPORT_BYTES = 7
"""Bytes of each id of a token's support (``rollout.keep_support``) in the files of rollout and credit."""
POLICY = ("frozen parameters", "adapters", "full copies")
"""Purposes of memory of every policy; the others are those of updates and sampling."""
ACTIVATIONS_OF = "activations of a micro-batch"
"""Purpose of the memory of an update that ``optim.micro_batch_tokens`` decides about."""
GRADIENTS = "gradients of the agents that are computed at once"
KV_CACHE, SECOND_POLICY = "KV cache of completions", "second policy, for sampling"
"""Purposes of memory of an engine in the run's own process; the second policy is there with ``train.lag``."""
MERGED = "weights with merged adapters"
"""Purpose of memory of a float32 engine in the run's own process: the copies that
:func:`magrpo.engines.local.decoding.decoding_model` makes."""
ROUNDED, ROUNDED_SAMPLING = "half-precision weights of a full copy", "half-precision weights of sampled full copies"
"""Purposes of memory for what autocast keeps of the float32 weights of full copies: in an update until the backward
pass, and in an engine in the run's own process as long as it samples."""
SAMPLING = (KV_CACHE, MERGED, ROUNDED_SAMPLING)
"""Purposes of the memory that only an engine in the run's own process holds, while it samples."""
UPDATING = (GRADIENTS, ROUNDED, ACTIVATIONS_OF, "logits")
"""Purposes of the memory that only an update holds."""


@dataclass(frozen=True, slots=True)
class IterationSize:
    """Upper bounds for one iteration: no episode ends early, every completion has the maximal length."""

    completions: int
    tokens: int
    joint_actions: int
    programs: int | None
    """Runs in the sandbox, equal programs counted each time; None if the reward does not declare it."""


def estimate_work(config: RunConfig) -> IterationSize:
    """Count the nodes of all trees of an iteration, if no episode ends early."""
    rollout = config.rollout
    num_problems = rollout.problems_per_iteration
    completions, joint_actions = (count * num_problems for count in _count_samples(rollout, config))
    scored = joint_actions
    if rollout.probe_size is not None:
        probing = rollout.model_copy(update={"group_size": rollout.probe_size})
        probe_completions, probe_joint_actions = _count_samples(probing, config)
        spare = (rollout.max_draws - 1) * num_problems
        completions += spare * probe_completions
        joint_actions += spare * probe_joint_actions
        # The programs of a probe run when it is judged, and again as part of its group.
        scored = joint_actions + num_problems * probe_joint_actions
    programs = None
    if isinstance(config.reward, HasMaxExecutions):
        has_hidden_tests = isinstance(config.problems, HasHiddenTests) and config.problems.hidden_tests
        programs = scored * config.reward.max_executions * (2 if has_hidden_tests else 1)
    return IterationSize(completions, completions * rollout.max_new_tokens, joint_actions, programs)


def _count_samples(rollout: RolloutConfig, config: RunConfig) -> tuple[int, int]:
    """The completions and the joint actions in the tree of a problem."""
    completions, joint_actions = zip(*count_levels(rollout, config.count_acting()), strict=True)
    return sum(completions), sum(joint_actions)


@dataclass(frozen=True, slots=True)
class BaseSize:
    """Sizes of one base model, without its weights."""

    num_parameters: int
    outer_parameters: int
    """Parameters of the embeddings and the head."""
    untied_linear_parameters: int
    """Parameters in the weights of linear layers, except a head that is tied to the embeddings."""
    adapter_parameters: int
    """Parameters of the adapter of one agent."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    window: int
    """Tokens of the context window."""
    token_cache: int
    """Numbers that the key-value cache holds for a token."""
    has_own_steps: bool
    """Whether the engine decodes the family with steps of its own, in which, on a CPU in float32, siblings read one
    cache of their prompt."""

    @property
    def layer_parameters(self) -> int:
        """The number of parameters between the embeddings and the head."""
        return self.num_parameters - self.outer_parameters

    def count_own(self, agent: AgentConfig) -> int:
        """The number of parameters that an agent of this base may train: those of its full copy or of its adapter."""
        return self.num_parameters if agent.weights == "full" else self.adapter_parameters

    @property
    def rounded_parameters(self) -> int:
        """The number of parameters of a full copy that autocast rounds: those of the layers and the head."""
        return self.layer_parameters + self.vocab_size * self.hidden_size

    def count_reference(self, dtype_bytes: int) -> int:
        """Bytes of the frozen reference of a full copy, of which only linear layers are in half precision."""
        return self.untied_linear_parameters * dtype_bytes + (self.num_parameters - self.untied_linear_parameters) * 4


def estimate_memory(
    config: RunConfig, dtype_bytes: int, max_batch: int | None, prompt_tokens: int | None = None
) -> dict[str, float]:
    """Bytes by purpose. Models are built without weights: only their configurations are read.

    ``max_batch`` completions are decoded at once by an engine in this process, which with ``train.lag`` has a policy of
    its own; None: the engine and its memory are elsewhere. ``prompt_tokens``: the longest prompt, to which others are
    padded; None: prompts are as long as completions.
    Raises ConfigError if the configuration of a base model cannot be read.
    """
    prompt_tokens = prompt_tokens or config.rollout.max_new_tokens
    sizes = _estimate_policy(config, dtype_bytes) | _estimate_update(config, dtype_bytes, prompt_tokens)
    if max_batch is not None:
        sizes |= _estimate_sampling(config, dtype_bytes, max_batch, prompt_tokens)
        if config.train.lag:
            sizes[SECOND_POLICY] = sum(sizes[purpose] for purpose in POLICY)
    return {purpose: float(size) for purpose, size in sizes.items() if size}


def _estimate_policy(config: RunConfig, dtype_bytes: int) -> dict[str, float]:
    """Bytes of the policies of all agents, and of their references."""
    apart = _size_holders(config)
    adapted = [(agent.model, size) for agent, size in apart if agent.weights != "full"]
    full = [(agent.model, size) for agent, size in apart if agent.weights == "full"]
    layer_bytes = 2 if config.model.dtype == "mixed" else dtype_bytes
    # Agents of one model share the frozen base of their adapters, or the reference of their full copies.
    size_of_base, size_of_reference = dict(adapted), dict(full)
    frozen = 0
    for size in size_of_base.values():
        frozen += size.layer_parameters * layer_bytes + size.outer_parameters * dtype_bytes
    if config.algo.beta > 0 or config.trains_critics:
        frozen += sum(size.count_reference(dtype_bytes) for size in size_of_reference.values())
    return {
        "frozen parameters": frozen,
        "adapters": sum(size.adapter_parameters for _, size in adapted) * 4,
        "full copies": sum(size.num_parameters for _, size in full) * 4,
    }


def _estimate_update(config: RunConfig, dtype_bytes: int, prompt_tokens: int) -> dict[str, float]:
    """Bytes that an update holds beside the policies, optimizers included."""
    apart = _size_holders(config)
    holders = [agent for agent, _ in apart if agent.trained]
    trained = [size.count_own(agent) for agent, size in apart if agent.trained]
    device = find_planned_device(config.model).type
    at_once = count_updated_at_once(holders, device, torch.get_num_threads())
    # Several lanes: the gradient of a lane, its copy, and a sum for each level of the tree in which lanes are added.
    gradients = 1 if config.optim.lanes == 1 else 2 + log2(config.optim.lanes)
    num_tokens = count_micro_batch_tokens(config, prompt_tokens)
    mask_bytes = min(ROW_TOKENS, num_tokens) * dtype_bytes  # of a token, in the longest row
    logit_bytes = dtype_bytes
    if config.model.head_dtype == "float32" and dtype_bytes < 4:
        logit_bytes += 4  # float32 logits, and their gradient in half precision
    rounded = [size.rounded_parameters for agent, size in apart if agent.trained and agent.weights == "full"]
    return {
        GRADIENTS: sum(sorted(trained)[-at_once:]) * 4 * gradients,
        "optimizer": sum(trained) * 8,
        ROUNDED: max(rounded, default=0) * dtype_bytes if dtype_bytes == 2 else 0,
        ACTIVATIONS_OF: at_once * num_tokens * (count_token_activations(config, dtype_bytes) + mask_bytes),
        "logits": at_once * max(_count_logits(agent, size, num_tokens, logit_bytes, device) for agent, size in apart),
    }


def _estimate_sampling(config: RunConfig, dtype_bytes: int, max_batch: int, prompt_tokens: int) -> dict[str, float]:
    """Bytes that an engine in the run's own process holds beside its policy while it samples."""
    apart = _size_holders(config)
    device = find_planned_device(config.model).type
    side_by_side = len(config.agents) if device == "cpu" else 1
    may_share = device == "cpu" and dtype_bytes == 4
    caches = [
        size.token_cache
        * _count_cached_tokens(config, max_batch, prompt_tokens, shares=may_share and size.has_own_steps)
        for _, size in apart
    ]
    sizes = {KV_CACHE: side_by_side * max(caches) * dtype_bytes}
    if dtype_bytes == 2:
        rounded = [size.rounded_parameters for agent, size in apart if agent.weights == "full"]
        sizes[ROUNDED_SAMPLING] = sum(sorted(rounded)[-side_by_side:]) * dtype_bytes
    elif config.model.dtype != "mixed":
        # An agent that shares its adapter is decoded with a copy of its own, too.
        adapted = [agent for agent in config.agents if agent.weights != "full"]
        merged = [read_base_model(agent, config).layer_parameters for agent in adapted]
        sizes[MERGED] = sum(sorted(merged)[-side_by_side:]) * 4
    return sizes


def _size_holders(config: RunConfig) -> list[tuple[AgentConfig, BaseSize]]:
    """The agents with weights of their own, each with the sizes of its base model."""
    holder = weight_holders(config.agents)
    return [(agent, read_base_model(agent, config)) for agent in config.agents if holder[agent.name] == agent.name]


def sum_held_at_once(sizes: Mapping[str, float], *, overlapping: bool) -> float:
    """The most bytes of :func:`estimate_memory` that are held at the same time.

    The engine frees its memory before an update, and the update before the engine samples again, unless they are
    ``overlapping``, as with ``train.lag``.
    """
    sampling, updating = (sum(sizes.get(purpose, 0.0) for purpose in purposes) for purposes in (SAMPLING, UPDATING))
    return sum(sizes.values()) - (0.0 if overlapping else min(sampling, updating))


def estimate_disk(config: RunConfig, *, copies: bool) -> dict[str, float]:
    """Bytes on disk by purpose, of a whole run; problems, evaluations and reports are not counted.

    ``copies``: whether MLflow's copies of weights and records are on this disk, too. Raises as :func:`estimate_memory`.
    """
    length = config.train.num_iterations
    sizes = {agent.name: read_base_model(agent, config).count_own(agent) for agent in config.agents}
    trained = sum(sizes[name] for name in trained_holders(config.agents))
    evaluated = [i for i in range(length + 1) if evaluates_after(config, i)]
    newest = range(max(length - config.train.lag, 0), length + 1)
    kept = len({*evaluated, *newest}) if config.train.keep_weights == "evaluated" else length + 1
    with_states = {*evaluated, length} - {0}
    weights = sum(sizes.values()) * 4
    support = SUPPORT_BYTES * config.rollout.top_k if config.rollout.keep_support else 0
    records = estimate_work(config).tokens * (RECORD_BYTES + support) * length
    copied = weights * len(evaluated) + records if copies else 0
    found = {
        f"weights of {kept} checkpoints": weights * kept,
        f"optimizer states of {len(with_states)}": trained * 8 * len(with_states),
        "completions, rewards and samples": records,
        "copies for MLflow": copied,
    }
    return {purpose: float(size) for purpose, size in found.items() if size}


def _count_cached_tokens(config: RunConfig, max_batch: int, prompt_tokens: int, *, shares: bool) -> float:
    """The most tokens that one agent's cache holds, in an iteration or in an evaluation.

    If siblings share their prompt's cache, it is there once. Without ``eval.max_problems`` evaluations fill a batch.
    """
    sampled = estimate_work(config).completions // len(config.agents)
    evaluated_each = 1 + config.eval.num_samples  # greedy and sampled
    evaluated = inf if config.eval.max_problems is None else config.eval.max_problems * evaluated_each
    # Behind the first turn every chain, and every evaluated trajectory, has a prompt of its own.
    has_later = config.env.num_turns > 1
    siblings_sampled = 1 if has_later and config.rollout.tree == "chains" else config.rollout.group_size
    siblings_evaluated = 1 if has_later else evaluated_each
    found = []
    for completions, siblings in ((sampled, siblings_sampled), (evaluated, siblings_evaluated)):
        rows = min(max_batch, completions)
        prompts = rows / siblings if shares else rows
        found.append(prompts * prompt_tokens + rows * config.rollout.max_new_tokens)
    return max(found)


def count_micro_batch_tokens(config: RunConfig, prompt_tokens: int | None = None) -> int:
    """Tokens of the largest micro-batch: at most a lane's share of an agent's, but at least a prompt and a completion.

    ``prompt_tokens``: as in :func:`estimate_memory`.
    """
    holder = weight_holders(config.agents)
    completions = estimate_work(config).completions // len(config.agents) * max(Counter(holder.values()).values())
    longest = (prompt_tokens or config.rollout.max_new_tokens) + config.rollout.max_new_tokens
    share = completions * longest // config.optim.lanes
    return max(min(config.optim.count_micro_batch_tokens(find_planned_device(config.model).type), share), longest)


def find_planned_device(model: ModelConfig) -> torch.device:
    """The device for the weights of policies. A run for a GPU can be planned on a machine without one."""
    return torch.device("cuda") if model.device == "cuda" else device_of(model)


def count_token_activations(config: RunConfig, dtype_bytes: int) -> float:
    """Bytes that a token of a micro-batch holds until backward: the most of all trained agents.

    Counted in forward passes on meta tensors, without attention scores, which no fast kernel keeps. Autocast, in which
    full copies of half precision run, does not work there: what they keep counts as half in bfloat16, half in float32.
    """
    found = []
    for agent in filter(lambda agent: agent.trained, config.agents):
        dtypes = [torch.bfloat16 if dtype_bytes == 2 else torch.float32]
        if dtype_bytes == 2 and agent.weights == "full":
            dtypes.append(torch.float32)
        first, size = _find_first(agent, config), read_base_model(agent, config)
        each = fmean(_measure_pass(first, config.lora, dtype) for dtype in dtypes)
        input_bytes = size.num_layers * size.hidden_size * max(dtype.itemsize for dtype in dtypes)
        found.append(input_bytes + each / size.num_layers if config.optim.gradient_checkpointing else each)
    return max(found)


@lru_cache(maxsize=16)
def _measure_pass(agent: AgentConfig, lora: LoraConfig, dtype: torch.dtype) -> float:
    """Bytes that a token holds until backward if nothing is computed again."""
    described = _read_description(agent)
    if type(described) not in LIKE_LAYERS:
        return _measure_model_pass(_build_model(agent, lora, dtype))
    one, two = (_measure_model_pass(_build_model(agent, lora, dtype, num_layers)) for num_layers in (1, 2))
    return one + (int(described.num_hidden_layers) - 1) * (two - one)


def _measure_model_pass(model: PreTrainedModel) -> float:
    """As :func:`_measure_pass`, with all layers of ``model``."""
    try:
        per_token_64, per_token_128 = (_count_kept(model, length) / length for length in (64, 128))
    except RuntimeError:  # its forward pass depends on values
        text = model.config.get_text_config()
        return float(ACTIVATIONS * text.num_hidden_layers * text.hidden_size * model.dtype.itemsize)
    # The bytes of a token are a + b * length. Attention scores and masks, which fast kernels do not keep, grow with the
    # square of the length and make up b. The line through both measurements is a at length 0.
    return 2 * per_token_64 - per_token_128


def _count_kept(model: PreTrainedModel, length: int) -> int:
    """Bytes that a forward pass over ``length`` tokens keeps for backward, beside weights."""
    # ``_cdata`` is private: torch 2.13 has no other name for a storage on the device "meta", where addresses are 0.
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage()._cdata, tensor)

    # One row of ``length`` inputs: a prompt of 8 tokens, and each completion without its last token. Models that take
    # positions pack several completions into a row, so they get two.
    prompt, completion_lengths = (0,) * 8, [length - 7]
    if takes_positions(model):
        completion_lengths = [length // 2, length - length // 2 - 6]
    samples = [make_probe_sample(prompt, (0,) * tokens) for tokens in completion_lengths]
    batch = collate(samples, [tuple(range(len(samples)))], torch.device("meta"))
    assert batch.input_ids.shape == (1, length)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        hidden_states(model, batch)
    sizes: list[int] = [tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in weights]
    return sum(sizes)


def _count_logits(agent: AgentConfig, size: BaseSize, num_tokens: int, logit_bytes: int, device: str) -> int:
    """Bytes of one chunk of logits and, if the head trains, of its gradient beside that of the whole model."""
    trains_head = agent.weights == "full"
    rows: int = slice_chunks(num_tokens, size.vocab_size, torch.device(device), trains_head=trains_head)[0].stop
    gradient = size.vocab_size * size.hidden_size * 4 if trains_head else 0
    return rows * size.vocab_size * logit_bytes + gradient


def read_base_model(agent: AgentConfig, config: RunConfig) -> BaseSize:
    """The sizes of an agent's base model. Raises ConfigError if its configuration cannot be read."""
    return _measure_model(_find_first(agent, config), config.lora)


def _find_first(agent: AgentConfig, config: RunConfig) -> AgentConfig:
    """The first agent with the same model and kind of weights, so that the caches below build each kind once."""
    wanted = agent.model, agent.weights == "full"
    return next(other for other in config.agents if (other.model, other.weights == "full") == wanted)


@lru_cache(maxsize=16)
def _measure_model(agent: AgentConfig, lora: LoraConfig) -> BaseSize:
    model = _build_model(agent, lora, torch.float32)
    adapters = sum(parameter.numel() for name, parameter in model.named_parameters() if ".lora_" in name)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    text = model.config.get_text_config()
    window, vocab_size = read_sizes(agent, model.config)
    return BaseSize(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()) - adapters,
        outer_parameters=sum(parameter.numel() for parameter in {*embeddings.parameters(), *head.parameters()}),
        untied_linear_parameters=sum(layer.weight.numel() for layer in list_untied_layers(model)) - adapters,
        adapter_parameters=adapters,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=vocab_size,
        window=window,
        token_cache=_count_cached(text),
        has_own_steps=type(model) in KNOWN_MODELS,
    )


def _count_cached(text: PreTrainedConfig) -> int:
    """Count the numbers that the key-value cache holds for a token: 0 for models without attention, such as Mamba."""
    query_heads = getattr(text, "num_attention_heads", None)
    if query_heads is None:
        return 0
    heads = getattr(text, "num_key_value_heads", None) or query_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    return int(2 * text.num_hidden_layers * heads * width)


def _build_model(
    agent: AgentConfig, lora: LoraConfig, dtype: torch.dtype, num_layers: int | None = None
) -> PreTrainedModel:
    """The agent's model on meta tensors, its adapter included, or only its first layers.

    Raises ConfigError if it cannot be made.
    """
    described = _read_description(agent)
    if num_layers is not None:
        described.num_hidden_layers = num_layers
    with torch.device("meta"):
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(described, dtype=dtype)  # type: ignore[no-untyped-call]
        except UNLOADABLE as error:
            raise ConfigError(f"agent {agent.name!r}: {agent.model!r} cannot be built: {quote_error(error)}") from error
        if agent.weights != "full":
            model.requires_grad_(False)
            add_adapter(model, None, _locate_base(agent), lora, 0)
    return nn.Module.train(model, False)


def _read_description(agent: AgentConfig) -> PreTrainedConfig:
    described: PreTrainedConfig = load_pretrained(AutoConfig, "the configuration of", _locate_base(agent))
    return described


def _locate_base(agent: AgentConfig) -> AgentConfig:
    return agent.model_copy(update={"model": locate_model(agent.model)})
