"""The policies of all agents: models, adapters and tokenizers in one process, and their checkpoints.

Agents with the same base share it in memory: one frozen model with one LoRA adapter each, or one for all of them with
``weights = "shared"``. An agent with ``weights = "full"`` owns a copy. Trained parameters are always float32: those of
a full copy are masters, whose matrix products run in the configured dtype through autocast. Models stay in eval mode
(no dropout), so that the trainer computes the log-probabilities of the distribution that the engine sampled from.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from magrpo.assets import locate_model
from magrpo.config import AgentConfig, LoraConfig, ModelConfig, weight_holders
from magrpo.plugins import ConfigError, list_choices
from magrpo.seeds import derive_seed
from magrpo.types import Observation

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class _Agent:
    config: AgentConfig
    model: PreTrainedModel
    """The causal language model: the agent's own copy, or the shared base with adapters inside."""
    peft: PeftModel | None
    holder: str
    """The agent whose adapter this one acts with: itself, unless they share one."""
    tokenizer: PreTrainedTokenizerBase


@dataclass
class Policy:
    """The policies of all agents. Made by :meth:`open`."""

    device: torch.device
    dtype: torch.dtype
    chat_template: Literal["auto", "none"]
    version: int = 0
    """Number of updates the current weights have seen (0: untrained)."""
    _agents: dict[str, _Agent] = field(default_factory=dict)
    _frozen: dict[str, PreTrainedModel] = field(default_factory=dict)

    @classmethod
    def open(cls, agents: Sequence[AgentConfig], model: ModelConfig, lora: LoraConfig, seed: int) -> Policy:
        """Load every base once; give each agent its seeded adapter (B = 0) or full copy, and load its ``start_from``.

        Raises ConfigError if a base, its tokenizer, trained weights, the device or a target module cannot be used.
        """
        device = device_of(model)
        policy = cls(device, dtype_of(model, device), model.chat_template)
        bases: dict[str, PreTrainedModel] = {}
        adapted: dict[str, PeftModel] = {}
        for named, holder in zip(agents, weight_holders(agents).values(), strict=True):
            config = named.model_copy(update={"model": locate_model(named.model)})
            tokenizer = _load_tokenizer(config)
            if config.weights == "full":
                causal = _load_model(config, torch.float32, device)
            else:
                if config.model not in bases:
                    bases[config.model] = _load_model(config, policy.dtype, device)
                causal = bases[config.model]
                if holder == config.name:
                    adapted[config.model] = _add_adapter(causal, adapted.get(config.model), config, lora, seed)
            peft = None if config.weights == "full" else adapted[config.model]
            policy._agents[config.name] = _Agent(config, causal, peft, holder, tokenizer)
        policy.load(0, {agent.name: agent.start_from for agent in agents if agent.start_from is not None})
        return policy

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents, in the order of the config."""
        return tuple(self._agents)

    def config(self, agent: str) -> AgentConfig:
        """The agent's section of the configuration, ``model`` located."""
        return self._agents[agent].config

    def base(self, agent: str) -> str:
        """Folder or hub id of the agent's base model."""
        return self._agents[agent].config.model

    def weights(self, agent: str) -> Literal["lora", "full"]:
        """Whether an adapter or a full copy trains."""
        return "full" if self._agents[agent].peft is None else "lora"

    def holder(self, agent: str) -> str:
        """The agent whose weights this one acts with: itself, unless several share an adapter."""
        return self._agents[agent].holder

    def tokenizer(self, agent: str) -> PreTrainedTokenizerBase:
        return self._agents[agent].tokenizer

    def render(self, agent: str, observation: Observation) -> tuple[int, ...]:
        """Token ids of an observation: through the chat template, or as plain text ended by a newline."""
        tokenizer = self._agents[agent].tokenizer
        if self.chat_template == "auto" and tokenizer.chat_template:
            messages = [asdict(message) for message in observation.messages]
            return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        text = "".join(f"{message.content}\n" for message in observation.messages)
        prefix = [tokenizer.bos_token_id] if _begins_with_bos(tokenizer) else []
        return (*prefix, *tokenizer.encode(text, add_special_tokens=False))

    def stop_token_ids(self, agent: str) -> tuple[int, ...]:
        """Ids that end a completion: the tokenizer's and those of the model's generation config."""
        entry = self._agents[agent]
        generation = entry.model.generation_config
        listed = generation.eos_token_id if generation is not None else None
        extra = [listed] if isinstance(listed, int) else listed or []
        return tuple(dict.fromkeys([entry.tokenizer.eos_token_id, *extra]))

    def max_length(self, agent: str) -> int:
        """The context window, prompt and completion together, in tokens."""
        return int(self._agents[agent].model.config.get_text_config().max_position_embeddings)

    @contextmanager
    def active(self, agent: str) -> Iterator[PreTrainedModel]:
        """The causal language model with this agent's weights active, ready for forward passes."""
        entry = self._agents[agent]
        if entry.peft is not None:
            entry.peft.set_adapter(entry.holder)
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
        base = entry.config.model
        if base not in self._frozen:
            self._frozen[base] = _load_model(entry.config, self.dtype, self.device).requires_grad_(False)
        yield self._frozen[base]

    def parameters(self, agent: str) -> dict[str, nn.Parameter]:
        """The trained parameters, in float32, by the names they are saved under."""
        entry = self._agents[agent]
        if entry.peft is None:
            return dict(entry.model.named_parameters())
        suffix = f".{entry.holder}.weight"
        return {
            name.removesuffix(suffix) + ".weight": parameter
            for name, parameter in entry.peft.named_parameters()
            if name.endswith((f".lora_A{suffix}", f".lora_B{suffix}"))
        }

    def save(self, folder: Path) -> dict[str, Path]:
        """Write each agent's weights into ``folder/<agent>``, in peft's or transformers' form; returns the folders."""
        folders = {agent: folder / agent for agent in self._agents}
        for agent, target in folders.items():
            entry = self._agents[agent]
            target.mkdir(parents=True, exist_ok=True)
            if entry.peft is None:
                entry.model.save_pretrained(target)
                entry.tokenizer.save_pretrained(target)
            else:
                tensors = {name: p.detach().contiguous() for name, p in self.parameters(agent).items()}
                save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
                adapter = {**entry.peft.peft_config[entry.holder].to_dict(), "inference_mode": True}
                text = json.dumps(adapter, indent=2, sort_keys=True, default=sorted)  # sets in a fixed order
                (target / ADAPTER_CONFIG).write_text(f"{text}\n", encoding="utf-8")
        return folders

    def load(self, version: int, weights: Mapping[str, Path]) -> None:
        """Load, bit for bit, the weights that :meth:`save` wrote.

        Raises ConfigError if a folder is missing or of another model, or agents that share an adapter are given two.
        """
        loaded: dict[str, tuple[Path, dict[str, Tensor]]] = {}
        for agent, folder in weights.items():
            parameters = self.parameters(agent)
            try:
                if self.weights(agent) == "lora":
                    stored = load_file(folder / ADAPTER_WEIGHTS)
                else:
                    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
                    stored = dict(full.named_parameters())
            except (OSError, ValueError) as error:
                raise ConfigError(f"{folder}: cannot read the weights of {agent!r}: {_first_line(error)}") from None
            if {k: p.shape for k, p in parameters.items()} != {k: t.shape for k, t in stored.items()}:
                raise ConfigError(f"{folder}: these are not weights of agent {agent!r}: names or shapes differ")
            other, same = loaded.setdefault(self.holder(agent), (folder, stored))
            if any(not torch.equal(stored[name], same[name]) for name in stored):
                raise ConfigError(f'{folder}: differs from {other}; agents with weights = "shared" start from the same')
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(stored[name])
        self.version = version

    def release_cached_memory(self) -> None:
        """Return torch's cached GPU memory to the device, for other processes. No-op on CPU."""
        if self.device.type == "cuda":
            gc.collect()  # free tensors in reference cycles first
            torch.cuda.empty_cache()


