"""The rule of the gate: whether a team is better than the champion, by the returns of both on the same problems.

A team is compared every night, so some pass by luck: of thirty teams that are no better, each with a chance of 2.5 %,
at least one passes with a chance of up to 53 %. The comparison that selects a team therefore cannot confirm it. A team
that passes the first comparison, of evaluations made anyway, is evaluated again together with the champion on fresh and
more samples, and must pass a stricter comparison of these samples alone.
"""

from collections.abc import Mapping
from typing import NamedTuple

from magrpo.algo.stats import bootstrap_interval
from magrpo.reports.budget import format_count
from magrpo.reports.evaluations import subtract_means
from magrpo.reports.figures import format_difference
from magrpo.types import Interval

_SEED = 0
"""Seed of the bootstrap, as in ``magrpo compare``; fixed, so that the decision can be reproduced."""


class Bar(NamedTuple):
    """A difference passes if its interval, which leaves out ``tail`` percent at each end, lies above 0."""

    tail: float
    num_resamples: int


FIRST = Bar(tail=2.5, num_resamples=1000)
CONFIRMATION = Bar(tail=0.1, num_resamples=10_000)
FRESH_SAMPLES = 4
"""Samples in the confirmation for each of ``eval.num_samples``: the stricter bar needs more precision."""


class Lead(NamedTuple):
    """The lead of one team over another, as a fraction of the maximum, paired by problem."""

    difference: Interval
    num_problems: int
    bar: Bar

    @property
    def passes(self) -> bool:
        """Whether the interval lies above 0."""
        return self.difference.low > 0

    def __str__(self) -> str:
        interval = "an interval" if self.bar == FIRST else f"a {100 - 2 * self.bar.tail:g} % interval"
        problems = format_count(self.num_problems, "held-out problems")
        position = "above" if self.passes else "not above"
        return f"by {format_difference(self.difference)} percentage points on {problems}, {interval} {position} 0"


def lead_over(ours: Mapping[str, float], theirs: Mapping[str, float], bar: Bar) -> Lead | None:
    """Compute the lead of ``ours`` over ``theirs``, mean returns by problem; None if they share no problem."""
    differences = [[difference] for difference in subtract_means(ours, theirs).values()]
    if not differences:
        return None
    return Lead(bootstrap_interval(differences, _SEED, bar.num_resamples, bar.tail), len(differences), bar)
