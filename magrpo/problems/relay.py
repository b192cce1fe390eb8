"""``relay``: generated problems of which each of two programmers sees only a part.

A problem composes three or four operations of ``coopcode``. The first programmer is shown the first two of them
(``tags["first"]``), the second programmer the last two (``tags["second"]``). With three operations both are shown the
middle one, and exactly one of them must do it; with four, both must do all they see. No view shows which is the case.
"""

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic import Field

from magrpo.plugins import Plugin
from magrpo.problems.coopcode import (
    collect_seen_functions,
    drop_seen,
    list_compositions,
    select_families,
    take_problems,
    write_prompt,
)
from magrpo.problems.operations import OPERATIONS, Composition, Kind, Operation, parse_composition, split_phrases
from magrpo.seeds import derive_seed
from magrpo.types import Problem, Split

_VIEWS: Mapping[str, slice] = {"first": slice(0, 2), "second": slice(-2, None)}
_TURNS: Sequence[tuple[Kind, Kind]] = (("list", "int"), ("int", "list"))
"""Kinds that the step at the seam takes and gives. It changes the kind, so doing it twice, or not at all, fails."""


class Relay(Plugin):
    """Problems of which each of two programmers sees two steps: the first two, or the last two.

    Splits are held out as in ``coopcode``: ``test`` has trained compositions with other constants, ``ood`` pairs of
    neighbours that are never trained on. ``tags``: ``level``, the number of steps; ``steps``;
    ``first`` and ``second``, what each programmer is shown.
    """

    num_train: int = Field(768, ge=4)
    """Number of training problems."""
    num_test: int = Field(96, ge=4)
    """Number of held-out problems whose constants differ from those in training."""
    num_ood: int = Field(96, ge=4)
    """Number of held-out problems with pairs of neighbouring operations that training does not have."""
    apart_frac: float = Field(0.0, ge=0, le=1)
    """Share of problems of four steps, in which no step is shown to both programmers. In the others there are three,
    the middle one is shown to both, and exactly one of them must do it. No view shows which is the case."""

    def load(self) -> dict[Split, list[Problem]]:
        """All splits, ordered by number of steps and kind of the seam, then in a fixed random order.

        Raises:
            ConfigError: a split cannot be as large as requested.
        """
        return {split: [*problems] for split, problems in self._generate().items()}

    @functools.lru_cache(maxsize=4)  # noqa: B019  # takes seconds, and a process loads the same few sets again and again
    def _generate(self) -> dict[Split, list[Problem]]:
        strata = list(itertools.product((3, 4), _TURNS))
        trained = [_list_families(length, kinds, held_out=False) for length, kinds in strata]
        others = [_list_families(length, kinds, held_out=True) for length, kinds in strata]
        train = self._take("train", self.num_train, [list_compositions(families, "train") for families in trained])
        seen = collect_seen_functions(map(parse_composition, train))
        in_test = [drop_seen(list_compositions(families, "test"), seen) for families in trained]
        in_ood = [drop_seen(list_compositions(families, "ood"), seen) for families in others]
        return {
            "train": train,
            "test": self._take("test", self.num_test, in_test),
            "ood": self._take("ood", self.num_ood, in_ood),
        }

    def _take(self, split: Split, total: int, strata: Sequence[Iterator[Composition]]) -> list[Problem]:
        """Take problems of three and of four steps, half of either with each kind of seam."""
        problems: list[Problem] = []
        num_apart = round(total * self.apart_frac)
        numbers = [*_halve(total - num_apart), *_halve(num_apart)]
        for number, compositions in zip(numbers, strata, strict=True):
            problems += map(_add_views, take_problems(compositions, split, number, "one kind"))
        return problems


def _halve(number: int) -> tuple[int, int]:
    """Split a number into two halves; the first one is larger by 1 if the number is odd."""
    return number - number // 2, number // 2


def _add_views(problem: Problem) -> Problem:
    """Add what each programmer is shown, which looks like a problem of its own, named after the steps shown."""
    _, text, _ = problem.prompt.split('"""')
    steps, phrases = parse_composition(problem).steps, split_phrases(text)
    views = {role: write_prompt(Composition(steps[part]), phrases[part]) for role, part in _VIEWS.items()}
    task_id = f"relay/{problem.task_id.removeprefix('coopcode/')}"
    return replace(problem, task_id=task_id, tags={"level": str(len(steps)), "steps": problem.tags["steps"], **views})


def _list_families(length: int, kinds: tuple[Kind, Kind], *, held_out: bool) -> list[tuple[Operation, ...]]:
    """List the sequences of distinct operations whose second step takes and gives ``kinds``, in a fixed random order.

    With four steps the third one turns the kind back, so that either view could be one of three steps.
    """
    operations = list(OPERATIONS.values())
    seam = [[one for one in operations if (one.takes, one.gives) == kinds]]
    if length > 3:
        seam.append([one for one in operations if (one.takes, one.gives) == kinds[::-1]])
    before = [one for one in operations if one.gives == seam[0][0].takes]
    after = [one for one in operations if one.takes == seam[-1][0].gives]
    families = [family for family in itertools.product(before, *seam, after) if len(set(family)) == length]
    random.Random(derive_seed("relay", "families", length, *kinds)).shuffle(families)
    return select_families(families, held_out=held_out)
