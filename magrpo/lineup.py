"""The agents without their weights: tokenizers, prompts, stop tokens, context windows, and where matrix products run.

Engines, rollout and servers need no more than this of the agents.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from magrpo.assets import locate_model
from magrpo.config import AgentConfig, LoraConfig, ModelConfig, weight_holders
from magrpo.plugins import ConfigError, first_line
from magrpo.surrogates import REPLACEMENT
from magrpo.types import Observation


@dataclass(frozen=True)
class _Agent:
    config: AgentConfig
    holder: str
    """The agent whose weights this one acts with: itself, unless they share an adapter."""
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    max_length: int


@dataclass
class Lineup:
    """The agents of a run, without weights. Made by :meth:`open`."""

    device: torch.device
    """Where the weights live, in whichever process."""
    dtype: torch.dtype
    """The dtype of frozen weights and of matrix products."""
    lora: LoraConfig
    chat_template: Literal["auto", "none"]
    _agents: dict[str, _Agent] = field(default_factory=dict)

    @classmethod
    def open(
        cls, agents: Sequence[AgentConfig], model: ModelConfig, lora: LoraConfig, device: torch.device | None = None
    ) -> Lineup:
        """Load tokenizers and model configurations. ``device``: where weights live if not in this process.

        Raises ConfigError if a base, its tokenizer or the device cannot be used.
        """
        device = device or device_of(model)
        lineup = cls(device, dtype_of(model, device), lora, model.chat_template)
        for named, holder in zip(agents, weight_holders(agents).values(), strict=True):
            config = named.model_copy(update={"model": locate_model(named.model)})
            tokenizer = _load_tokenizer(config)
            base = load_pretrained(AutoConfig, "model", config)
            window = int(base.get_text_config().max_position_embeddings)
            stops = (tokenizer.eos_token_id, *_generation_stops(config.model, base))
            lineup._agents[config.name] = _Agent(config, holder, tokenizer, tuple(dict.fromkeys(stops)), window)
        return lineup

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
        return "full" if self._agents[agent].config.weights == "full" else "lora"

    def holder(self, agent: str) -> str:
        """The agent whose weights this one acts with: itself, unless several share an adapter."""
        return self._agents[agent].holder

    def tokenizer(self, agent: str) -> PreTrainedTokenizerBase:
        return self._agents[agent].tokenizer

    def render(self, agent: str, observation: Observation) -> tuple[int, ...]:
        """Token ids of an observation: through the chat template, or as plain text ended by a newline.

        Messages quote what programs and other agents wrote: every agent's special tokens in them are replaced by a
        replacement character, and so are lone surrogates, which no tokenizer takes.
        """
        tokenizer = self._agents[agent].tokenizer
        messages = [
            {"role": message.role, "content": self._uncontrolled.sub(REPLACEMENT, message.content)}
            for message in observation.messages
        ]
        if self.chat_template == "auto" and tokenizer.chat_template:
            return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        text = "".join(f"{message['content']}\n" for message in messages)
        prefix = [tokenizer.bos_token_id] if _begins_with_bos(tokenizer) else []
        return (*prefix, *tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def _uncontrolled(self) -> re.Pattern[str]:
        """Matches what must not reach a tokenizer from text: special tokens of every agent, lone surrogates."""
        tokens = {token for agent in self._agents.values() for token in _list_special_tokens(agent.tokenizer)}
        return re.compile("|".join(["[\ud800-\udfff]", *map(re.escape, sorted(tokens, key=len, reverse=True))]))

    def stop_token_ids(self, agent: str) -> tuple[int, ...]:
        """Ids that end a completion: the tokenizer's and those of the model's generation config."""
        return self._agents[agent].stop_token_ids

    def max_length(self, agent: str) -> int:
        """The context window, prompt and completion together, in tokens."""
        return self._agents[agent].max_length

    def release_cached_memory(self) -> None:
        """Return torch's cached GPU memory of this process to the device, for others. No-op on CPU."""
        if self.device.type == "cuda":
            gc.collect()  # free tensors in reference cycles first
            torch.cuda.empty_cache()


def open_prompt_tokenizer(agent: AgentConfig, chat_template: Literal["auto", "none"]) -> PreTrainedTokenizerBase:
    """The agent's tokenizer with a chat template that renders observations as :meth:`Lineup.render` does."""
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
        raise ConfigError(f"agent {config.name!r}: cannot load {noun} {config.model!r}: {first_line(error)}") from None


def _begins_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a beginning-of-sequence token before plain text by itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("").input_ids[:1] == [bos]


def _list_special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return (added | set(tokenizer.all_special_tokens)) - {""}


def _load_tokenizer(config: AgentConfig) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = load_pretrained(AutoTokenizer, "the tokenizer of", config)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"agent {config.name!r}: the tokenizer of {config.model!r} has no end-of-sequence token; "
            "set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def _generation_stops(model: str, base: Any) -> list[int]:
    """The end-of-sequence tokens of the model's generation config; without one, of its configuration."""
    try:
        generation = GenerationConfig.from_pretrained(model)
    except OSError:
        generation = GenerationConfig.from_model_config(base)
    listed = generation.eos_token_id
    return [listed] if isinstance(listed, int) else listed or []
