"""Ways of splitting a ``coopcode`` problem between a helper and a main function.

Each agent of the warm start follows one of its role's conventions, drawn without regard to the other's. The programs
work only where the two happen to agree, and that is what training has to bring about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from magrpo.problems.coopcode import Composition

Role = Literal["helper", "main"]
AUX = "aux"

WEIGHTS: Mapping[Role, Mapping[str, float]] = {
    "helper": {"first": 0.4, "last": 0.35, "all": 0.15, "nothing": 0.1},
    "main": {"first": 0.4, "last": 0.35, "all": 0.15, "nothing": 0.1},
}
"""How often each convention occurs: which part of the work the agent takes to be the helper's."""


def write(composition: Composition, role: Role, convention: str) -> str:
    """The completion of the agent in ``role``: ``convention`` is the part it takes to be the helper's work.

    ``first`` and ``last``: that step; ``all``: the whole, so that the main function only passes its argument on;
    ``nothing``: the main function does everything itself, and the helper hands its argument back.
    """
    steps = composition.steps
    if role == "helper":
        part = {"first": steps[:1], "last": steps[-1:], "all": steps, "nothing": ()}[convention]
        if not part:
            name = composition.variables()[0]
            return f"def {AUX}({name}):\n    return {name}"
        return Composition(part).define(AUX)
    name = composition.entry_point
    if convention == "all":
        argument = composition.variables()[0]
        return f"def {name}({argument}):\n    return {AUX}({argument})"
    calls = {"first": {0: AUX}, "last": {len(steps) - 1: AUX}, "nothing": {}}[convention]
    return composition.define(name, calls)
