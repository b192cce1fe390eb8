"""The agents without their weights: tokenizers, prompts, stop tokens, context windows, device and dtype.

Engines, rollouts and servers need nothing else of the agents.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import psutil
import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from magrpo.assets import locate_model, looks_like_folder
from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig, weight_holders
from magrpo.errors import ConfigError, quote_error, quote_value
from magrpo.text import REPLACEMENT
from magrpo.types import Observation

GENERATION_CONFIG = "generation_config.json"
UNLOADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError),
    *(SafetensorError, StrictDataclassError, UnpicklingError),
)
"""Errors of libraries for files of a model that are missing, damaged, or written for another version."""
_UNRENDERABLE = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""Errors of a chat template, which is code that came with a model."""

_LARGE_PROCESS = 2 * 2**30
"""Resident bytes from which the heap is trimmed. Reading the memory again costs more than it is worth below."""


@dataclass(frozen=True)
class _AgentSpec:
    config: AgentConfig
    holder: str
    """The agent whose weights this one acts with: itself, unless several share an adapter."""
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    max_length: int
    vocab_size: int


@dataclass
class Lineup:
    """The agents of a run, without weights. Made by :meth:`open`."""

    device: torch.device
    """The device of the weights, in whichever process they live."""
    model: ModelConfig
    lora: LoraConfig
    _agents: dict[str, _AgentSpec] = field(default_factory=dict)

    @classmethod
    def open(
        cls, agents: Sequence[AgentConfig], model: ModelConfig, lora: LoraConfig, device: torch.device | None = None
    ) -> Lineup:
        """Load tokenizers and model configurations. ``device``: where weights live if not in this process.

        Raises ConfigError if a base, its tokenizer or the device cannot be used.
        """
        lineup = cls(device or device_of(model), model, lora)
        for named, holder in zip(agents, weight_holders(agents).values(), strict=True):
            config = named.model_copy(update={"model": locate_model(named.model)})
            tokenizer = _load_tokenizer(config)
            base = load_pretrained(AutoConfig, "model", config)
            window, vocab_size = read_sizes(config, base)
            stops = _list_stops(config, tokenizer, base)
            lineup._agents[config.name] = _AgentSpec(config, holder, tokenizer, stops, window, vocab_size)
        for name in lineup.agents:
            lineup._check_template(name)
        return lineup

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents, in the order of the config."""
        return tuple(self._agents)

    @property
    def configs(self) -> list[AgentConfig]:
        """The agents' sections of the configuration, as :meth:`config` gives them."""
        return [self.config(agent) for agent in self.agents]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of frozen weights and of matrix products, but for those that :attr:`rounds_layers` is about."""
        return dtype_of(self.model, self.device)

    @property
    def float32_logits(self) -> bool:
        """Whether logits are float32 although matrix products are not."""
        return self.model.head_dtype == "float32" and self.dtype != torch.float32

    @property
    def rounds_layers(self) -> bool:
        """Whether the linear layers of frozen bases multiply in bfloat16 (:mod:`magrpo.model.rounding`)."""
        return self.model.dtype == "mixed"

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype of most matrix products of frozen bases."""
        return torch.bfloat16 if self.rounds_layers else self.dtype

    def config(self, agent: str) -> AgentConfig:
        """The agent's section of the configuration, with ``model`` as a folder or hub id that libraries can load."""
        return self._agents[agent].config

    def base(self, agent: str) -> str:
        """Folder or hub id of the agent's base model."""
        return self._agents[agent].config.model

    def weights(self, agent: str) -> Literal["lora", "full"]:
        """Whether the agent trains an adapter or a full copy."""
        return "full" if self._agents[agent].config.weights == "full" else "lora"

    def holder(self, agent: str) -> str:
        """The agent whose weights this one acts with: itself, unless several share an adapter."""
        return self._agents[agent].holder

    def tokenizer(self, agent: str) -> PreTrainedTokenizerBase:
        return self._agents[agent].tokenizer

    def render(self, agent: str, observation: Observation) -> tuple[int, ...]:
        """Render an observation as token ids, by the chat template or as plain text with a newline after each message.

        Messages may quote programs and other agents, so the special tokens of all agents in them are replaced by a
        replacement character. Raises ConfigError if the template fails, or if the tokenizer produces tokens that the
        base does not have.
        """
        return self.render_chat(
            agent, [{"role": message.role, "content": message.content} for message in observation.messages]
        )

    def render_chat(
        self,
        agent: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        earlier: Sequence[tuple[int, ...]] = (),
    ) -> tuple[int, ...]:
        """Render messages in OpenAI's form as :meth:`render` does, with the descriptions of ``tools``.

        ``earlier`` are prompts with their completions. If the text of one of them begins that of the messages, the
        longest is continued with its own tokens, which need not be those that encoding its text gives.
        """
        entry = self._agents[agent]
        token_ids = self._encode(entry, messages, tools, earlier)
        self._check_vocabulary(entry, token_ids)
        return token_ids

    def encode_text(self, agent: str, text: str) -> tuple[int, ...]:
        """Encode a text that a completion continues, without a chat template.

        Raises ConfigError if the text contains a special token of any agent, or as :meth:`render` does.
        """
        if special := self._uncontrolled.search(text):
            raise ConfigError(f"contains the special token {special[0]!r}, which a text may not hold")
        entry = self._agents[agent]
        token_ids = _encode_plain(entry.tokenizer, text)
        self._check_vocabulary(entry, token_ids)
        return token_ids

    def _check_vocabulary(self, entry: _AgentSpec, token_ids: Sequence[int]) -> None:
        if max(token_ids, default=0) >= entry.vocab_size:
            raise ConfigError(
                f"agent {entry.config.name!r}: the tokenizer of {entry.config.model!r} produces token id "
                f"{max(token_ids)}, but the model has only {entry.vocab_size} tokens: the tokenizer belongs to another "
                "model"
            )

    def _encode(
        self,
        entry: _AgentSpec,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        earlier: Sequence[tuple[int, ...]] = (),
    ) -> tuple[int, ...]:
        tokenizer = entry.tokenizer
        cleaned, described = self._clean([*messages]), self._clean([*tools]) if tools else None
        if self.model.chat_template == "none" or not tokenizer.chat_template:
            if any(message.get("tool_calls") for message in messages):
                raise ConfigError(
                    f"agent {entry.config.name!r}: messages without a chat template are plain text, which leaves their "
                    'tool calls out: set model.chat_template = "auto" and take a model that has a template, or send '
                    "texts only"
                )
            return _encode_plain(tokenizer, "".join(f"{message['content']}\n" for message in cleaned))
        try:
            text = str(
                tokenizer.apply_chat_template(cleaned, tools=described, add_generation_prompt=True, tokenize=False)
            )
        except _UNRENDERABLE as error:
            roles = ", ".join(message["role"] for message in cleaned)
            raise ConfigError(
                f"agent {entry.config.name!r}: the chat template of {entry.config.model!r} cannot render messages "
                f'with the roles {roles}: {quote_error(error)}; fix it, or set model.chat_template = "none"'
            ) from error
        for token_ids in sorted(earlier, key=len, reverse=True):
            begun = str(tokenizer.decode([*token_ids]))
            if text.startswith(begun):
                return (*token_ids, *tokenizer.encode(text[len(begun) :], add_special_tokens=False))
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def _clean(self, value: Any) -> Any:
        """Replace special tokens in every text of a message or of the description of a tool."""
        if isinstance(value, str):
            return self._uncontrolled.sub(REPLACEMENT, value)
        if isinstance(value, Mapping):
            return {self._clean(key): self._clean(item) for key, item in value.items()}
        return [self._clean(item) for item in value] if isinstance(value, list | tuple) else value

    def _check_template(self, agent: str) -> None:
        """Raise ConfigError if the prompt does not depend on the message."""
        entry = self._agents[agent]
        one, other = (self._encode(entry, [{"role": "user", "content": text}]) for text in ("1", "two"))
        if one == other:
            raise ConfigError(
                f"agent {agent!r}: {entry.config.model!r} renders every message to the same tokens; fix its tokenizer "
                'or chat template, or set model.chat_template = "none"'
            )

    @cached_property
    def _uncontrolled(self) -> re.Pattern[str]:
        """Matches the special tokens of every agent, which must not reach a tokenizer from text."""
        tokens = {token for agent in self._agents.values() for token in _list_special_tokens(agent.tokenizer)}
        longest_first = sorted(tokens, key=len, reverse=True)
        matches_nothing = "(?!)"
        return re.compile("|".join(map(re.escape, longest_first)) or matches_nothing)

    def find_unused_templates(self) -> str:
        """A warning if a base has a chat template that ``model.chat_template = "none"`` ignores; empty otherwise."""
        bases = {entry.config.model for entry in self._agents.values() if entry.tokenizer.chat_template}
        if self.model.chat_template == "auto" or not bases:
            return ""
        return (
            f'model.chat_template = "none": prompts do not use the chat template of {", ".join(sorted(bases))}, and a '
            "model trained to chat may continue a prompt instead of answering it; to use it: model.chat_template=auto"
        )

    def stop_token_ids(self, agent: str) -> tuple[int, ...]:
        """Token ids that end a completion, from the tokenizer and the generation config of the model."""
        return self._agents[agent].stop_token_ids

    def max_length(self, agent: str) -> int:
        """The context window, prompt and completion together, in tokens."""
        return self._agents[agent].max_length

    def release_cached_memory(self) -> None:
        """Return memory that this process has freed but keeps: torch's cache on a GPU, a large heap on a CPU.

        glibc keeps what is freed below memory in use, and tensors of many sizes leave little room for each other: a run
        of two models of 0.5B parameters grew from 12 to 24 GB in eight iterations.
        """
        if self.device.type == "cuda":
            gc.collect()  # free tensors in reference cycles first
            torch.cuda.empty_cache()
        elif psutil.Process().memory_info().rss >= _LARGE_PROCESS:
            gc.collect()
            trim_heap()


