"""Warm start: train a tiny base model for an embedded task from random weights, by supervised learning.

The result is a standard Llama with its own tokenizer, loadable by transformers and vLLM.
"""

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from jaxtyping import Int
from pydantic import Field
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from infra.embedded.demonstrations import RECIPES, Example, Recipe, collect_texts, make_first_turns, make_revisions
from magrpo.interfaces import Problems, Progress
from magrpo.plugins import Section, build_plugin
from magrpo.run.store import read_records, write_records
from magrpo.seeds import derive_seed
from magrpo.types import Problem

PAD, EOS = 0, 1
SPECIALS = ("<pad>", "<eos>")
CONTEXT = 512
_HEAD_SIZE = 32  # the smallest that vLLM's attention supports on a CPU
_IGNORED = -100
_BUCKET = 16  # number of batches whose examples are sorted by length together
_SECOND_TURNS = "second_turns.jsonl.gz"
_NUM_RECENT_LOSSES = 100
# A newline with the indentation after it; a word or a digit with the space before it; a run of other signs.
_PIECES = r"\n *| ?[A-Za-z]+|_[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9_]+|_| +"


class WarmStartConfig(Section):
    """The recipe of an embedded base model."""

    problems: Literal["coopcode", "notes"] = "coopcode"
    """Problem set whose train split is learned."""
    num_problems: int = Field(6144, ge=64)
    """Number of training problems."""
    num_revisions: int = Field(1024, ge=0)
    """Number of these problems that also give an example of a second turn for each role."""
    num_steps: int = Field(1500, ge=1)
    """Number of optimizer steps."""
    batch_size: int = Field(32, ge=1)
    """Examples per step."""
    matrix_lr: float = Field(0.02, gt=0)
    """Peak learning rate of Muon, which trains the matrices of the layers."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate of AdamW, which trains all other parameters."""
    warmup_steps: int = Field(30, ge=0)
    """Steps over which both learning rates rise from 0; they then fall linearly to 0."""
    hidden_size: int = Field(192, ge=_HEAD_SIZE, multiple_of=_HEAD_SIZE)
    """Width of the model; attention heads are 32 wide."""
    intermediate_size: int = Field(480, ge=1)
    """Width of the feed-forward layers."""
    num_layers: int = Field(2, ge=1)
    """Number of layers."""
    seed: int = Field(0, ge=0)
    """Seed of everything random in the recipe."""


