"""The policies of all agents: models and adapters in one process, and their checkpoints.

Agents with the same base share its frozen tensors in memory: each has modules of its own over them, with one LoRA
adapter; with ``weights = "shared"`` all of them have one adapter. An agent with ``weights = "full"`` owns a copy.
Trained parameters are always float32: those of a full copy are masters, whose matrix products run in the configured
dtype through autocast. Models stay in eval mode (no dropout), so that the trainer computes the log-probabilities of the
distribution that the engine sampled from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, TaskType, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from magrpo.config import AgentConfig, LoraConfig, ModelConfig, start_weights
from magrpo.lineup import Lineup, load_pretrained
from magrpo.lora import fuse_adapters
from magrpo.plugins import ConfigError, list_choices, quote_error
from magrpo.seeds import derive_seed
from magrpo.sharding import Shards, gather_weights, spread_like

ResultT = TypeVar("ResultT")
_MAX_LISTED = 8
"""Number of weights that a message names."""
# The errors below name what matters of its table of missing weights.
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class _Agent:
    model: PreTrainedModel
    """The causal language model: the agent's own copy, or modules over the shared base with the adapter inside."""
    peft: PeftModel | None


@dataclass
class Policy:
    """The policies of all agents. Made by :meth:`open`."""

    lineup: Lineup
    version: int = 0
    """Number of updates the current weights have seen (0: untrained)."""
    sources: dict[str, Path] | None = None
    """The folders that hold the current weights, of the agents whose weights were loaded; None: they have changed."""
    shards: Shards | None = None
    """The ranks that its models are spread over; all of them call the same methods. None: they are whole, here."""
    _agents: dict[str, _Agent] = field(default_factory=dict)
    _frozen: dict[str, PreTrainedModel] = field(default_factory=dict)

    @classmethod
    def open(cls, agents: Sequence[AgentConfig], model: ModelConfig, lora: LoraConfig, seed: int) -> Policy:
        """The policy of these agents: :meth:`of` on their lineup."""
        return cls.of(Lineup.open(agents, model, lora), seed)

    @classmethod
    def of(cls, lineup: Lineup, seed: int, shards: Shards | None = None) -> Policy:
        """Load every base once; give each agent its seeded adapter (B = 0) or full copy, and load its ``start_from``.

        With ``shards`` models are read into the memory of the processor and spread from there.
        Raises ConfigError if a base, trained weights or a target module cannot be used.
        """
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
                policy._agents[agent] = _Agent(causal, None)
            else:
                if config.model not in bases:
                    bases[config.model] = policy._load_model(config, lineup.dtype)
                base = bases[config.model]
                if shards:  # modules can be spread once: they hold the adapters of all agents
                    peft = add_adapter(base, spread.get(config.model), config, lineup.lora, seed)
                    spread[config.model] = peft
                else:
                    base = share_tensors(base)
                    peft = add_adapter(base, None, config, lineup.lora, seed)
                policy._agents[agent] = _Agent(base, peft)
        if shards:
            for base in bases.values():
                shards.spread_layers(base, {p for name, p in base.named_parameters() if ".lora_" in name})
        policy.load(0, start_weights([lineup.config(agent) for agent in lineup.agents]))
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
        """Whether agents with weights of their own can be run at the same time, by several threads."""
        return self.shards is None

    @contextmanager
    def active(self, agent: str) -> Iterator[PreTrainedModel]:
        """The causal language model with this agent's weights active, ready for forward passes."""
        entry = self._agents[agent]
        adapter = _name_adapter(self.lineup.holder(agent))
        if entry.peft is not None and entry.peft.active_adapter != adapter:  # of a model that is spread over ranks
            entry.peft.set_adapter(adapter)
        has_masters = entry.peft is None and self.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=has_masters):
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
            self._frozen[base] = self._load_model(self.lineup.config(agent), self.dtype).requires_grad_(False)
            if self.shards:
                self.shards.spread_layers(self._frozen[base])
        yield self._frozen[base]

    def run(self, model: PreTrainedModel, compute: Callable[[PreTrainedModel], ResultT]) -> ResultT:
        """``compute(model)``, inside of :meth:`active` or :meth:`reference`: gathers the weights of a spread model."""
        return self.shards.run(model, compute) if self.shards else compute(model)

    def is_spread(self, agent: str) -> bool:
        """Whether the agent's trained parameters, and so their gradients and optimizer, are spread over ranks."""
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

    def save(self, folder: Path) -> dict[str, Path]:
        """Write each agent's weights into ``folder/<agent>``, in peft's or transformers' form; returns the folders.

        Of ranks that models are spread over, all gather weights and the first writes them.
        """
        folders = {agent: folder / agent for agent in self._agents}
        for agent, target in folders.items():
            entry = self._agents[agent]
            gathered = gather_weights(entry.model) if self.is_spread(agent) else None
            if self.shards and not self.shards.is_first:
                continue
            target.mkdir(parents=True, exist_ok=True)
            if entry.peft is None:
                entry.model.save_pretrained(target, state_dict=gathered)
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

        Raises ConfigError if a folder is missing or of another model, or agents that share an adapter are given two.
        """
        self.sources = None
        loaded: dict[str, tuple[Path, dict[str, Tensor]]] = {}
        for agent, folder in weights.items():
            parameters = self.parameters(agent)
            try:
                if self.lineup.weights(agent) == "lora":
                    stored = load_file(folder / ADAPTER_WEIGHTS)
                else:
                    located = self.lineup.config(agent).model_copy(update={"model": str(folder.absolute())})
                    stored = dict(load_base_model(located, torch.float32).named_parameters())
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{folder}: cannot read the weights of {agent!r}: {quote_error(error)}") from None
            if {k: p.shape for k, p in parameters.items()} != {k: t.shape for k, t in stored.items()}:
                raise ConfigError(f"{folder}: these are not weights of agent {agent!r}: names or shapes differ")
            other, same = loaded.setdefault(self.lineup.holder(agent), (folder, stored))
            if any(not torch.equal(stored[name], same[name]) for name in stored):
                raise ConfigError(f'{folder}: differs from {other}; agents with weights = "shared" start from the same')
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(spread_like(stored[name], parameter))
        self.version, self.sources = version, dict(weights)

    def _load_model(self, config: AgentConfig, dtype: torch.dtype) -> PreTrainedModel:
        model = load_base_model(config, dtype)
        if self.lineup.float32_logits:
            _widen_logits(model, self.dtype)
        nn.Module.to(model, torch.device("cpu") if self.shards else self.device)
        return nn.Module.train(model, False)


def share_tensors(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules over the same parameters and buffers."""
    return deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def load_base_model(config: AgentConfig, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    """The base of an agent, ``config.model``, in the memory of the processor.

    Raises ConfigError if it cannot be loaded, or lacks weights: transformers would draw them at random, anew each time.
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
            f"agent {config.name!r}: the files of {config.model!r} do not hold weights that its config.json names: "
            f"{', '.join(listed[:_MAX_LISTED])}{more}; take a complete copy of the model"
        )
    return model


def _widen_logits(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let the head multiply factors in ``dtype`` without rounding the products to it."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    def multiply(hidden: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.to(dtype).float()
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.to(dtype).float(), head.weight.to(dtype).float(), bias)

    head.forward = multiply


def add_adapter(
    base: PreTrainedModel, adapters: PeftModel | None, config: AgentConfig, lora: LoraConfig, seed: int
) -> PeftModel:
    """Put the agent's seeded adapter into ``base``, beside those that ``adapters`` has put there.

    Raises ConfigError if a target module cannot take one.
    """
    _check_targets(base, config, lora)
    peft_config = PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes any number
        target_modules=list(lora.target_modules),
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=config.model,
    )
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
    """The name of an agent's adapter inside modules, which is none of their attributes: an agent may be called eval."""
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
                "adapter of its own; leave it out"
            )
