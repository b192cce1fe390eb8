"""A problem set for environments that bring their own tasks: every problem is only a number.

The program makes of the number what its environment wants, for example a seed or the position of a task::

    [problems]
    kind = "pipelines.examples.numbered_tasks:NumberedTasks"
    num_train = 200
"""

from pydantic import Field

from magrpo.plugins import Plugin
from magrpo.types import Problem, Split


class NumberedTasks(Plugin):
    """Problems whose prompt is a number: from 0 in training, and held out the numbers that follow."""

    num_train: int = Field(256, ge=1)
    """Number of training problems."""
    num_test: int = Field(32, ge=1)
    """Number of held-out problems."""

    def load(self) -> dict[Split, list[Problem]]:
        """All splits, in the order of their numbers."""
        problems = [Problem(f"task/{number}", str(number)) for number in range(self.num_train + self.num_test)]
        return {"train": problems[: self.num_train], "test": problems[self.num_train :]}
