"""``coopcode``: generated problems that two programmers can split, small enough for a CPU.

Every problem composes two or three operations (:mod:`magrpo.problems.operations`), so that a helper can write one part
and the main function the rest. A hash of the operations decides which compositions are kept out of training (``ood``).
A hash of operations and constants decides which instances are kept out (``test``). The splits are thus disjoint,
whatever their sizes.
"""

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from magrpo.errors import ConfigError
from magrpo.plugins import Plugin, check_unique
from magrpo.problems.operations import (
    OPERATIONS,
    BoundOperation,
    Composition,
    Difficulty,
    Kind,
    Operation,
    parse_composition,
    read_composition,
    split_phrases,
)
from magrpo.seeds import derive_seed
from magrpo.types import Problem, Split

_OOD_PERCENT = 12
_TEST_PERCENT = 20
_NUM_TESTS = 5
_NUM_INPUTS = 40
_LIMITS = 10_000, 40
"""Limits of the values in a problem's tests: the size of integers, and the length of lists and texts."""
_PROBE_LIMITS = 1_000_000, 5_000
"""The same limits for the values by which functions are compared, which no prompt shows."""
_PROBES: dict[Kind, list[Any]] = {
    "int": [7, 24],
    "list": [[3, -2, 7, 7, 4, 12], [-5, 9, 2, 2, 1, 8, 3]],
    "str": ["Rat oEs", "teA dbo St"],
}
"""The first inputs of each kind that distinguish functions, small enough for all operations."""
_NUM_PROBES = 60
_NUM_KEYS = 2
"""Number of inputs whose results form the lookup key. Functions with equal keys are compared on all inputs."""
_WARM_START: dict[Difficulty, int] = {"1": 3212, "2": 2913, "3": 4267}
"""Number of compositions of each level, the first of the train split, that the embedded base model was trained on."""
_SEPARATORS = {2: ("", ", then "), 3: ("", ", ", ", then "), 4: ("", ", ", ", ", ", then ")}


class CoopCode(Plugin):
    """Generated problems in the HumanEval form, in equal shares of three levels of difficulty.

    ``test`` combines trained compositions with constants never trained on; ``ood`` holds compositions of operations
    never trained on. Neither contains a problem that computes the same function as a training problem or as a problem
    of the embedded base model's warm start. ``tags``: ``level`` (1, 2 or 3), ``steps`` and ``split``.
    """

    num_train: int = Field(1536, ge=3)
    """Number of training problems."""
    num_test: int = Field(96, ge=3)
    """Number of held-out problems whose constants differ from those in training."""
    num_ood: int = Field(96, ge=3)
    """Number of held-out problems whose combinations of operations differ from those in training."""
    levels: Annotated[tuple[Difficulty, ...], AfterValidator(check_unique)] = Field(("1", "2", "3"), min_length=1)
    """Levels of difficulty, in equal shares. 1: two easy operations; 2: two operations, at least one of them hard; 3:
    three operations."""

    def load(self) -> dict[Split, list[Problem]]:
        """All splits, ordered by level and then in a fixed random order.

        Raises:
            ConfigError: a split cannot be as large as requested.
        """
        return {split: [*problems] for split, problems in self._generate().items()}

    def read_sentence(self, text: str) -> tuple[Problem | None, str]:
        """Read a sentence of the phrases of operations; see :class:`magrpo.interfaces.ReadsSentences`."""
        composition, remark = read_composition(text)
        if composition is None:
            return None, remark
        problem = make_problem(composition, "test")
        if problem is None:
            return None, "no five tests distinguish it from its parts, so no training problem asks for it"
        return replace(problem, prompt=write_prompt(composition, split_phrases(text))), remark

    @functools.lru_cache(maxsize=4)  # noqa: B019  # takes two seconds, and a process loads the same few sets again and again
    def _generate(self) -> dict[Split, list[Problem]]:
        train: list[Problem] = []
        test: list[Problem] = []
        ood: list[Problem] = []
        families_by_level = []
        for i, level in enumerate(self.levels):
            trained = _list_families(level, held_out=False)
            others = _list_families(level, held_out=True)
            train += self._take("train", i, self.num_train, list_compositions(trained, "train"))
            # For ``test``, compositions met in training come first; with a large training split, no others are used.
            met = {parse_composition(problem).family for problem in train}
            trained.sort(key=lambda family: " ".join(operation.name for operation in family) not in met)
            families_by_level.append((trained, others))
        seen = collect_seen_functions(_list_seen_compositions(train))
        for i, (trained, others) in enumerate(families_by_level):
            test += self._take("test", i, self.num_test, drop_seen(list_compositions(trained, "test"), seen))
            ood += self._take("ood", i, self.num_ood, drop_seen(list_compositions(others, "ood"), seen))
        return {"train": train, "test": test, "ood": ood}

    def _take(self, split: Split, index: int, total: int, compositions: Iterable[Composition]) -> list[Problem]:
        number, remainder = divmod(total, len(self.levels))
        if index < remainder:  # the first levels share the remainder
            number += 1
        return take_problems(compositions, split, number, f"level {self.levels[index]}")


