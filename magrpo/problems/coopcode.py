"""``coopcode``: generated problems that two programmers can split, small enough for a CPU.

Every problem composes two or three operations (:mod:`magrpo.problems.operations`), so that a helper can write one part
and the main function the rest. A hash of the operations decides which compositions are kept out of training (``ood``),
a hash that includes the constants which instances are (``test``): the splits are disjoint whatever their sizes.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from magrpo.plugins import ConfigError, Plugin
from magrpo.problems.operations import OPERATIONS, BoundOperation, Kind, Operation, parse_operation
from magrpo.problems.seen_functions import SeenFunctions
from magrpo.seeds import derive_seed
from magrpo.types import Problem, Split

Level = Literal["1", "2", "3"]

_OOD_PERCENT = 12
_TEST_PERCENT = 20
_NUM_TESTS = 5
_NUM_INPUTS = 40
_LARGEST = 10_000
_LONGEST = 40
_LARGEST_PROBED = 1_000_000
_LONGEST_PROBED = 5_000
_NUM_PROBES = 60
_WARM_START: dict[Level, int] = {"1": 3212, "2": 2913, "3": 4267}
"""Number of training compositions of each level, from the first, that contain the problems of ``magrpo warm-start``."""
_VARIABLES: dict[Kind, tuple[str, ...]] = {"int": ("n", "m", "k"), "list": ("xs", "ys", "zs"), "str": ("s", "t", "u")}
_SEPARATORS = {2: (", then ",), 3: (", ", ", then ")}


@dataclass(frozen=True, slots=True)
class Composition:
    """Bound operations applied one after the other, the first to the argument."""

    steps: tuple[BoundOperation, ...]

    @property
    def key(self) -> str:
        return " ".join(step.key for step in self.steps)

    @property
    def family(self) -> str:
        """The operations without their constants."""
        return _family_name([step.operation for step in self.steps])

    @property
    def entry_point(self) -> str:
        return self.family.replace(" ", "_")

    @property
    def level(self) -> Level:
        """1: two easy operations; 2: two, at least one of them hard; 3: three."""
        if len(self.steps) > 2:
            return "3"
        return "2" if any(step.operation.hard for step in self.steps) else "1"

    def __call__(self, value: Any) -> Any:
        """The reference result."""
        for step in self.steps:
            value = step(value)
        return value

    @property
    def argument_kind(self) -> Kind:
        """The kind of the argument."""
        return self.steps[0].operation.takes

    def compute_bounded(self, value: Any) -> Any:
        """The result; None if it is undefined or an intermediate value is too large."""
        return _apply(self, value, _LARGEST_PROBED, _LONGEST_PROBED)

    def name_variables(self) -> tuple[str, ...]:
        """Variable names for the argument and every intermediate value, chosen by kind."""
        kinds = [self.steps[0].operation.takes, *(step.operation.gives for step in self.steps[:-1])]
        return tuple(_VARIABLES[kind][kinds[:i].count(kind)] for i, kind in enumerate(kinds))

    def write_function(self, name: str, calls: Mapping[int, str] | None = None) -> str:
        """The source of a function ``name``, one statement a step; step ``i`` calls ``calls[i]`` if that is given."""
        names = self.name_variables()
        lines = [f"def {name}({names[0]}):"]
        for i, step in enumerate(self.steps):
            value = f"{calls[i]}({names[i]})" if calls and i in calls else step.expression(names[i])
            target = f"{names[i + 1]} =" if i + 1 < len(names) else "return"
            lines.append(f"    {target} {value}")
        return "\n".join(lines)


def parse_composition(problem: Problem) -> Composition:
    """The composition that a ``coopcode`` problem was generated from."""
    return Composition(tuple(parse_operation(key) for key in problem.tags["steps"].split()))


class CoopCode(Plugin):
    """Generated problems in the HumanEval form, in equal shares of three levels of difficulty.

    ``test`` combines trained compositions with constants never trained on; ``ood`` holds compositions of operations
    never trained on. Neither contains a problem that computes the same function as a training problem or as a problem
    of the embedded base model's warm start. ``tags``: ``level`` (1, 2 or 3), ``steps`` and ``split``.
    """

    num_train: int = Field(1536, ge=3)
    """Number of training problems."""
    num_test: int = Field(96, ge=3)
    """Number of held-out problems with other constants than in training."""
    num_ood: int = Field(96, ge=3)
    """Number of held-out problems with other combinations of operations than in training."""
    levels: tuple[Level, ...] = Field(("1", "2", "3"), min_length=1)
    """Levels of difficulty, in equal shares. 1: two easy operations; 2: two, at least one of them hard; 3: three."""

    def load(self) -> dict[Split, list[Problem]]:
        """All splits, ordered by level and then in a fixed random order.

        Raises:
            ConfigError: a split cannot be as large as requested.
        """
        train: list[Problem] = []
        test: list[Problem] = []
        ood: list[Problem] = []
        held_out = []
        for i, level in enumerate(self.levels):
            families = _list_families(level)
            trained = [family for family in families if not _is_ood(family)]
            train += self._take("train", i, self.num_train, _list_compositions(trained, "train"))
            # Compositions met in training come first; with a large training split, no others are used.
            met = {parse_composition(problem).family for problem in train}
            trained.sort(key=lambda family: _family_name(family) not in met)
            held_out.append((trained, [family for family in families if _is_ood(family)]))
        seen = _collect_seen_functions(train)
        for i, (trained, others) in enumerate(held_out):
            test += self._take("test", i, self.num_test, _drop_seen(_list_compositions(trained, "test"), seen))
            ood += self._take("ood", i, self.num_ood, _drop_seen(_list_compositions(others, "ood"), seen))
        return {"train": train, "test": test, "ood": ood}

    def _take(self, split: Split, index: int, total: int, compositions: Iterable[Composition]) -> list[Problem]:
        levels = len(self.levels)
        number = total // levels + (index < total % levels)
        made = (problem for c in compositions if (problem := make_problem(c, split)))
        problems = list(itertools.islice(made, number))
        if len(problems) < number:
            raise ConfigError(
                f"problems.num_{split}: there are {len(problems)} problems of level {self.levels[index]} in this "
                f"split, but {number} are needed; lower problems.num_{split}"
            )
        return problems


def make_problem(composition: Composition, split: Split) -> Problem | None:
    """The problem in the HumanEval form; None if no five tests distinguish the composition from its proper parts."""
    rng = random.Random(derive_seed("coopcode", "problem", composition.key))
    tests = _make_tests(composition, rng)
    if tests is None:
        return None
    text = "".join(
        separator + step.format_phrase(rng.randrange(2))
        for separator, step in zip(("", *_SEPARATORS[len(composition.steps)]), composition.steps, strict=True)
    )
    signature, *body = composition.write_function(composition.entry_point).splitlines(keepends=True)
    asserts = "".join(f"    assert candidate({given!r}) == {expected!r}\n" for given, expected in tests)
    return Problem(
        task_id=f"coopcode/{composition.key.replace(' ', '/')}",
        prompt=f'{signature}    """{text[0].upper()}{text[1:]}."""\n',
        entry_point=composition.entry_point,
        test=f"def check(candidate):\n{asserts}",
        canonical_solution="".join(body) + "\n",
        tags={"level": composition.level, "steps": composition.key, "split": split},
    )


def _list_families(level: Level) -> list[tuple[Operation, ...]]:
    """All sequences of distinct operations of one level with matching kinds, in a fixed random order."""
    operations = list(OPERATIONS.values())
    pairs = [(a, b) for a in operations for b in operations if a is not b and a.gives == b.takes]
    families: list[tuple[Operation, ...]]
    if level == "3":
        after = {a.name: [c for b, c in pairs if b is a] for a in operations}
        families = [(a, b, c) for a, b in pairs for c in after[b.name] if c is not a]
    else:
        families = [(a, b) for a, b in pairs if (a.hard or b.hard) == (level == "2")]
    random.Random(derive_seed("coopcode", "families", level)).shuffle(families)
    return families


def _family_name(family: Sequence[Operation]) -> str:
    return " ".join(operation.name for operation in family)


def _percentile(*parts: str) -> int:
    return derive_seed("coopcode", *parts) % 100


@functools.cache
def _is_kept_out(first: str, second: str) -> bool:
    return _percentile("ood", first, second) < _OOD_PERCENT


def _is_ood(family: Sequence[Operation]) -> bool:
    """Whether a pair of neighbours in ``family`` is kept out of training."""
    return any(_is_kept_out(a.name, b.name) for a, b in itertools.pairwise(family))


def _list_compositions(families: Sequence[tuple[Operation, ...]], split: Split) -> Iterator[Composition]:
    """Compositions of every family, one set of constants a round, each family's sets in a fixed random order."""
    queues = [_bind_constants(family, split) for family in families]
    while queues:
        alive = []
        for queue in queues:
            composition = next(queue, None)
            if composition is not None:
                alive.append(queue)
                yield composition
        queues = alive


