"""Prepare: load the problem set and draw each iteration's problems."""

import random
from collections.abc import Sequence
from dataclasses import asdict

from magrpo.interfaces import Problems
from magrpo.plugins import ConfigError, quote_value
from magrpo.seeds import derive_seed
from magrpo.stages.backend import Splits
from magrpo.surrogates import replace_surrogates
from magrpo.types import Problem


def prepare(problems: Problems, problems_per_iteration: int) -> Splits:
    """Load every split. Raises ConfigError if one is empty or too small, or a ``task_id`` is used twice."""
    loaded = problems.load()
    splits = {split: [_replace_surrogates(problem) for problem in members] for split, members in loaded.items()}
    for split in ("train", "test"):
        if not splits.get(split):
            raise ConfigError(f"problems: the split {split!r} is empty; ask for a larger one")
    if len(splits["train"]) < problems_per_iteration:
        raise ConfigError(
            f"rollout.problems_per_iteration: {problems_per_iteration} problems are asked for, "
            f"but the train split has {len(splits['train'])}"
        )
    seen: dict[str, str] = {}
    for split, members in splits.items():
        for problem in members:
            if problem.task_id in seen:
                name = quote_value(problem.task_id)
                raise ConfigError(f"problems: {name} is both in {seen[problem.task_id]} and in {split}")
            seen[problem.task_id] = split
    return splits


def _replace_surrogates(problem: Problem) -> Problem:
    return Problem(**replace_surrogates(asdict(problem)))


def draw_problems(train: Sequence[Problem], iteration: int, count: int, seed: int) -> list[Problem]:
    """The ``count`` distinct problems of an iteration (from 1): a pure function of its arguments.

    The training set is walked in a fresh order every epoch; an epoch ends when fewer than ``count`` are left.
    """
    per_epoch = len(train) // count
    epoch, position = divmod(iteration - 1, per_epoch)
    order = list(train)
    random.Random(derive_seed(seed, "draw", epoch)).shuffle(order)
    return order[position * count : (position + 1) * count]