def trim_heap() -> None:
    """Return the freed memory of this process to the system, where its C library can: glibc's can, musl's cannot."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def open_prompt_tokenizer(agent: AgentConfig, chat_template: Literal["auto", "none"]) -> PreTrainedTokenizerBase:
    """The agent's tokenizer with a chat template that renders observations as :meth:`Lineup.render` does."""
    tokenizer = _load_tokenizer(agent.model_copy(update={"model": locate_model(agent.model)}))
    if chat_template == "none" or not tokenizer.chat_template:
        bos = "{{ bos_token }}" if _begins_with_bos(tokenizer) else ""
        tokenizer.chat_template = bos + "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"
    return tokenizer


def read_stop_tokens(agent: AgentConfig) -> tuple[int, ...]:
    """The tokens that end the agent's completions, as :meth:`Lineup.stop_token_ids` gives them."""
    config = agent.model_copy(update={"model": locate_model(agent.model)})
    return _list_stops(config, _load_tokenizer(config), load_pretrained(AutoConfig, "model", config))


def device_of(model: ModelConfig) -> torch.device:
    """The device for the weights of policies. Raises ConfigError if the configuration needs CUDA and there is none."""
    uses_cuda = model.device != "cpu" and torch.cuda.is_available()
    if model.device == "cuda" and not uses_cuda:
        raise ConfigError('model.device = "cuda": PyTorch sees no CUDA device; use "cpu" or "auto"')
    return torch.device("cuda" if uses_cuda else "cpu")