def _bind_constants(family: tuple[Operation, ...], split: Split) -> Iterator[Composition]:
    sets = list(itertools.product(*(operation.constants or ("",) for operation in family)))
    random.Random(derive_seed("coopcode", "constants", *(operation.name for operation in family))).shuffle(sets)
    for constants in sets:
        composition = Composition(tuple(BoundOperation(*pair) for pair in zip(family, constants, strict=True)))
        held_out = len(sets) > 1 and _percentile("test", composition.key) < _TEST_PERCENT
        if split == "ood" or held_out == (split == "test"):
            yield composition


def _collect_seen_functions(train: Sequence[Problem]) -> SeenFunctions:
    """The functions computed by ``train`` and by the problems of the embedded base model's warm start."""
    steps = {problem.tags["steps"] for problem in train}
    compositions = [parse_composition(problem) for problem in train]
    for level, number in _WARM_START.items():
        trained = [family for family in _list_families(level) if not _is_ood(family)]
        warm_start = itertools.islice(_list_compositions(trained, "train"), number)
        compositions += [composition for composition in warm_start if composition.key not in steps]
    seen = SeenFunctions(_make_probes())
    for composition in compositions:
        seen.add_function(composition.argument_kind, composition.compute_bounded)
    return seen


def _drop_seen(compositions: Iterable[Composition], seen: SeenFunctions) -> Iterator[Composition]:
    return (one for one in compositions if not seen.has_equal(one.argument_kind, one.compute_bounded))


