"""What both sides of the comparison are given: model, tokenizer, prompts and reward. Needs torch and transformers only.

It is imported in the environment of either side, so it must not import magrpo.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

AGENTS = ("helper", "main")
NUM_PROMPTS, PROMPT_TOKENS = 16, 48
GROUP_SIZE, NEW_TOKENS = 4, 64
LEARNING_RATE = 1e-5
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEF"
_SPACE = "Ġ"  # as byte-level encodings write it

Gradients = dict[str, dict[str, Tensor]]
"""By agent and name of the parameter."""


class Completions(NamedTuple):
    """One joint action that was sampled: a text for each agent, and the joint reward it got."""

    prompt: str
    texts: tuple[str, ...]
    reward: float


def write_model(folder: Path, vocab_size: int) -> None:
    """A random Qwen2 and a tokenizer in which every token is one word, so that text and token ids say the same.

    The tokenizer's end-of-sequence and padding tokens lie beyond the model's vocabulary. It can never sample them, so
    every completion has its full length on either side without a logits processor that would cost time.
    """
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    logging.disable_progress_bar()
    Qwen2ForCausalLM(config).save_pretrained(folder)
    _tokenizer(vocab_size).save_pretrained(folder)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte pair encoding, since transformers opens a Qwen2's tokenizer as one: letter by letter to a whole word.

    What is not a whole word gets ids that the model does not have; no prompt contains it.
    """
    words = [_SPACE + word(token)[1:] for token in range(vocab_size)]
    parts = dict.fromkeys(w[:length] for length in (2, 3, 4) for w in words)
    merges = [(part[:-1], part[-1]) for part in parts]
    rest = [part for part in parts if len(part) < 4]
    ids = {token: i for i, token in enumerate([*words, *rest, _SPACE, *_LETTERS, "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def word(token: int) -> str:
    """The text of a token: a space and three letters, the digits of its id to the base 32."""
    return " " + "".join(_LETTERS[token >> shift & 31] for shift in (10, 5, 0))


def prompts(vocab_size: int, count: int) -> list[str]:
    """Random prompts of ``PROMPT_TOKENS`` words, the same in every process."""
    rng = random.Random(0)
    return ["".join(word(rng.randrange(vocab_size)) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


def token_ids(text: str) -> tuple[int, ...]:
    """The token ids of a prompt or a completion."""
    digits = [[_LETTERS.index(letter) for letter in word] for word in text.split()]
    return tuple(a << 10 | b << 5 | c for a, b, c in digits)


def reward(texts: Sequence[str]) -> float:
    """A joint reward in 0..1 that any two joint actions hardly ever share: the mean of a hash of the sampled tokens."""
    ids = [token for text in texts for token in token_ids(text)]
    assert len(ids) == len(texts) * NEW_TOKENS, "a completion does not have its full length"
    return sum(token * 7919 % 1009 for token in ids) / (1009 * len(ids))


class Meter:
    """Seconds of the rollout and of the update of one iteration. The rollout ends with the last :meth:`lap`."""

    def start(self) -> None:
        self._start = time.perf_counter()

    def lap(self) -> None:
        self._lap = time.perf_counter()

    def stop(self) -> tuple[float, float]:
        return self._lap - self._start, time.perf_counter() - self._lap


@contextmanager
def gradients() -> Iterator[dict[int, Tensor]]:
    """Collects, by the parameter's ``id``, the gradients that optimizers inside the context step on."""
    found: dict[int, Tensor] = {}

    def collect(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            found.update((id(p), p.grad.clone()) for p in group["params"] if p.grad is not None)

    handle = register_optimizer_step_pre_hook(collect)
    try:
        yield found
    finally:
        handle.remove()