def dtype_of(model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of frozen weights and of matrix products; float32 if only linear layers are in half precision."""
    is_half = model.dtype == "bfloat16" or (model.dtype == "auto" and device.type == "cuda")
    return torch.bfloat16 if is_half else torch.float32


def load_pretrained(auto: Any, noun: str, config: AgentConfig, **options: Any) -> Any:
    """Call ``auto.from_pretrained`` for the agent's base, ``config.model``. Raises ConfigError, naming the agent.

    Code that comes with a model is never run.
    """
    if looks_like_folder(config.model) and not Path(config.model).is_dir():
        raise ConfigError(f"agent {config.name!r}: model = {config.model!r}: no such folder")
    _hide_loading_bars()
    try:
        return auto.from_pretrained(config.model, trust_remote_code=False, **options)
    except UNLOADABLE as error:
        message = f"agent {config.name!r}: cannot load {noun} {config.model!r}: {quote_error(error)}"
        raise ConfigError(message) from error


def _hide_loading_bars() -> None:
    """Hide the progress bars of loading weights, which would break up the lines of a run; downloads keep theirs."""
    shows_downloads = not are_progress_bars_disabled()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # turns off the bars of downloads, too
    if shows_downloads:
        enable_progress_bars()


def _begins_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a beginning-of-sequence token before plain text by itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("").input_ids[:1] == [bos]


def _encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Encode a text without a chat template, after the token that the tokenizer itself puts before plain text."""
    prefix = [tokenizer.bos_token_id] if _begins_with_bos(tokenizer) else []
    return (*prefix, *tokenizer.encode(text, add_special_tokens=False))


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


def read_sizes(config: AgentConfig, base: Any) -> tuple[int, int]:
    """The context window and the size of the vocabulary of a base model, in tokens.

    The window of a model with LongRoPE is its original one, before extension. As soon as one text of a batch is longer,
    the positions of all its texts change; within the original window they are the same in every batch, in the trainer
    and in vLLM. Raises ConfigError if ``base``, the configuration of the model, does not state the sizes.
    """
    text = base.get_text_config()
    window, vocab_size = (getattr(text, name, None) for name in ("max_position_embeddings", "vocab_size"))
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        window = rope.get("original_max_position_embeddings") or text.original_max_position_embeddings
    if not (isinstance(window, int) and isinstance(vocab_size, int) and min(window, vocab_size) > 0):
        raise ConfigError(
            f"agent {config.name!r}: the config.json of {config.model!r} does not state max_position_embeddings or "
            "vocab_size; add the longest text in tokens, prompt and completion together, or the size of the vocabulary"
        )
    return window, vocab_size


def _list_stops(config: AgentConfig, tokenizer: PreTrainedTokenizerBase, base: Any) -> tuple[int, ...]:
    """The end-of-sequence tokens of the tokenizer and of the generation config, or of ``base`` if there is none."""
    if (Path(config.model) / GENERATION_CONFIG).exists():
        generation = load_pretrained(GenerationConfig, f"the {GENERATION_CONFIG} of", config)
    else:
        try:
            generation = GenerationConfig.from_pretrained(config.model)
        except OSError:
            generation = GenerationConfig.from_model_config(base)
    listed = generation.eos_token_id
    stops = listed if isinstance(listed, list) else [listed]
    if listed is None:
        stops = []
    if not all(isinstance(stop, int) for stop in stops):
        raise ConfigError(
            f"agent {config.name!r}: {config.model!r}: eos_token_id in {GENERATION_CONFIG} must be token ids, "
            f"not {quote_value(listed)}"
        )
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *stops]))