def open_prompt_tokenizer(agent: AgentConfig, chat_template: Literal["auto", "none"]) -> PreTrainedTokenizerBase:
    """The agent's tokenizer with a chat template that renders observations as :meth:`Policy.render` does."""
    tokenizer = _load_tokenizer(agent.model_copy(update={"model": locate_model(agent.model)}))
    if chat_template == "none" or not tokenizer.chat_template:
        bos = "{{ bos_token }}" if _begins_with_bos(tokenizer) else ""
        tokenizer.chat_template = bos + "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"
    return tokenizer


def device_of(model: ModelConfig) -> torch.device:
    """The device the policies will live on. Raises ConfigError if CUDA is asked for and there is none."""
    uses_cuda = model.device != "cpu" and torch.cuda.is_available()
    if model.device == "cuda" and not uses_cuda:
        raise ConfigError('model.device = "cuda": PyTorch sees no CUDA device; use "cpu" or "auto"')
    return torch.device("cuda" if uses_cuda else "cpu")


def dtype_of(model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of frozen weights and of matrix products."""
    is_half = model.dtype == "bfloat16" or (model.dtype == "auto" and device.type == "cuda")
    return torch.bfloat16 if is_half else torch.float32


def load_pretrained(auto: Any, noun: str, config: AgentConfig, **options: Any) -> Any:
    """``auto.from_pretrained`` of the agent's base, ``config.model``; ConfigError, naming the agent, if it fails."""
    looks_local = Path(config.model).is_absolute() or config.model.startswith((".", "~")) or config.model.count("/") > 1
    if looks_local and not Path(config.model).is_dir():
        raise ConfigError(f"agent {config.name!r}: model = {config.model!r}: no such folder")
    try:
        return auto.from_pretrained(config.model, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"agent {config.name!r}: cannot load {noun} {config.model!r}: {_first_line(error)}") from None


def _load_model(config: AgentConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    model = load_pretrained(AutoModelForCausalLM, "model", config, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    nn.Module.to(model, device)
    return nn.Module.train(model, False)


def _begins_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a beginning-of-sequence token before plain text by itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("").input_ids[:1] == [bos]


def _load_tokenizer(config: AgentConfig) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = load_pretrained(AutoTokenizer, "the tokenizer of", config)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"agent {config.name!r}: the tokenizer of {config.model!r} has no end-of-sequence token; "
            "set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def _add_adapter(
    base: PreTrainedModel, adapters: PeftModel | None, config: AgentConfig, lora: LoraConfig, seed: int
) -> PeftModel:
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
            adapters = get_peft_model(base, peft_config, adapter_name=config.name)
        else:
            adapters.add_adapter(config.name, peft_config)
    assert isinstance(adapters, PeftModel)
    return adapters.eval()


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


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