def take_problems(compositions: Iterable[Composition], split: Split, number: int, noun: str) -> list[Problem]:
    """Make the first ``number`` problems of ``compositions``. Raises ConfigError, which calls their kind ``noun``."""
    made = (problem for composition in compositions if (problem := make_problem(composition, split)))
    problems = list(itertools.islice(made, number))
    if len(problems) < number:
        raise ConfigError(
            f"problems.num_{split}: there are {len(problems)} problems of {noun} in this split, but {number} are "
            f"needed; lower problems.num_{split}"
        )
    return problems


def make_problem(composition: Composition, split: Split) -> Problem | None:
    """Make the problem in the HumanEval form; None if no five tests distinguish it from its proper parts."""
    rng = random.Random(derive_seed("coopcode", "problem", composition.key))
    tests = _make_tests(composition, rng)
    if tests is None:
        return None
    phrases = [step.operation.phrases[rng.randrange(2)].format(k=step.constant) for step in composition.steps]
    _, *body = composition.write_function(composition.entry_point).splitlines(keepends=True)
    return Problem(
        task_id=f"coopcode/{composition.key.replace(' ', '/')}",
        prompt=write_prompt(composition, phrases),
        entry_point=composition.entry_point,
        test=_write_check(tests),
        canonical_solution="".join(body) + "\n",
        tags={"level": composition.level, "steps": composition.key, "split": split},
    )


def write_prompt(composition: Composition, phrases: Sequence[str]) -> str:
    """Write the signature, and a docstring that asks for each step by its phrase."""
    signature = composition.write_function(composition.entry_point).partition("\n")[0]
    text = "".join(itertools.chain(*zip(_SEPARATORS[len(phrases)], phrases, strict=True)))
    return f'{signature}\n    """{text[0].upper()}{text[1:]}."""\n'


def _write_check(tests: Sequence[tuple[Any, Any]]) -> str:
    asserts = "".join(f"    assert candidate({given!r}) == {expected!r}\n" for given, expected in tests)
    return f"def check(candidate):\n{asserts}"


def _make_tests(composition: Composition, rng: random.Random) -> list[tuple[Any, Any]] | None:
    """Draw five inputs, with results, on which every proper part of the composition gives a different result."""
    steps = composition.steps
    parts = [Composition(part) for size in range(len(steps)) for part in itertools.combinations(steps, size)]
    tests: dict[str, tuple[Any, Any]] = {}
    for _ in range(_NUM_INPUTS):
        given = _draw_input(composition.argument_kind, rng)
        expected = composition.compute(given, *_LIMITS)
        if expected in (None, [], "") or any(part.compute(given, *_LIMITS) == expected for part in parts):
            continue
        tests[repr(given)] = (given, expected)
        if len(tests) == _NUM_TESTS:
            return list(tests.values()) if len({repr(result) for _, result in tests.values()}) > 2 else None
    return None


def _draw_input(kind: Kind, rng: random.Random) -> Any:
    if kind == "int":
        return rng.choice((rng.randint(-40, 99), rng.randint(2, 40), rng.randint(100, 999)))
    if kind == "list":
        pool = [rng.randint(-9, 19) for _ in range(rng.randint(4, 7))]
        return [rng.choice(pool) if rng.random() < 0.3 else rng.randint(-9, 19) for _ in range(rng.randint(5, 8))]
    letters = "aaeeiourstbdlmnAEORST"
    lengths = (rng.randint(2, 5) for _ in range(rng.randint(2, 3)))
    return " ".join("".join(rng.choice(letters) for _ in range(length)) for length in lengths)


# --------------------------------------------------------------------------------------------------- compositions
def _list_families(level: Difficulty, *, held_out: bool) -> list[tuple[Operation, ...]]:
    """The sequences of distinct operations of one level with matching kinds, in a fixed random order.

    ``held_out`` chooses the sequences with a pair of neighbours that is kept out of training, and else the others.
    """
    operations = list(OPERATIONS.values())
    families: list[tuple[Operation, ...]] = []
    for first, second in itertools.permutations(operations, 2):
        if first.gives != second.takes:
            continue
        if level == "3":
            thirds = [third for third in operations if third.takes == second.gives and third not in (first, second)]
            families += [(first, second, third) for third in thirds]
        elif (first.hard or second.hard) == (level == "2"):
            families.append((first, second))
    random.Random(derive_seed("coopcode", "families", level)).shuffle(families)
    return select_families(families, held_out=held_out)


