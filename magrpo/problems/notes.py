"""``notes``: short generated posts for two authors to summarise, for runs on a CPU.

A note is a title and three to six sentences, each of which tells one thing (:data:`KINDS`): what was begun, why, what
went wrong, who helped, how it ended, what it cost or taught. The sentences were written for this project
(``notes.toml``); which of them a note is made of is drawn.
"""

from __future__ import annotations

import itertools
import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from magrpo.plugins import Plugin
from magrpo.seeds import derive_seed
from magrpo.types import Problem, Split

KINDS = ("start", "reason", "trouble", "help", "result", "lesson")
"""What sentences tell, in the order in which they do."""
_ALWAYS = frozenset({"start", "trouble", "result"})
_TEST_PERCENT = 20
_MOST = 20_000


@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence of a note: its kind, and its words without the capital at the start and the full stop."""

    kind: str
    words: str


class Notes(Plugin):
    """Notes of ten topics in equal shares. ``tags``: ``topic`` and ``facts``, the kind of each sentence.

    ``test`` holds stories never trained on: what was begun, what went wrong and how it ended do not occur together in
    ``train``, though each of them does.
    """

    num_train: int = Field(1536, ge=1, le=_MOST)
    """Notes to train on."""
    num_test: int = Field(96, ge=1, le=_MOST // 10)
    """Held-out notes."""

    def load(self) -> dict[Split, list[Problem]]:
        """``train`` and ``test``, the topics in turn."""
        return {
            "train": list(itertools.islice(_notes("train"), self.num_train)),
            "test": list(itertools.islice(_notes("test"), self.num_test)),
        }


def parse_facts(problem: Problem) -> list[Fact]:
    """The sentences of a note, in order."""
    text = problem.prompt.partition("\n")[2]
    sentences = text.removesuffix(".").split(". ")
    return [Fact(*pair) for pair in zip(problem.tags["facts"].split(), map(_lower, sentences), strict=True)]


def format_sentence(words: str) -> str:
    """Words as a sentence."""
    return f"{words[0].upper()}{words[1:]}."


def _lower(text: str) -> str:
    return text if text.startswith("I ") else f"{text[0].lower()}{text[1:]}"


@cache
def _corpus() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _notes(split: Split) -> Iterator[Problem]:
    """Different notes of one split, without end."""
    topics = list(_corpus()["topics"])
    seen: set[str] = set()
    for number in itertools.count():
        rng = random.Random(derive_seed("notes", number))
        problem, story = _note(topics[len(seen) % len(topics)], rng)
        held_out = derive_seed("notes", "test", story) % 100 < _TEST_PERCENT
        if held_out == (split == "test") and problem.prompt not in seen:
            seen.add(problem.prompt)
            yield problem


def _note(topic: str, rng: random.Random) -> tuple[Problem, str]:
    """A note, and what it is about without its details."""
    sentences = _corpus()["topics"][topic]
    slots = {name: rng.choice(values) for name, values in _corpus()["slots"].items()}
    told = [kind for kind in KINDS if kind in _ALWAYS or rng.random() < 0.6]
    chosen = {kind: rng.randrange(len(sentences[kind])) for kind in KINDS}
    body = " ".join(format_sentence(sentences[kind][chosen[kind]].format(**slots)) for kind in told)
    prompt = f"{rng.choice(sentences['titles'])}\n{body}"
    story = " ".join([topic, *(str(chosen[kind]) for kind in sorted(_ALWAYS))])
    task_id = f"notes/{topic}/{derive_seed(prompt):016x}"
    return Problem(task_id, prompt, tags={"topic": topic, "facts": " ".join(told)}), story
