"""Conventions of the demonstrations: how programmers divide a ``coopcode`` problem, and how authors retell a note.

Each agent draws one of its role's conventions independently of the other agent. So a program works, or two texts fit
together, only by chance; training has to make the agents agree.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from magrpo.problems.notes import format_sentence
from magrpo.problems.operations import OPERATIONS, BoundOperation, Composition, parse_composition
from magrpo.seeds import derive_seed
from magrpo.types import Problem

AUX = "aux"

_SHARES = {"first": 0.4, "last": 0.35, "all": 0.15, "nothing": 0.1}
WEIGHTS: Mapping[str, Mapping[str, float]] = {"helper": _SHARES, "main": _SHARES}
"""Probability of each convention: the part of the work that the agent expects of the helper."""
LENGTHS: Mapping[str, Mapping[int, float]] = {
    "summary": {0: 0.10, 1: 0.25, 2: 0.30, 3: 0.25, 4: 0.10},
    "elaboration": {1: 0.20, 2: 0.30, 3: 0.25, 4: 0.15, 5: 0.10},
}
"""Probability of each number of facts in a text, by role. 0: only the title."""
MANNERS = ("plain", "linked")
"""Styles of text: bare sentences, or sentences introduced and joined by transition words; equally likely."""
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


class Conventions(Protocol):
    """How the agents of a warm start write about a problem; each agent draws its own convention independently."""

    roles: tuple[str, ...]

    def draw(self, rng: random.Random, role: str) -> str:
        """Draw the name of a convention."""

    def all(self, role: str) -> Iterable[str]:
        """List conventions whose texts, over all problems, contain every word that any text can contain."""

    def write(self, problem: Problem, role: str, convention: str) -> str:
        """Write the completion of the agent in ``role``; equal arguments give equal texts."""

    def flawed(self, problem: Problem, role: str, convention: str, rng: random.Random) -> str:
        """Write the completion of the agent in ``role`` with a mistake."""


class Divisions:
    """The conventions of programmers."""

    roles: tuple[str, ...] = ("helper", "main")

    def draw(self, rng: random.Random, role: str) -> str:
        return rng.choices(list(WEIGHTS[role]), list(WEIGHTS[role].values()))[0]

    def all(self, role: str) -> Iterable[str]:
        return WEIGHTS[role]

    def write(self, problem: Problem, role: str, convention: str) -> str:
        return write_completion(parse_composition(problem), role, convention)

    def flawed(self, problem: Problem, role: str, convention: str, rng: random.Random) -> str:
        """Write the completion with one step replaced by another, or cut off in its last line."""
        composition = parse_composition(problem)
        if rng.random() < 0.3:
            text = write_completion(composition, role, convention)
            return text[: rng.randrange(text.rindex("return") + len("return"), len(text))]
        steps = list(composition.steps)
        i = rng.randrange(len(steps))
        kinds = steps[i].operation.takes, steps[i].operation.gives
        alike = [operation for operation in OPERATIONS.values() if (operation.takes, operation.gives) == kinds]
        steps[i] = rng.choice(
            [BoundOperation(operation, k) for operation in alike for k in operation.constants or [""]]
        )
        other = Composition(tuple(steps))
        text = write_completion(other, role, convention)
        return text.replace(f"def {other.entry_point}(", f"def {composition.entry_point}(")


def write_completion(composition: Composition, role: str, convention: str) -> str:
    """Write the completion of the agent in ``role``; ``convention`` is the part it expects of the helper.

    ``first`` or ``last``: that step; ``all``: every step, so the main function only passes its argument on;
    ``nothing``: the main function does everything, and the helper returns its argument.
    """
    steps = composition.steps
    argument = composition.name_variables()[0]
    if role == "helper":
        part = {"first": steps[:1], "last": steps[-1:], "all": steps, "nothing": ()}[convention]
        return Composition(part).write_function(AUX) if part else f"def {AUX}({argument}):\n    return {argument}"
    if convention == "all":
        return f"def {composition.entry_point}({argument}):\n    return {AUX}({argument})"
    lines = composition.write_function(composition.entry_point).split("\n")
    if convention != "nothing":
        i = {"first": 0, "last": len(steps) - 1}[convention]
        variable = composition.name_variables()[i]
        lines[i + 1] = f"{lines[i + 1].removesuffix(steps[i].write_expression(variable))}{AUX}({variable})"
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence of a note: its kind, and its words without the initial capital and the full stop."""

    kind: str
    words: str


def parse_facts(problem: Problem) -> list[Fact]:
    """Parse the sentences of a note, in order."""
    sentences = problem.prompt.partition("\n")[2].removesuffix(".").split(". ")
    words = [text if text.startswith("I ") else f"{text[0].lower()}{text[1:]}" for text in sentences]
    return [Fact(*pair) for pair in zip(problem.tags["facts"].split(), words, strict=True)]


class Voices:
    """The conventions of authors. A convention names the length, the manner and the variant: ``3 linked 17``."""

    roles: tuple[str, ...] = ("summary", "elaboration")

    def draw(self, rng: random.Random, role: str) -> str:
        length = rng.choices(list(LENGTHS[role]), list(LENGTHS[role].values()))[0]
        return f"{length} {rng.choice(MANNERS)} {rng.randrange(_VARIANTS)}"

    def all(self, role: str) -> Iterator[str]:
        """List the longest texts in either manner, which together contain every word."""
        return (f"{max(LENGTHS[role])} {manner} 0" for manner in MANNERS)

    def write(self, problem: Problem, role: str, convention: str) -> str:
        length, manner, _ = convention.split()
        rng = random.Random(derive_seed(problem.task_id, role, convention))
        facts = parse_facts(problem)
        told = [facts[i] for i in sorted(rng.sample(range(len(facts)), min(int(length), len(facts))))]
        if not told:
            return problem.prompt.partition("\n")[0]
        sentences = _link_sentences(told, rng) if manner == "linked" else [fact.words for fact in told]
        return " ".join(map(format_sentence, sentences))

    def flawed(self, problem: Problem, role: str, convention: str, rng: random.Random) -> str:
        """Write a text that breaks off within a few words."""
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
