"""The turns of agents who act one after the other, as rounds in which both acted."""

from collections.abc import Sequence

from magrpo.types import PastTurn


def merge_rounds(history: Sequence[PastTurn]) -> list[PastTurn]:
    """Merge the two turns of each round into one, with the reward of the second; leaves out an unfinished round."""
    halves = zip(history[::2], history[1::2], strict=False)
    return [PastTurn(first.texts | second.texts, second.reward, second.reports) for first, second in halves]
