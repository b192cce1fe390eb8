"""The policies of all agents: models and adapters in one process, and their checkpoints.

Agents with the same base share its frozen tensors in memory. Each has modules of its own over them, with one LoRA
adapter, or one adapter together with all other agents that have ``weights = "shared"``. An agent with ``weights =
"full"`` owns a copy. Trained parameters are always float32; the matrix products of a full copy and of its untrained
reference run in the configured dtype through autocast. Models stay in eval mode (no dropout), so that the trainer
computes the log-probabilities of the distribution that the engine sampled from.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import torch
from peft import PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig, start_weights
from magrpo.errors import ConfigError, list_choices, quote_error, quote_value
from magrpo.model.lineup import Lineup, load_pretrained
from magrpo.model.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_adapter,
    check_whole_model,
    fuse_adapters,
    list_targets,
    make_peft_config,
)
from magrpo.model.rounding import round_linear_layers, round_linear_weights
from magrpo.model.sharding import Shards, gather_weights, spread_like
from magrpo.seeds import derive_seed

ResultT = TypeVar("ResultT")
_MAX_LISTED = 8
"""Largest number of weights that a message names."""
# Drop transformers' table of missing weights: the errors below name them.
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())
_UNUSED_SETTINGS = {"bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp", "use_cache"}
"""Settings of models that do not change what their weights compute; nor do those of dropout, which is off."""


@dataclass(frozen=True)
class _AgentModel:
    model: PreTrainedModel
    """The causal language model: the agent's own copy, or modules over the shared base with the adapter inside."""
    peft: PeftModel | None


