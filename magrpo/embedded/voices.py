"""Conventions of authors: how many facts of a note an author tells, and how the sentences are joined.

Each author of the warm start draws a convention independently of the other. The two texts fit each other only by
chance; training has to make them fit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from magrpo.problems.notes import Fact, format_sentence, parse_facts
from magrpo.seeds import derive_seed
from magrpo.types import Problem

ROLES = ("summary", "elaboration")
LENGTHS: Mapping[str, Mapping[int, float]] = {
    "summary": {0: 0.10, 1: 0.25, 2: 0.30, 3: 0.25, 4: 0.10},
    "elaboration": {1: 0.20, 2: 0.30, 3: 0.25, 4: 0.15, 5: 0.10},
}
"""Probability of each number of facts told, by role. 0: the title alone."""
MANNERS = ("plain", "linked")
"""Bare sentences, or sentences introduced and joined by transition words; equally likely."""
_VARIANTS = 64

_LEADS: Mapping[str, tuple[str, ...]] = {
    "start": ("to begin with,", "recently,", "at first,", "initially,"),
    "reason": ("of course,", "in fact,", "above all,", "clearly,"),
    "trouble": ("however,", "at the same time,", "even so,", "indeed,"),
    "help": ("then", "in addition,", "meanwhile,", "after that,"),
    "result": ("in the end,", "as a result,", "finally,", "nevertheless,"),
    "lesson": ("overall,", "in short,", "all in all,", "certainly,"),
}
_JOINS = {
    ("start", "reason"): "because",
    ("start", "trouble"): "but",
    ("reason", "trouble"): "but",
    ("trouble", "help"): "until",
    ("help", "result"): "so",
    ("result", "lesson"): "and",
}


class Voices:
    """The conventions of the warm start's authors. A convention names length, manner and variant: ``3 linked 17``."""

    roles: tuple[str, ...] = ROLES

    def draw(self, rng: random.Random, role: str) -> str:
        length = rng.choices(list(LENGTHS[role]), list(LENGTHS[role].values()))[0]
        return f"{length} {rng.choice(MANNERS)} {rng.randrange(_VARIANTS)}"

    def all(self, role: str) -> Iterator[str]:
        """The longest texts in either manner; together they contain every word."""
        return (f"{max(LENGTHS[role])} {manner} 0" for manner in MANNERS)

    def write(self, problem: Problem, role: str, convention: str) -> str:
        length, manner, _ = convention.split()
        rng = random.Random(derive_seed(problem.task_id, role, convention))
        facts = parse_facts(problem)
        chosen = sorted(rng.sample(range(len(facts)), min(int(length), len(facts))))
        if not chosen:
            return problem.prompt.partition("\n")[0]
        facts_told = [facts[i] for i in chosen]
        sentences = _link_sentences(facts_told, rng) if manner == "linked" else [fact.words for fact in facts_told]
        return " ".join(map(format_sentence, sentences))

    def flawed(self, problem: Problem, role: str, convention: str, rng: random.Random) -> str:
        """A text that breaks off within a few words."""
        return " ".join(self.write(problem, role, convention).split()[: rng.randint(2, 7)])


def _link_sentences(facts: Sequence[Fact], rng: random.Random) -> list[str]:
    sentences: list[str] = []
    for before, fact in zip([None, *facts], facts, strict=False):
        join = _JOINS.get((before.kind, fact.kind)) if before else None
        if join and rng.random() < 0.4:
            sentences[-1] += f", {join} {fact.words}"
        else:
            sentences.append(f"{rng.choice(_LEADS[fact.kind])} {fact.words}" if rng.random() < 0.7 else fact.words)
    return sentences