def select_families(families: Iterable[tuple[Operation, ...]], *, held_out: bool) -> list[tuple[Operation, ...]]:
    """The families with a pair of neighbours that is kept out of training, or those without one."""
    return [
        family
        for family in families
        if any(is_kept_out(first.name, second.name) for first, second in itertools.pairwise(family)) == held_out
    ]


@functools.cache
def is_kept_out(first: str, second: str) -> bool:
    """Whether the operations named ``first`` and ``second`` never follow each other in training."""
    return derive_seed("coopcode", "ood", first, second) % 100 < _OOD_PERCENT


def list_compositions(families: Sequence[tuple[Operation, ...]], split: Split) -> Iterator[Composition]:
    """Compositions in rounds, each with one set of constants for every family; the sets are in a fixed random order."""
    queues = [_bind_constants(family, split) for family in families]
    while queues:
        alive = []
        for queue in queues:
            if composition := next(queue, None):
                alive.append(queue)
                yield composition
        queues = alive


def _bind_constants(family: tuple[Operation, ...], split: Split) -> Iterator[Composition]:
    sets = list(itertools.product(*(operation.constants or ("",) for operation in family)))
    random.Random(derive_seed("coopcode", "constants", *(operation.name for operation in family))).shuffle(sets)
    for constants in sets:
        composition = Composition(tuple(map(BoundOperation, family, constants)))
        in_test = len(sets) > 1 and derive_seed("coopcode", "test", composition.key) % 100 < _TEST_PERCENT
        if split == "ood" or in_test == (split == "test"):
            yield composition


# ------------------------------------------------------------------------------------------------- seen functions
Function = Callable[[Any], Any]
"""A function of one argument, which returns None where it is undefined."""


class SeenFunctions:
    """A set of functions by behaviour. ``inputs``: the inputs that distinguish functions, for each kind of argument.

    Two functions are equal if they agree on every input on which both are defined. The results on the first two inputs
    form the lookup key, so equal functions must be defined on the same of these two.
    """

    def __init__(self, inputs: Mapping[str, Sequence[Any]]) -> None:
        self._inputs = inputs
        self._seen: dict[Hashable, list[Function]] = defaultdict(list)

    def add_function(self, kind: str, function: Function) -> None:
        """Add a function of an argument of ``kind``."""
        self._seen[self._make_key(kind, function)].append(function)

    def has_equal(self, kind: str, function: Function) -> bool:
        """Whether the set holds an equal function."""
        for other in self._seen.get(self._make_key(kind, function), []):
            results = ((function(value), other(value)) for value in self._inputs[kind])
            if all(mine is None or theirs is None or mine == theirs for mine, theirs in results):
                return True
        return False

    def _make_key(self, kind: str, function: Function) -> Hashable:
        return kind, repr([function(value) for value in self._inputs[kind][:_NUM_KEYS]])


def _list_seen_compositions(train: Sequence[Problem]) -> Iterable[Composition]:
    """List the compositions of ``train``, and of the problems that the embedded base model was trained on."""
    compositions = {problem.tags["steps"]: parse_composition(problem) for problem in train}
    for level, number in _WARM_START.items():
        warm_start = list_compositions(_list_families(level, held_out=False), "train")
        compositions |= {composition.key: composition for composition in itertools.islice(warm_start, number)}
    return compositions.values()


def collect_seen_functions(compositions: Iterable[Composition]) -> SeenFunctions:
    """Collect the functions of ``compositions``."""
    rng = random.Random(derive_seed("coopcode", "probes"))
    seen = SeenFunctions(
        {kind: [*first, *(_draw_input(kind, rng) for _ in range(_NUM_PROBES))] for kind, first in _PROBES.items()}
    )
    for composition in compositions:
        seen.add_function(composition.argument_kind, functools.partial(_compute_probe, composition))
    return seen


def drop_seen(compositions: Iterable[Composition], seen: SeenFunctions) -> Iterator[Composition]:
    """Leave out the compositions that compute a function of ``seen``."""
    for composition in compositions:
        if not seen.has_equal(composition.argument_kind, functools.partial(_compute_probe, composition)):
            yield composition


def _compute_probe(composition: Composition, value: Any) -> Any:
    return composition.compute(value, *_PROBE_LIMITS)
