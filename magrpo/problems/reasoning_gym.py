"""``reasoning_gym``: generated reasoning tasks of a hundred kinds, each with a checker of its own (arXiv 2505.24760).

For programs that price their own answers (``reward.kind = "returned"``): :func:`score_answer` is the package's checker.
Needs the extra ``reasoning``.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from magrpo.errors import ConfigError, quote_value
from magrpo.plugins import Plugin, check_unique
from magrpo.seeds import derive_seed
from magrpo.types import Problem, Split

_NEEDS_PARTS = "composite"
"""The task that mixes others, as ``tasks`` does."""
_DRAWS = 4
"""Number of questions to draw for each that is needed, since small tasks repeat themselves."""
_MAX_SEED = 2**31
"""NumPy, from which some tasks draw, takes no larger seeds than 32 bits."""


class ReasoningGym(Plugin):
    """Tasks of the package reasoning-gym, in equal shares. ``tags`` hold all that is needed to check an answer."""

    tasks: Annotated[tuple[str, ...], AfterValidator(check_unique)] = Field(
        ("chain_sum", "simple_equations", "number_sorting"), min_length=1
    )
    """Names of tasks, as in the gallery of reasoning-gym."""
    num_train: int = Field(300, ge=1)
    """Number of training problems of each task."""
    num_test: int = Field(30, ge=1)
    """Number of held-out problems of each task."""
    seed: int = Field(0, ge=0)
    """Seed of the questions."""

    def load(self) -> dict[Split, list[Problem]]:
        """All splits, in which tasks alternate; no question occurs twice. Held-out problems are drawn first.

        Raises:
            ConfigError: the package is not installed, has no such task, or the task has too few different questions.
        """
        test = [self._draw(task, "test", self.num_test) for task in self.tasks]
        held_out = {problem.prompt for problems in test for problem in problems}
        train = [self._draw(task, "train", self.num_train, held_out) for task in self.tasks]
        return {"train": _alternate(train), "test": _alternate(test)}

    def _draw(self, task: str, split: Split, needed: int, held_out: Collection[str] = ()) -> list[Problem]:
        size = _DRAWS * needed
        # The package draws question i with the seed s + i, so the questions of neighbouring seeds would be the same.
        seed = derive_seed("reasoning_gym", self.seed, split) % _MAX_SEED
        dataset = _open_task(task, seed, size)
        problems: dict[str, Problem] = {}
        for index in range(size):
            question = str(dataset[index]["question"])
            tags = {"task": task, "seed": str(seed), "size": str(size), "index": str(index)}
            if question not in held_out:
                problems.setdefault(question, Problem(f"{task}/{split}/{self.seed}/{index}", question, tags=tags))
            if len(problems) == needed:
                return list(problems.values())
        raise ConfigError(
            f"problems.tasks: {task!r} gave {len(problems)} different {split} questions in {size} draws, but {needed} "
            f"are needed; lower problems.num_train or problems.num_test"
        )


def _alternate(of_tasks: Sequence[Sequence[Problem]]) -> list[Problem]:
    return [problem for row in zip(*of_tasks, strict=True) for problem in row]


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
