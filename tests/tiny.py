"""Tiny random models with a byte-level tokenizer, made on the fly.

``tiny_base(folder)`` writes a complete transformers folder (stock Llama or Qwen2, which vLLM also serves) that encodes
and decodes any text. Weights follow from the seed alone. Head size 32 is the smallest that vLLM's CPU attention takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    OpenAIGPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.model.policy import Policy
from magrpo.seeds import derive_seed

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ("<pad>", "<bos>", "<eos>")
VOCAB_SIZE = len(SPECIALS) + 256


def tiny_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """One token for each byte, after the three special ones; adds no special tokens by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIALS[PAD], bos_token=SPECIALS[BOS], eos_token=SPECIALS[EOS]
    )
    fast.chat_template = chat_template
    return fast


def tiny_config(
    architecture: Literal["llama", "qwen2", "qwen3"] = "llama",
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_kv_heads: int | None = None,
    max_length: int = 256,
    tie: bool = True,
) -> PreTrainedConfig:
    """A stock configuration with heads of 32; ``num_kv_heads`` None is as many as there are query heads."""
    heads = hidden_size // 32
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[architecture]
    return kind(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 2,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=num_kv_heads or heads,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=tie,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def tiny_base(
    folder: Path, config: PreTrainedConfig | None = None, seed: int = 0, chat_template: str | None = None
) -> Path:
    """Write a random base model and its tokenizer into ``folder``.

    Weights are wider than transformers' own initialisation, so that greedy completions differ between prompts.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config or tiny_config(), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    tiny_tokenizer(chat_template).save_pretrained(folder)
    return folder


def unmarked_base(folder: Path) -> Path:
    """A base model none of whose modules transformers marks as layers that can be computed again."""
    return tiny_base(folder, OpenAIGPTConfig(vocab_size=VOCAB_SIZE, n_positions=256, n_embd=64, n_layer=2, n_head=2))


def tiny_policy(
    folder: Path,
    config: PreTrainedConfig | None = None,
    *,
    weights: Literal["lora", "full"] = "lora",
    scale: float = 0.05,
    **model: object,
) -> Policy:
    """One agent, ``main``, with a random base in ``folder / "base"``, whose weights have moved; on a CPU."""
    agents = [AgentConfig(name="main", role="main", model=str(tiny_base(folder / "base", config)), weights=weights)]
    policy = Policy.open(agents, ModelConfig.model_validate({"device": "cpu", **model}), LoraConfig(rank=4), seed=0)
    perturb(policy, seed=1, scale=scale)
    return policy


def perturb(policy: Policy, seed: int, scale: float = 0.1) -> None:
    """Move the weights of every agent at random, so that they are no longer those of the base."""
    with torch.no_grad():
        for agent in policy.agents:
            for name, parameter in policy.parameters(agent).items():
                generator = torch.Generator().manual_seed(derive_seed(seed, agent, name))
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.device), alpha=scale)
