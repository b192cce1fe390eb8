"""The lines of a plan: each has a label in the first column, or an amount that belongs to the label above it."""

from collections.abc import Iterable
from dataclasses import dataclass

_LABEL, _AMOUNT = 8, 11
"""Width in columns of a label and of an amount."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plan; without a label it continues the line above."""

    label: str
    text: str

    def __str__(self) -> str:
        return f"{self.label:<{_LABEL}} {self.text}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A line with an amount, such as ``12 MiB``, and its use; without an amount it remarks on the entries above."""

    amount: str
    text: str

    def __str__(self) -> str:
        return f"{self.amount:>{_AMOUNT}}  {self.text}"


def print_lines(lines: Iterable[Line | Entry]) -> None:
    """Print the lines of a plan."""
    for line in lines:
        print(line)
