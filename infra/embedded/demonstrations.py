"""Demonstrations for the warm start: prompts and completions of agents that follow independent conventions.

A :class:`Recipe` names the task: two programmers who divide the work in different ways, or two authors whose texts
differ in length.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from infra.embedded.conventions import Conventions, Divisions, Voices
from magrpo.envs import diagnosis, writing
from magrpo.envs.coding import CodingEnv
from magrpo.interfaces import Env, Reward, Sandbox, SandboxPlugin
from magrpo.rewards.coding import CodingReward
from magrpo.rewards.writing import WritingReward
from magrpo.sandboxes.none import NoSandbox
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.seeds import derive_seed
from magrpo.stages.score import score_texts
from magrpo.types import Observation, PastTurn, Problem

_FLAWED_FRAC = 0.3
_KEEP_FRAC = 0.5


@dataclass(frozen=True, slots=True)
class Recipe:
    """A task to demonstrate. ``lines``: every line that feedback in the environment's prompts can contain."""

    env: Env
    reward: Reward
    conventions: Conventions
    lines: tuple[str, ...]
    good_frac: float = 1.0
    """Fraction of the maximum reward from which agents repeat their completions in the second turn."""


RECIPES: Mapping[str, tuple[Recipe, SandboxPlugin]] = {
    "coopcode": (
        Recipe(CodingEnv(prompt="bare", num_turns=2), CodingReward(), Divisions(), diagnosis.BARE_LINES),
        PoolSandbox(test_s=0.5, total_s=1.0),
    ),
    "notes": (
        Recipe(writing.WritingEnv(prompt="bare", num_turns=2), WritingReward(), Voices(), writing.BARE_LINES, 0.9),
        NoSandbox(),
    ),
}
"""Task to demonstrate, and sandbox for its programs, by ``problems`` of the configuration."""


@dataclass(frozen=True, slots=True)
class Example:
    """A rendered prompt and a completion."""

    prompt: str
    completion: str


def make_first_turns(problems: Sequence[Problem], recipe: Recipe, seed: int) -> list[Example]:
    """Make one example of each role for every problem, each in a convention drawn independently."""
    rng = random.Random(seed)
    conventions = recipe.conventions
    return [
        Example(_first_prompt(problem, recipe, role), conventions.write(problem, role, conventions.draw(rng, role)))
        for problem in problems
        for role in conventions.roles
    ]


def collect_texts(problems: Sequence[Problem], recipe: Recipe) -> Iterator[str]:
    """Yield the texts that the vocabulary must cover: feedback lines, first prompts, completions in all conventions."""
    yield from recipe.lines
    for problem in problems:
        for role in recipe.conventions.roles:
            yield _first_prompt(problem, recipe, role)
            for convention in recipe.conventions.all(role):
                yield recipe.conventions.write(problem, role, convention)


def make_revisions(problems: Sequence[Problem], recipe: Recipe, sandbox: Sandbox, seed: int) -> list[Example]:
    """Make examples of second turns, one per role and problem: feedback on a first pair, then a better completion.

    First completions follow drawn conventions; some are flawed. A pair with a good reward is repeated. Otherwise a
    flawed completion is corrected; for a correct one the agent keeps its convention or draws another.
    """
    conventions, reward = recipe.conventions, recipe.reward
    attempts = []
    for problem in problems:
        rng = random.Random(derive_seed(seed, problem.task_id))
        drawn = {role: conventions.draw(rng, role) for role in conventions.roles}
        flawed = rng.choice(conventions.roles) if rng.random() < _FLAWED_FRAC else None
        texts = {}
        for role, convention in drawn.items():
            if role == flawed:
                texts[role] = conventions.flawed(problem, role, convention, rng)
            else:
                texts[role] = conventions.write(problem, role, convention)
        attempts.append((problem, drawn, flawed, texts))
    items = [(problem, texts) for problem, _, _, texts in attempts]
    scored, _ = score_texts(items, reward=reward, sandbox=sandbox, cache={})
    examples = []
    for (problem, drawn, flawed, texts), result in zip(attempts, scored, strict=True):
        if result.masked:  # the sandbox failed, so there is no feedback
            continue
        past = PastTurn(texts, result.reward, result.reports)
        rng = random.Random(derive_seed(seed, problem.task_id, "revise"))
        for role, convention in drawn.items():
            keeps = role == flawed or rng.random() < _KEEP_FRAC
            revised = conventions.write(problem, role, convention if keeps else conventions.draw(rng, role))
            is_good = reward.fraction(result.reward.total) >= recipe.good_frac
            prompt = render_plain_text(recipe.env.observe(problem, role, [past], role))
            examples.append(Example(prompt, texts[role] if is_good else revised))
    return examples


def render_plain_text(observation: Observation) -> str:
    """Render an observation as text, like a policy without a chat template."""
    return "".join(f"{message.content}\n" for message in observation.messages)


def _first_prompt(problem: Problem, recipe: Recipe, role: str) -> str:
    return render_plain_text(recipe.env.observe(problem, role, [], role))
