"""What a run will take: tokens, programs, memory and time, from its configuration and from earlier runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from magrpo.config import AgentConfig, RunConfig, weight_holders
from magrpo.interfaces import HasHiddenTests, HasMaxExecutions
from magrpo.plugins import ConfigError
from magrpo.store import RunStore

SAME = ("agents", "model", "lora", "problems", "env", "reward", "sandbox", "engine", "rollout", "algo", "optim", "eval")
"""Sections of the configuration that earlier runs must share for their seconds to count."""

ACTIVATIONS = 32
"""Numbers that an update holds for a token, a layer and a hidden unit: the slope of its peak memory over the tokens.

Measured at 31 for Llama models in float32 on a CPU, adapters and full copies alike. Section 4.1 of arXiv 2205.05198
counts 17 for a GPT layer, without attention scores: a gated feed-forward and rotary positions keep more.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """The most that one iteration can do, if no tree ends early and no completion stops by itself."""

    completions: int
    tokens: int
    joint_actions: int
    programs: int | None
    """Runs in the sandbox, equal programs counted each time; None where the reward does not say."""


def work_of(config: RunConfig) -> Work:
    """Count the nodes of all trees of an iteration, turn by turn, if no episode ends early."""
    rollout, nodes = config.rollout, config.rollout.problems_per_iteration
    completions = joint_actions = 0
    for turn in range(config.env.num_turns):
        acting = len(config.env.acting(turn))
        size = 1 if turn and rollout.tree == "chains" else rollout.group_size
        joint = size
        if rollout.joint_mode == "crossed":
            joint = min(size**acting, rollout.crossed_pairs or size**acting)
        completions += nodes * size * acting
        joint_actions += nodes * joint
        nodes *= 1 if rollout.tree in ("best", "random") else min(joint, rollout.branching or joint)
    each = config.reward.max_executions if isinstance(config.reward, HasMaxExecutions) else None
    tests = 2 if isinstance(config.problems, HasHiddenTests) and config.problems.hidden_tests else 1
    programs = None if each is None else joint_actions * each * tests
    return Work(completions, completions * rollout.max_new_tokens, joint_actions, programs)


# -------------------------------------------------------------------------------------------------------------- memory
@dataclass(frozen=True, slots=True)
class _Model:
    """Sizes of one base model, without its weights."""

    parameters: int
    adapter: int
    """Parameters of one adapter."""
    layers: int
    hidden: int
    cache_per_token: int
    """Numbers that the key-value cache holds for a token."""


def memory(config: RunConfig, dtype_bytes: int, max_batch: int | None) -> dict[str, float]:
    """Bytes by what they are for. Models are built without weights, so nothing but their configuration is read.

    ``max_batch`` completions are decoded at once; None leaves the key-value cache out, for an engine with its own.

    Raises:
        ConfigError: the configuration of a base model cannot be read.
    """
    models = {agent.model: _model(agent, config) for agent in config.agents}
    holder = weight_holders(config.agents)
    apart = [agent for agent in config.agents if holder[agent.name] == agent.name]
    lora = [agent.model for agent in apart if agent.weights != "full"]
    full = [agent.model for agent in apart if agent.weights == "full"]
    reference = set(full) if config.algo.beta > 0 else set()
    trained = [
        models[agent.model].parameters if agent.weights == "full" else models[agent.model].adapter
        for agent in apart
        if agent.trained
    ]
    found = {
        "frozen parameters": sum(models[name].parameters for name in [*set(lora), *reference]) * dtype_bytes,
        "adapters": sum(models[name].adapter for name in lora) * 4,
        "full copies": sum(models[name].parameters for name in full) * 4,
        "gradients of one agent": max(trained) * 4,
        "optimizer": sum(trained) * 8,
        "activations": max(m.layers * m.hidden for m in models.values())
        * config.optim.micro_batch_tokens
        * ACTIVATIONS
        * dtype_bytes,
    }
    if max_batch is not None:
        at_once = min(max_batch, work_of(config).completions // len(config.agents))
        per_token = max(model.cache_per_token for model in models.values()) * dtype_bytes
        found["KV cache of completions"] = at_once * config.rollout.max_new_tokens * per_token
    return {name: float(size) for name, size in found.items() if size}


def _model(agent: AgentConfig, config: RunConfig) -> _Model:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from magrpo.assets import locate_model

    try:
        described = AutoConfig.from_pretrained(locate_model(agent.model))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"agent {agent.name!r}: cannot read the configuration of {agent.model!r}: {reason}") from None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described)  # type: ignore[no-untyped-call]
        parameters = sum(p.numel() for p in model.parameters())
        adapter = 0
        if agent.weights != "full":
            wanted = LoraConfig(r=config.lora.rank, target_modules=list(config.lora.target_modules))
            adapted = get_peft_model(model, wanted)
            adapter = sum(p.numel() for name, p in adapted.named_parameters() if ".lora_" in name)
    text = described.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = text.num_hidden_layers
    return _Model(parameters, adapter, layers, text.hidden_size, 2 * layers * heads * width)


# ---------------------------------------------------------------------------------------------------------------- time
def measured(root: Path, config: RunConfig) -> tuple[dict[str, float], int]:
    """Mean seconds of each stage, a level of a tree apart, in the runs of ``root`` that did the same; their number.

    Seconds of the first iteration count too, with the loading that comes before.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    runs = 0
    for path in sorted(root.glob("*/config.json")):
        store = RunStore(root, path.parent.name)
        try:
            if _shared(store.config()) != _shared(config):
                continue
        except ValueError:  # of another version of this project
            continue
        before = sum(map(len, seconds.values()))
        for stage, value in _seconds(store):
            seconds[stage].append(value)
        runs += sum(map(len, seconds.values())) > before
    return {stage: fmean(values) for stage, values in seconds.items()}, runs


def _shared(config: RunConfig) -> Mapping[str, object]:
    shared: dict[str, object] = json.loads(config.model_dump_json(include=set(SAME)))
    return shared


def _seconds(store: RunStore) -> Iterator[tuple[str, float]]:
    for _, stage, metrics in store.stage_metrics():
        yield stage, metrics.get(f"time/{stage.partition('.')[0]}_s", 0.0)
