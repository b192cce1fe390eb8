"""Conventions of programmers: ways of splitting a ``coopcode`` problem between a helper and a main function.

Each agent of the warm start draws one of its role's conventions independently of the other agent. A program works only
if the two happen to agree; training has to make them agree.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from magrpo.problems.operations import OPERATIONS, BoundOperation, Composition, parse_composition
from magrpo.types import Problem

AUX = "aux"

WEIGHTS: Mapping[str, Mapping[str, float]] = {
    "helper": {"first": 0.4, "last": 0.35, "all": 0.15, "nothing": 0.1},
    "main": {"first": 0.4, "last": 0.35, "all": 0.15, "nothing": 0.1},
}
"""Probability of each convention. A convention is the part of the work that the agent expects of the helper."""


class Divisions:
    """The conventions of the warm start's programmers. See :class:`magrpo.interfaces.Conventions`."""

    roles: tuple[str, ...] = ("helper", "main")

    def draw(self, rng: random.Random, role: str) -> str:
        return rng.choices(list(WEIGHTS[role]), list(WEIGHTS[role].values()))[0]

    def all(self, role: str) -> Iterable[str]:
        return WEIGHTS[role]

    def write(self, problem: Problem, role: str, convention: str) -> str:
        return write_completion(parse_composition(problem), role, convention)

    def flawed(self, problem: Problem, role: str, convention: str, rng: random.Random) -> str:
        """The completion with one step replaced by another, or cut off in its last line."""
        composition = parse_composition(problem)
        if rng.random() < 0.3:
            text = write_completion(composition, role, convention)
            return text[: rng.randrange(text.rindex("return") + len("return"), len(text))]
        steps = list(composition.steps)
        i = rng.randrange(len(steps))
        wrong = rng.choice(
            [
                BoundOperation(other, constant)
                for other in OPERATIONS.values()
                if (other.takes, other.gives) == (steps[i].operation.takes, steps[i].operation.gives)
                for constant in other.constants or ("",)
            ]
        )
        other = Composition((*steps[:i], wrong, *steps[i + 1 :]))
        return write_completion(other, role, convention).replace(
            f"def {other.entry_point}(", f"def {composition.entry_point}("
        )


def write_completion(composition: Composition, role: str, convention: str) -> str:
    """The completion of the agent in ``role``; ``convention`` is the part it expects of the helper.

    ``first`` and ``last``: that step; ``all``: everything, the main function only passes its argument on; ``nothing``:
    the main function does everything, the helper returns its argument.
    """
    steps = composition.steps
    if role == "helper":
        part = {"first": steps[:1], "last": steps[-1:], "all": steps, "nothing": ()}[convention]
        if not part:
            name = composition.name_variables()[0]
            return f"def {AUX}({name}):\n    return {name}"
        return Composition(part).write_function(AUX)
    name = composition.entry_point
    if convention == "all":
        argument = composition.name_variables()[0]
        return f"def {name}({argument}):\n    return {AUX}({argument})"
    calls = {"first": {0: AUX}, "last": {len(steps) - 1: AUX}, "nothing": {}}[convention]
    return composition.write_function(name, calls)
