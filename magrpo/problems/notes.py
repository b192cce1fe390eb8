"""``notes``: short generated posts for two authors to summarise, small enough for a CPU.

A note is a title and three to six sentences, one for each kind of fact in it (:data:`KINDS`). The sentences were
written for this project (``notes.toml``), and each note draws its own selection.
"""

import itertools
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from magrpo.plugins import Plugin
from magrpo.seeds import derive_seed
from magrpo.types import Problem, Split

KINDS = ("start", "reason", "trouble", "help", "result", "lesson")
"""The kinds of facts, in their order in a note."""
_ALWAYS = frozenset({"start", "trouble", "result"})
"""The kinds of facts that every note has. With the topic, they are its story."""
_TEST_PERCENT = 20
_MOST = 20_000
_CORPUS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class Notes(Plugin):
    """Notes of ten topics in equal shares. ``tags``: ``topic`` and ``facts``, the kind of each sentence.

    ``test`` holds stories never trained on: the combination of start, trouble and result does not occur in ``train``,
    though each of the three does.
    """

    num_train: int = Field(1536, ge=1, le=_MOST)
    """Number of training notes."""
    num_test: int = Field(96, ge=1, le=_MOST // 10)
    """Number of held-out notes."""

    def load(self) -> dict[Split, list[Problem]]:
        """Draw ``train`` and ``test``, in which topics alternate."""
        sizes: dict[Split, int] = {"train": self.num_train, "test": self.num_test}
        return {split: list(itertools.islice(_draw_notes(split), size)) for split, size in sizes.items()}


def format_sentence(words: str) -> str:
    """Add an initial capital and a full stop."""
    return f"{words[0].upper()}{words[1:]}."


def _draw_notes(split: Split) -> Iterator[Problem]:
    """Draw distinct notes of one split, without end."""
    topics = list(_CORPUS["topics"])
    seen: set[str] = set()
    for number in itertools.count():
        rng = random.Random(derive_seed("notes", number))
        problem, story = _draw_note(topics[len(seen) % len(topics)], rng)
        held_out = derive_seed("notes", "test", story) % 100 < _TEST_PERCENT
        if held_out == (split == "test") and problem.prompt not in seen:
            seen.add(problem.prompt)
            yield problem


def _draw_note(topic: str, rng: random.Random) -> tuple[Problem, str]:
    """Draw a note; returns it with its story: topic, start, trouble and result."""
    sentences = _CORPUS["topics"][topic]
    slots = {name: rng.choice(values) for name, values in _CORPUS["slots"].items()}
    kinds = [kind for kind in KINDS if kind in _ALWAYS or rng.random() < 0.6]
    chosen = {kind: rng.randrange(len(sentences[kind])) for kind in KINDS}
    body = " ".join(format_sentence(sentences[kind][chosen[kind]].format(**slots)) for kind in kinds)
    prompt = f"{rng.choice(sentences['titles'])}\n{body}"
    story = " ".join([topic, *(str(chosen[kind]) for kind in sorted(_ALWAYS))])
    task_id = f"notes/{topic}/{derive_seed(prompt):016x}"
    return Problem(task_id, prompt, tags={"topic": topic, "facts": " ".join(kinds)}), story
