"""The lines of a plan: each has a label in the first column, or an amount that belongs to the label above it."""

from collections.abc import Iterable

_LABEL, _AMOUNT = 8, 11
"""Width in columns of a label and of an amount."""


def format_line(label: str, text: str) -> str:
    """Format a line of a plan; without a label it continues the line above."""
    return f"{label:<{_LABEL}} {text}"


def format_entry(amount: str, text: str) -> str:
    """Format a line with an amount, such as ``12 MiB``, and its use; without an amount it remarks on those above."""
    return f"{amount:>{_AMOUNT}}  {text}"


def print_lines(lines: Iterable[str]) -> None:
    """Print the lines of a plan."""
    for line in lines:
        print(line)