def demonstrate_second_turns(folder: Path, config: WarmStartConfig) -> None:
    """Write examples of second turns to ``folder``. The sandbox runs the first turns: feedback depends on scores."""
    problems = _load_problems(config)
    number = config.num_revisions
    chosen = problems[:: max(1, len(problems) // number)][:number] if number else []
    recipe, plugin = RECIPES[config.problems]
    with closing(plugin.open()) as sandbox:
        examples = make_revisions(chosen, recipe, sandbox, config.seed)
    write_records(folder / _SECOND_TURNS, examples)


def train_on_demonstrations(folder: Path, config: WarmStartConfig, progress: Progress) -> float:
    """Train a base model on the examples in ``folder`` and save it, with its recipe, in ``folder/model``.

    Returns the mean loss of the last steps, in nats per completion token.
    """
    second_turns = read_records(folder / _SECOND_TURNS, Example)
    trained = train_base_model(_load_problems(config), second_turns, RECIPES[config.problems][0], config, progress)
    loss = fmean(trained.losses[-_NUM_RECENT_LOSSES:])
    trained.save(folder / "model")
    facts = {**config.model_dump(), "loss": round(loss, 4), "parameters": trained.model.num_parameters()}
    (folder / "model" / "recipe.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return loss


def _load_problems(config: WarmStartConfig) -> list[Problem]:
    options = {"kind": config.problems, "num_train": config.num_problems}
    problem_set: Problems = build_plugin("problems", options)
    return list(problem_set.load()["train"])


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A trained base model. ``losses``: nats per completion token, one value per step."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase
    losses: tuple[float, ...]

    def save(self, folder: Path) -> None:
        """Write a transformers folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def train_base_model(
    problems: Sequence[Problem],
    second_turns: Sequence[Example],
    recipe: Recipe,
    config: WarmStartConfig,
    progress: Progress | None = None,
) -> WarmStart:
    """Train a base model on first turns of ``problems``, with new conventions every epoch, and on ``second_turns``."""
    texts = [*collect_texts(problems, recipe), *(text for e in second_turns for text in (e.prompt, e.completion))]
    tokenizer = build_tokenizer(texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "init"))
        model = build_model(config, len(tokenizer))
    losses = []
    optimizers = _make_optimizers(model, config)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: scale_lr(step, config)) for o in optimizers]
    batches = _make_batches(problems, second_turns, recipe, tokenizer, config)
    for _, (input_ids, labels) in zip(range(config.num_steps), batches, strict=False):
        loss = compute_loss(model, input_ids, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if progress:
            progress(1)
    return WarmStart(model, tokenizer, tuple(losses))


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Build a tokenizer with one token for every piece of ``texts``, and one for each byte of other text.

    ``decode(encode(text)) == text`` holds for every text.
    """
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_PIECES), "isolated"), to_bytes])
    pieces = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    tokens = dict.fromkeys([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *sorted(pieces)])
    # There are no merges, so a piece that is not a token is split into bytes.
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[PAD],
        eos_token=SPECIALS[EOS],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def build_model(config: WarmStartConfig, num_tokens: int) -> LlamaForCausalLM:
    """Create an untrained Llama; its vocabulary is padded to a multiple of 64."""
    heads = config.hidden_size // _HEAD_SIZE
    return LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=-(-num_tokens // 64) * 64,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=_HEAD_SIZE,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def _make_optimizers(model: nn.Module, config: WarmStartConfig) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=config.matrix_lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def scale_lr(step: int, config: WarmStartConfig) -> float:
    """Return the factor on the learning rates at ``step``, from 0: it rises during the warm-up, then falls to 0."""
    return min((step + 1) / (config.warmup_steps + 1), (config.num_steps - step) / config.num_steps)


def compute_loss(model: LlamaForCausalLM, input_ids: Int[Tensor, "B T"], labels: Int[Tensor, "B T"]) -> Tensor:
    """Return the mean cross-entropy of the completion tokens; only positions that predict one reach the head."""
    hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    counted = targets != _IGNORED
    return nn.functional.cross_entropy(model.lm_head(hidden[counted]), targets[counted])


def _make_batches(
    problems: Sequence[Problem],
    second_turns: Sequence[Example],
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    config: WarmStartConfig,
) -> Iterator[tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]]:
    """Yield endless batches of ids and labels, padded on the right, of examples of similar length."""
    for epoch in itertools.count():
        seed = derive_seed(config.seed, "epoch", epoch)
        rng = random.Random(seed)
        examples = [*make_first_turns(problems, recipe, seed), *second_turns]
        rng.shuffle(examples)
        for start in range(0, len(examples), config.batch_size * _BUCKET):
            rows = [tokenize_example(tokenizer, e) for e in examples[start : start + config.batch_size * _BUCKET]]
            rows.sort(key=lambda row: len(row[0]) + len(row[1]))
            chunks = [rows[i : i + config.batch_size] for i in range(0, len(rows), config.batch_size)]
            rng.shuffle(chunks)
            yield from map(pad_rows, chunks)


def tokenize_example(tokenizer: PreTrainedTokenizerBase, example: Example) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt, and those of the completion with the end-of-text token."""
    prompt = tokenizer.encode(example.prompt, add_special_tokens=False)
    return prompt, [*tokenizer.encode(example.completion, add_special_tokens=False), EOS]


def pad_rows(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Pad pairs of prompt and completion on the right; returns ids and labels, which are the completions only."""
    input_ids = [torch.tensor([*prompt, *completion]) for prompt, completion in rows]
    labels = [torch.tensor([*[_IGNORED] * len(prompt), *completion]) for prompt, completion in rows]
    return pad_sequence(input_ids, True, PAD), pad_sequence(labels, True, _IGNORED)
