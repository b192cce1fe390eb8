"""Demonstrate: examples of agents that write correct code, each by a convention of its own for splitting the work."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from magrpo.interfaces import Env, Progress, Reward, Sandbox
from magrpo.problems.conventions import WEIGHTS, Role, write
from magrpo.problems.coopcode import Composition, composition_of
from magrpo.problems.operations import OPERATIONS, Step
from magrpo.seeds import derive_seed
from magrpo.stages.score import score_texts
from magrpo.types import Observation, PastTurn, Problem

ROLES: tuple[Role, ...] = ("helper", "main")
_FLAWED_FRAC = 0.3
_KEEP_FRAC = 0.5


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt as the policy renders it, and a completion."""

    prompt: str
    completion: str


def first_turns(problems: Sequence[Problem], env: Env, seed: int) -> list[Example]:
    """For every problem one example of each role, in a convention drawn for it alone."""
    rng = random.Random(seed)
    return [
        Example(plain_text(env.observe(problem, role, [], role)), write(composition_of(problem), role, draw(rng, role)))
        for problem in problems
        for role in ROLES
    ]


def all_texts(problems: Sequence[Problem], env: Env) -> Iterator[str]:
    """Every first-turn prompt, and every completion in every convention: what the vocabulary must cover."""
    for problem in problems:
        for role in ROLES:
            yield plain_text(env.observe(problem, role, [], role))
            for convention in WEIGHTS[role]:
                yield write(composition_of(problem), role, convention)


def revisions(
    problems: Sequence[Problem],
    env: Env,
    reward: Reward,
    sandbox: Sandbox,
    seed: int,
    progress: Progress | None = None,
) -> list[Example]:
    """Second turns, one for each role and problem: the feedback that a pair of first completions really gets, and then
    a better one.

    Completions follow drawn conventions; some are flawed. If all is well they are repeated. Else a flawed one is put
    right, and for a correct one the agent keeps its convention or draws another, which again its partner cannot know.
    """
    attempts = [_attempt(problem, random.Random(derive_seed(seed, problem.task_id))) for problem in problems]
    items = [(problem, attempt.texts) for problem, attempt in zip(problems, attempts, strict=True)]
    scored, _ = score_texts(items, reward=reward, sandbox=sandbox, cache={}, progress=progress)
    examples = []
    for problem, attempt, result in zip(problems, attempts, scored, strict=True):
        if result.masked:  # the sandbox failed on it: there is no feedback
            continue
        past = PastTurn(attempt.texts, result.reward, result.reports)
        rng = random.Random(derive_seed(seed, problem.task_id, "revise"))
        for role in ROLES:
            convention = attempt.conventions[role]
            if role not in attempt.flawed and rng.random() >= _KEEP_FRAC:
                convention = draw(rng, role)
            is_perfect = result.reward.total >= reward.max_total
            better = attempt.texts[role] if is_perfect else write(composition_of(problem), role, convention)
            examples.append(Example(plain_text(env.observe(problem, role, [past], role)), better))
    return examples


def plain_text(observation: Observation) -> str:
    """An observation as text, the way a policy without a chat template renders it."""
    return "".join(f"{message.content}\n" for message in observation.messages)


def draw(rng: random.Random, role: Role) -> str:
    """A convention of ``role``."""
    return rng.choices(list(WEIGHTS[role]), list(WEIGHTS[role].values()))[0]


@dataclass(frozen=True, slots=True)
class _Attempt:
    conventions: dict[Role, str]
    flawed: frozenset[Role]
    texts: dict[str, str]


def _attempt(problem: Problem, rng: random.Random) -> _Attempt:
    composition = composition_of(problem)
    conventions = {role: draw(rng, role) for role in ROLES}
    flawed = frozenset({rng.choice(ROLES)} if rng.random() < _FLAWED_FRAC else ())
    texts: dict[str, str] = {
        role: _flawed(composition, role, conventions[role], rng)
        if role in flawed
        else write(composition, role, conventions[role])
        for role in ROLES
    }
    return _Attempt(conventions, flawed, texts)


def _flawed(composition: Composition, role: Role, convention: str, rng: random.Random) -> str:
    """The completion with another step in place of one of its own, or cut off in its last line."""
    if rng.random() < 0.3:
        text = write(composition, role, convention)
        return text[: rng.randrange(text.rindex("return") + len("return"), len(text))]
    steps = list(composition.steps)
    i = rng.randrange(len(steps))
    wrong = rng.choice(
        [
            Step(other, constant)
            for other in OPERATIONS.values()
            if (other.takes, other.gives) == (steps[i].operation.takes, steps[i].operation.gives)
            for constant in other.constants or ("",)
        ]
    )
    other = Composition((*steps[:i], wrong, *steps[i + 1 :]))
    return write(other, role, convention).replace(f"def {other.entry_point}(", f"def {composition.entry_point}(")
