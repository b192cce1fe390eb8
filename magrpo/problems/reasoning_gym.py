"""``reasoning_gym``: generated reasoning tasks of a hundred kinds, each with a checker of its own (arXiv 2505.24760).

For programs that price their own answers (``reward.kind = "returned"``): :func:`score_answer` is the package's checker.
Needs the extra ``reasoning``.
"""

import functools
from typing import Any

from pydantic import Field

from magrpo.errors import ConfigError, quote_value
from magrpo.plugins import Plugin
from magrpo.types import Problem, Split

_NEEDS_PARTS = "composite"
"""The task that mixes others, as ``tasks`` does."""
_DRAWS = 4
"""Number of questions to draw for each that is needed, since small tasks repeat themselves."""


class ReasoningGym(Plugin):
    """Tasks of the package reasoning-gym, in equal shares. ``tags`` hold all that is needed to check an answer."""

    tasks: tuple[str, ...] = Field(("chain_sum", "simple_equations", "number_sorting"), min_length=1)
    """Names of tasks, as in the gallery of reasoning-gym."""
    num_train: int = Field(300, ge=1)
    """Number of training problems of each task."""
    num_test: int = Field(30, ge=1)
    """Number of held-out problems of each task."""
    seed: int = Field(0, ge=0)
    """Seed of the questions."""

    def load(self) -> dict[Split, list[Problem]]:
        """All splits, in which tasks alternate; no question occurs twice.

        Raises:
            ConfigError: the package is not installed, has no such task, or the task has too few different questions.
        """
        drawn = list(zip(*(self._draw(task) for task in self.tasks), strict=True))
        train, test = drawn[: self.num_train], drawn[self.num_train :]
        return {"train": [one for row in train for one in row], "test": [one for row in test for one in row]}

    def _draw(self, task: str) -> list[Problem]:
        needed = self.num_train + self.num_test
        size = _DRAWS * needed
        dataset = _open_task(task, self.seed, size)
        problems: dict[str, Problem] = {}
        for index in range(size):
            question = str(dataset[index]["question"])
            tags = {"task": task, "seed": str(self.seed), "size": str(size), "index": str(index)}
            problems.setdefault(question, Problem(f"{task}/{self.seed}/{index}", question, tags=tags))
            if len(problems) == needed:
                return list(problems.values())
        raise ConfigError(
            f"problems.tasks: {task!r} gave {len(problems)} different questions in {size} draws, but {needed} are "
            "needed; lower problems.num_train or problems.num_test"
        )


def score_answer(problem: Problem, answer: str) -> float:
    """Check an answer to a problem of :class:`ReasoningGym`: 1 if it is right, less if it is not."""
    tags = problem.tags
    dataset = _open_task(tags["task"], int(tags["seed"]), int(tags["size"]))
    try:
        return float(dataset.score_answer(answer, dataset[int(tags["index"])]))
    except ValueError:  # some checkers raise it for an answer that is not in the form that they read
        return 0.0


@functools.cache
def _open_task(task: str, seed: int, size: int) -> Any:
    try:
        import reasoning_gym  # loads sympy and matplotlib
    except ImportError as error:
        raise ConfigError(f"problems.kind = 'reasoning_gym' needs the extra 'reasoning': {error}") from None
    known = [name for name in reasoning_gym.factory.DATASETS if name != _NEEDS_PARTS]
    if task not in known:
        raise ConfigError(f"problems.tasks: no task {quote_value(task)} in reasoning-gym; it has {', '.join(known)}")
    return reasoning_gym.create_dataset(task, seed=seed, size=size)
