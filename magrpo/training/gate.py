"""The rule of the gate: whether a team is better than the champion, by the returns of both on the same problems.

A team is compared every night, so some would pass by luck: of thirty teams that are no better, at least one passes a
95 % interval with a chance of up to a half. The gate therefore asks for a 99.8 % interval above 0. On few problems the
bootstrap's intervals are too narrow, so the gate also asks for :data:`MIN_PROBLEMS`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from magrpo.algo.stats import bootstrap_interval
from magrpo.reports.evaluations import subtract_means
from magrpo.reports.figures import format_difference
from magrpo.text import format_count
from magrpo.types import Interval

MIN_PROBLEMS = 30
"""Problems without which no team passes: on 2 problems, one team of eleven passes by luck."""
_SEED = 0
"""Seed of the bootstrap, as in ``magrpo compare``; fixed, so that the decision can be reproduced."""
_TAIL = 0.1
"""Percent of the resamples left out at each end of the interval."""
_NUM_RESAMPLES = 10_000


class Lead(NamedTuple):
    """The lead of one team over another, as a fraction of the maximum, paired by problem."""

    difference: Interval
    num_problems: int

    @property
    def passes(self) -> bool:
        """Whether the interval lies above 0 and there are enough problems."""
        return self.difference.sign > 0 and self.num_problems >= MIN_PROBLEMS

    def __str__(self) -> str:
        problems = format_count(self.num_problems, "held-out problems")
        lead = f"by {format_difference(self.difference)} percentage points on {problems}"
        if self.num_problems < MIN_PROBLEMS:
            return f"{lead}; a promotion needs {MIN_PROBLEMS}: more held-out problems, or a larger eval.max_problems"
        return f"{lead}, a 99.8 % interval {'above' if self.passes else 'not above'} 0"


def lead_over(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Lead | None:
    """Compute the lead of ``ours`` over ``theirs``, mean returns by problem; None if they share no problem."""
    differences = [[difference] for difference in subtract_means(ours, theirs).values()]
    if not differences:
        return None
    return Lead(bootstrap_interval(differences, _SEED, _NUM_RESAMPLES, _TAIL), len(differences))
