"""How often luck makes a champion: thirty teams that are no better than it, one after another, on simulated returns.

``python -m tests.training.test_gate`` prints the table of docs/orchestration.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pytest

from magrpo.training.gate import CONFIRMATION, FIRST, FRESH_SAMPLES, lead_over

PROBLEMS, SAMPLES, TEAMS = 96, 4, 30
_SKILLS = np.sort(np.random.default_rng(0).standard_normal(200_000))
_CHANCES = np.sort(np.random.default_rng(1).beta(2.0, 0.5, 200_000))
"""Of full marks on a problem; 0.8 on average, as agents trained on coopcode have them."""


@dataclass(frozen=True)
class Luck:
    """What became of the teams of one world."""

    looks_better: list[bool]
    """Each team, by the first comparison."""
    crowned: list[bool]
    """Each team, by both."""


def chances(skill: np.ndarray) -> np.ndarray:
    """The chance of full marks for a standard normal skill, ``(P,)``: all skills together have the same mean."""
    return _CHANCES[np.minimum(np.searchsorted(_SKILLS, skill), len(_CHANCES) - 1)]


def evaluated(chance: np.ndarray, samples: int, rng: np.random.Generator) -> dict[str, float]:
    """Mean returns by problem; a program that fails has half of the marks."""
    solved = rng.binomial(samples, chance) / samples
    return {str(i): 0.5 + 0.5 * share for i, share in enumerate(solved)}


def passes_once(ours: dict[str, float], theirs: dict[str, float]) -> bool:
    lead = lead_over(ours, theirs, FIRST)
    return lead is not None and lead.passes


def play_world(alike: float, rng: np.random.Generator, anew: bool, gain: float = 0.0, teams: int = TEAMS) -> Luck:
    """Teams whose skill on a problem goes with the champion's by a correlation of ``alike``; 1: the same policy.

    ``anew``: the champion is evaluated again for the first comparison of each, as where the protocol has changed.
    """
    skill = rng.standard_normal(PROBLEMS)
    champion = chances(skill)
    recorded = evaluated(champion, SAMPLES, rng)
    luck = Luck([], [])
    for _ in range(teams):
        team = chances(alike * skill + np.sqrt(1 - alike**2) * rng.standard_normal(PROBLEMS) + gain)
        recorded = evaluated(champion, SAMPLES, rng) if anew else recorded
        luck.looks_better.append(passes_once(evaluated(team, SAMPLES, rng), recorded))
        confirmed = None
        if luck.looks_better[-1]:
            fresh = [evaluated(chance, FRESH_SAMPLES * SAMPLES, rng) for chance in (team, champion)]
            confirmed = lead_over(*fresh, CONFIRMATION)
        luck.crowned.append(confirmed is not None and confirmed.passes)
    return luck


def chance_of_one(alike: float, worlds: int, anew: bool = False) -> tuple[float, float]:
    """The share of worlds in which one of the teams passes the first comparison, and in which one is crowned."""
    rng = np.random.default_rng(7)
    played = [play_world(alike, rng, anew) for _ in range(worlds)]
    shares = [np.mean([any(luck.looks_better) for luck in played]), np.mean([any(luck.crowned) for luck in played])]
    return float(shares[0]), float(shares[1])


def test_one_of_thirty_equal_teams_is_hardly_ever_crowned() -> None:
    before, after = chance_of_one(alike=1.0, worlds=40, anew=True)
    assert before > 0.35, "what a single comparison lets pass"
    assert after < 0.05


def test_a_team_that_is_better_is_crowned() -> None:
    rng = np.random.default_rng(3)
    crowned = [play_world(0.95, rng, anew=False, gain=0.6, teams=1).crowned[0] for _ in range(40)]
    assert np.mean(crowned) > 0.9, "by five percentage points"


@pytest.mark.slow
@pytest.mark.parametrize("alike", [1.0, 0.95, 0.8, 0.0])
def test_luck_with_problems_is_hardly_ever_crowned_either(alike: float) -> None:
    assert chance_of_one(alike, worlds=400)[1] < 0.05


def test_a_lead_needs_a_problem_in_common() -> None:
    assert lead_over({"a": 1.0}, {"b": 0.0}, FIRST) is None
    lead = lead_over({"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 0.5, "c": 0.0}, CONFIRMATION)
    assert lead is not None
    assert (lead.num_problems, lead.difference.mean, lead.passes) == (2, 0.25, False)
    assert str(lead) == "by +25.0 [+0.0, +50.0] percentage points on 2 held-out problems, a 99.8 % interval not above 0"


if __name__ == "__main__":
    worlds = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    for alike, anew in ((1.0, True), (1.0, False), (0.95, False), (0.8, False), (0.0, False)):
        before, after = chance_of_one(alike, worlds, anew)
        print(
            f"alike {alike:4}  champion evaluated {'anew' if anew else 'once'}  before {before:.1%}  after {after:.1%}"
        )