@dataclass
class Policy:
    """The policies of all agents. Made by :meth:`open`."""

    lineup: Lineup
    version: int = 0
    """Number of updates of the current weights (0: untrained)."""
    sources: dict[str, Path] | None = None
    """Folders that hold the current weights, by agent, if weights were loaded; None: the weights have changed since."""
    shards: Shards | None = None
    """The ranks over which the models are spread; all of them call the same methods. None: the models are whole."""
    _agents: dict[str, _AgentModel] = field(default_factory=dict)
    _frozen: dict[str, PreTrainedModel] = field(default_factory=dict)

    @classmethod
    def open(cls, agents: Sequence[AgentConfig], model: ModelConfig, lora: LoraConfig, seed: int) -> Policy:
        """Open the policy of these agents: load their lineup, then :meth:`of`."""
        return cls.of(Lineup.open(agents, model, lora), seed)

    @classmethod
    def of(cls, lineup: Lineup, seed: int, shards: Shards | None = None) -> Policy:
        """Load every base once, give each agent its seeded adapter (B = 0) or full copy, and load its ``start_from``.

        With ``shards``, models are read into the memory of the CPU and spread from there. Raises ConfigError if a base,
        trained weights or a target module cannot be used.
        """
        # With a mask, cuDNN's attention gives NaN gradients at lengths of 64 more than a multiple of 128 on an H100 and
        # an H200 (https://github.com/pytorch/pytorch/issues/196678); torch's other kernels do not.
        torch.backends.cuda.enable_cudnn_sdp(False)
        policy = cls(lineup, shards=shards)
        bases: dict[str, PreTrainedModel] = {}
        spread: dict[str, PeftModel] = {}
        for agent in lineup.agents:
            config = lineup.config(agent)
            if lineup.holder(agent) != agent:
                policy._agents[agent] = policy._agents[lineup.holder(agent)]
            elif config.weights == "full":
                causal = policy._load_model(config, torch.float32)
                if shards:
                    shards.spread_model(causal)
                policy._agents[agent] = _AgentModel(causal, None)
            else:
                if config.model not in bases:
                    bases[config.model] = policy._load_model(config, lineup.dtype)
                    if lineup.rounds_layers:
                        round_linear_layers(bases[config.model])
                base = bases[config.model]
                if shards:  # modules can be spread only once, so they hold the adapters of all agents
                    peft = add_adapter(base, spread.get(config.model), config, lineup.lora, seed)
                    spread[config.model] = peft
                else:
                    base = share_tensors(base)
                    peft = add_adapter(base, None, config, lineup.lora, seed)
                policy._agents[agent] = _AgentModel(base, peft)
        if shards:
            for base in bases.values():
                shards.spread_layers(base, {p for name, p in base.named_parameters() if ".lora_" in name})
        policy.load(0, start_weights(lineup.configs))
        return policy

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents, in the order of the config."""
        return self.lineup.agents

    @property
    def device(self) -> torch.device:
        return self.lineup.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of frozen weights and of matrix products."""
        return self.lineup.dtype

    @property
    def shares_no_modules(self) -> bool:
        """Whether threads can run agents with weights of their own at the same time."""
        return self.shards is None

    @contextmanager
    def active(self, agent: str) -> Iterator[PreTrainedModel]:
        """The causal language model with this agent's weights active, ready for forward passes."""
        entry = self._agents[agent]
        adapter = _name_adapter(self.lineup.holder(agent))
        if entry.peft is not None and entry.peft.active_adapter != adapter:  # only in models spread over ranks
            entry.peft.set_adapter(adapter)
        with self._autocast(agent):
            yield entry.model

    @contextmanager
    def reference(self, agent: str) -> Iterator[PreTrainedModel]:
        """The agent's untrained, frozen policy: the base without adapter."""
        entry = self._agents[agent]
        if entry.peft is not None:
            with entry.peft.disable_adapter():
                yield entry.model
            return
        base = self.lineup.base(agent)
        if base not in self._frozen:
            self._frozen[base] = self._load_model(self.lineup.config(agent), torch.float32).requires_grad_(False)
            round_linear_weights(self._frozen[base], self.dtype)
            if self.shards:
                self.shards.spread_layers(self._frozen[base])
        with self._autocast(agent):
            yield self._frozen[base]

    def _autocast(self, agent: str) -> torch.autocast:
        """Let a full copy and its reference multiply in the configured dtype."""
        has_masters = self._agents[agent].peft is None and self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=has_masters)

    def run(self, model: PreTrainedModel, compute: Callable[[PreTrainedModel], ResultT]) -> ResultT:
        """Call ``compute(model)`` inside :meth:`active` or :meth:`reference`; gathers the weights of a spread model."""
        return self.shards.run(model, compute) if self.shards else compute(model)

    def is_spread(self, agent: str) -> bool:
        """Whether the agent's trained parameters, and with them gradients and optimizer, are spread over ranks."""
        return self.shards is not None and self._agents[agent].peft is None

    def parameters(self, agent: str) -> dict[str, nn.Parameter]:
        """The trained parameters, in float32, by the names they are saved under."""
        entry = self._agents[agent]
        if entry.peft is None:
            return dict(entry.model.named_parameters())
        suffix = f".{_name_adapter(self.lineup.holder(agent))}.weight"
        return {
            name.removesuffix(suffix) + ".weight": parameter
            for name, parameter in entry.peft.named_parameters()
            if name.endswith((f".lora_A{suffix}", f".lora_B{suffix}"))
        }

    def clear_gradients(self, agent: str) -> None:
        """Free the gradients of an agent's trained parameters."""
        for parameter in self.parameters(agent).values():
            parameter.grad = None

    def save(self, folder: Path) -> dict[str, Path]:
        """Write each agent's weights into ``folder/<agent>``, as peft or transformers would; returns the folders.

        If models are spread over ranks, all ranks gather the weights and the first writes them.
        """
        folders = {agent: folder / agent for agent in self._agents}
        for agent, target in folders.items():
            entry = self._agents[agent]
            gathered = gather_weights(entry.model) if self.is_spread(agent) else None
            if self.shards and not self.shards.is_first:
                continue
            target.mkdir(parents=True, exist_ok=True)
            if entry.peft is None:
                save_model(entry.model, self.lineup.stop_token_ids(agent), target, gathered)
                self.lineup.tokenizer(agent).save_pretrained(target)
            else:
                tensors = {name: p.detach().contiguous() for name, p in self.parameters(agent).items()}
                save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
                adapter = {
                    **entry.peft.peft_config[_name_adapter(self.lineup.holder(agent))].to_dict(),
                    "inference_mode": True,
                }
                text = json.dumps(adapter, indent=2, sort_keys=True, default=sorted)  # sets in a fixed order
                (target / ADAPTER_CONFIG).write_text(f"{text}\n", encoding="utf-8")
        return folders

    def load(self, version: int, weights: Mapping[str, Path]) -> None:
        """Load, bit for bit, the weights that :meth:`save` wrote.

        Raises ConfigError if a folder is missing, was made for another function or model, or holds numbers that are not
        finite, or if agents that share an adapter are given different ones.
        """
        self.sources = None
        loaded: dict[str, tuple[Path, dict[str, Tensor]]] = {}
        for agent, folder in weights.items():
            parameters = self.parameters(agent)
            stored = self._read_weights(agent, folder)
            self._check_names(agent, folder, stored)
            holder = self.lineup.holder(agent)
            if holder in loaded:
                other, same = loaded[holder]
                if any(not torch.equal(stored[name], same[name]) for name in stored):
                    raise ConfigError(
                        f'{folder}: differs from {other}; agents with weights = "shared" must start from equal weights'
                    )
            loaded[holder] = folder, stored
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(spread_like(stored[name], parameter))
        self.version, self.sources = version, dict(weights)

    def _read_weights(self, agent: str, folder: Path) -> dict[str, Tensor]:
        """Read the tensors in ``folder``. Raises ConfigError if they are not finite or of another architecture."""
        config = self.lineup.config(agent)
        if self.lineup.weights(agent) == "lora":
            check_adapter(folder, config, self.lineup.lora)
            try:
                stored = load_file(folder / ADAPTER_WEIGHTS)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{folder}: cannot read the weights of {agent!r}: {quote_error(error)}") from None
        else:
            check_whole_model(folder, config)
            model = load_base_model(config.model_copy(update={"model": str(folder.absolute())}), torch.float32)
            if difference := _compare_settings(model.config, self._agents[agent].model.config):
                raise ConfigError(
                    f"{folder / 'config.json'}: {difference} in {config.model!r}: these weights were trained from "
                    f"another model; set the model of agent {agent!r} to that one"
                )
            stored = dict(model.named_parameters())
        for name, tensor in stored.items():
            values = tensor.detach().float()
            if not torch.isfinite(values).all():
                kind = "NaN" if values.isnan().any() else "infinities"
                raise ConfigError(
                    f"{folder}: {name} contains {kind}: the training that wrote it diverged; start from an earlier "
                    "checkpoint"
                )
        return stored

    def _check_names(self, agent: str, folder: Path, stored: Mapping[str, Tensor]) -> None:
        """Raise ConfigError if the tensors in ``folder`` and the agent's parameters differ in names or shapes."""
        here = {name: list(parameter.shape) for name, parameter in self.parameters(agent).items()}
        there = {name: list(tensor.shape) for name, tensor in stored.items()}
        differing = [name for name in here | there if here.get(name) != there.get(name)]
        if not differing:
            return
        first = differing[0]
        sizes = f"{there.get(first, 'missing')} there and {here.get(first, 'missing')} here"
        more = f" ({len(differing)} differ)" if len(differing) > 1 else ""
        model = f"set the agent's model to the one that they were trained from, not {self.lineup.base(agent)!r}"
        if self.lineup.weights(agent) == "full":
            remedy = model
        elif set(targets := list_targets(there)) != set(self.lineup.lora.target_modules):
            remedy = f"set lora.target_modules = {json.dumps(targets)}"
        else:
            remedy = f"{model}: {ADAPTER_CONFIG} names it"
        raise ConfigError(f"{folder}: these are not weights of agent {agent!r}: {first} is {sizes}{more}; {remedy}")

    def _load_model(self, config: AgentConfig, dtype: torch.dtype) -> PreTrainedModel:
        model = load_base_model(config, dtype)
        if self.lineup.float32_logits:
            _widen_logits(model, self.dtype)
        nn.Module.to(model, torch.device("cpu") if self.shards else self.device)
        return nn.Module.train(model, False)