@functools.cache
def _make_probes() -> Mapping[str, Sequence[Any]]:
    """Inputs of every kind that distinguish functions; the first are small enough for all operations."""
    rng = random.Random(derive_seed("coopcode", "probes"))
    small: dict[Kind, list[Any]] = {
        "int": [7, 24],
        "list": [[3, -2, 7, 7, 4, 12], [-5, 9, 2, 2, 1, 8, 3]],
        "str": ["Rat oEs", "teA dbo St"],
    }
    return {kind: [*small[kind], *(draw(rng) for _ in range(_NUM_PROBES))] for kind, draw in _INPUTS.items()}


def _make_tests(composition: Composition, rng: random.Random) -> list[tuple[Any, Any]] | None:
    """Five inputs with their results; on each, every proper part of the composition gives a different result."""
    steps = composition.steps
    parts = [Composition(part) for size in range(len(steps)) for part in itertools.combinations(steps, size)]
    tests: dict[str, tuple[Any, Any]] = {}
    for _ in range(_NUM_INPUTS):
        given = _INPUTS[steps[0].operation.takes](rng)
        expected = _apply(composition, given)
        if expected in (None, [], "") or any(_apply(part, given) == expected for part in parts):
            continue
        tests[repr(given)] = (given, expected)
        if len(tests) == _NUM_TESTS:
            return list(tests.values()) if len({repr(result) for _, result in tests.values()}) > 2 else None
    return None


def _apply(composition: Composition, value: Any, largest: int = _LARGEST, longest: int = _LONGEST) -> Any:
    """The result; None if it is undefined or an intermediate value is too large."""
    try:
        for step in composition.steps:
            value = step(value)
            if not _is_small(value, largest, longest):
                return None
    except (TypeError, ValueError, AttributeError):
        return None
    return value


def _is_small(value: Any, largest: int, longest: int) -> bool:
    if isinstance(value, int):
        return abs(value) < largest
    return len(value) < longest and all(isinstance(item, str) or abs(item) < largest for item in value)


def _integer(rng: random.Random) -> int:
    return rng.choice((rng.randint(-40, 99), rng.randint(2, 40), rng.randint(100, 999)))


def _list(rng: random.Random) -> list[int]:
    pool = [rng.randint(-9, 19) for _ in range(rng.randint(4, 7))]
    return [rng.choice(pool) if rng.random() < 0.3 else rng.randint(-9, 19) for _ in range(rng.randint(5, 8))]


def _text(rng: random.Random) -> str:
    words = [
        "".join(rng.choice("aaeeiourstbdlmnAEORST") for _ in range(rng.randint(2, 5))) for _ in range(rng.randint(2, 3))
    ]
    return " ".join(words)


_INPUTS: dict[Kind, Callable[[random.Random], Any]] = {"int": _integer, "list": _list, "str": _text}