def share_tensors(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the modules of a model, but not its parameters and buffers, which the copies share."""
    return deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def load_base_model(config: AgentConfig, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    """Load the base of an agent, ``config.model``, into the memory of the CPU.

    Raises ConfigError if it cannot be loaded or lacks weights, which transformers would draw at random each time.
    """
    model, found = load_pretrained(
        AutoModelForCausalLM,
        "model",
        config,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, with their names
    )
    assert isinstance(model, PreTrainedModel)
    faults = {name: name for name in found["missing_keys"]}
    faults |= {
        name: f"{name} (of shape {list(stored)}, not {list(wanted)})"
        for name, stored, wanted in found["mismatched_keys"]
    }
    if faults:
        listed = [faults[name] for name in sorted(faults)]
        more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
        raise ConfigError(
            f"agent {config.name!r}: the files of {config.model!r} lack weights that its config.json requires: "
            f"{', '.join(listed[:_MAX_LISTED])}{more}; get a complete copy of the model"
        )
    return model


def save_model(
    model: PreTrainedModel, stops: Sequence[int], folder: Path, state_dict: dict[str, Tensor] | None = None
) -> None:
    """Write a model as transformers does, with ``stops`` as the tokens that end an answer.

    Its other settings for generation are left out if transformers refuses to write them together.
    """
    if model.can_generate():
        settings = model.generation_config
        settings.eos_token_id = list(stops)
        try:
            settings.validate(strict=True)
        except ValueError:
            model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
                eos_token_id=list(stops), bos_token_id=settings.bos_token_id, pad_token_id=settings.pad_token_id
            )
    model.save_pretrained(folder, state_dict=state_dict)


def _compare_settings(theirs: PreTrainedConfig, ours: PreTrainedConfig) -> str:
    """Describe the first setting of the architecture that differs; empty if all are equal.

    Tensors of the same shapes compute something else with other settings, such as the base of rotary embeddings.
    """
    one, other = (config.get_text_config() for config in (theirs, ours))
    if one.model_type != other.model_type:
        return f"model_type = {one.model_type!r}, but {other.model_type!r}"
    common_settings = inspect.signature(PreTrainedConfig).parameters
    there, here = one.to_dict(), other.to_dict()
    for key in inspect.signature(type(other)).parameters:
        is_unused = key in common_settings or key in _UNUSED_SETTINGS or "drop" in key
        if not is_unused and there.get(key) != here.get(key):
            return f"{key} = {quote_value(there.get(key))}, but {quote_value(here.get(key))}"
    return ""


def _widen_logits(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let the head round its factors to ``dtype``, but not the products."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    def multiply(hidden: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.to(dtype).float()
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.to(dtype).float(), head.weight.to(dtype).float(), bias)

    head.forward = multiply


def add_adapter(
    base: PreTrainedModel, adapters: PeftModel | None, config: AgentConfig, lora: LoraConfig, seed: int
) -> PeftModel:
    """Add the agent's seeded adapter to ``base``, beside those already in ``adapters``.

    Raises ConfigError if a target module cannot take an adapter.
    """
    _check_targets(base, config, lora)
    peft_config = make_peft_config(config, lora)
    with torch.random.fork_rng(devices=[base.device] if base.device.type == "cuda" else []):
        torch.manual_seed(derive_seed(seed, "lora", config.name))
        if adapters is None:
            adapters = get_peft_model(base, peft_config, adapter_name=_name_adapter(config.name))
        else:
            adapters.add_adapter(_name_adapter(config.name), peft_config)
    assert isinstance(adapters, PeftModel)
    fuse_adapters(adapters)
    return adapters.eval()


def _name_adapter(agent: str) -> str:
    """The name of an agent's adapter inside modules. The prefix keeps an agent called ``eval`` from hiding a method."""
    return f"agent-{agent}"


def _check_targets(base: PreTrainedModel, config: AgentConfig, lora: LoraConfig) -> None:
    linear = {
        name.removesuffix(".base_layer").rpartition(".")[2]: module
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }
    for target in lora.target_modules:
        if target not in linear:
            raise ConfigError(
                f"lora.target_modules: {config.model!r} has no linear layer {target!r} that can take an adapter: "
                f"{list_choices(target, sorted(linear))}"
            )
        if getattr(linear[target], "weight", None) is base.get_input_embeddings().weight:
            raise ConfigError(
                f"lora.target_modules: in {config.model!r} {target!r} is tied to the embeddings and cannot take an "
                "adapter of its own; remove it from the list"
            )
        head = base.get_output_embeddings()  # type: ignore[no-untyped-call]
        if linear[target] is head and base.dtype != torch.float32:
            raise ConfigError(
                f"lora.target_modules: {target!r} computes the logits, and with an adapter in half precision engine "
                'and update would round them differently; remove it from the list, or set model.dtype = "float32"'
            )
