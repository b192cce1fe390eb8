"""How often luck makes a champion: thirty teams that are no better than it, one after another, on simulated returns.

``python -m tests.training.test_gate`` prints the table of docs/orchestration.md.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from magrpo.training.gate import lead_over

PROBLEMS, SAMPLES, TEAMS = 96, 4, 30
_SKILLS = np.sort(np.random.default_rng(0).standard_normal(200_000))
_CHANCES = np.sort(np.random.default_rng(1).beta(2.0, 0.5, 200_000))
"""Of full marks on a problem; 0.8 on average, as agents trained on coopcode have them."""


def chances(skill: np.ndarray) -> np.ndarray:
    """The chance of full marks for a standard normal skill, ``(P,)``: all skills together have the same mean."""
    return _CHANCES[np.minimum(np.searchsorted(_SKILLS, skill), len(_CHANCES) - 1)]


def evaluated(chance: np.ndarray, samples: int, rng: np.random.Generator) -> dict[str, float]:
    """Mean returns by problem; a program that fails has half of the marks."""
    solved = rng.binomial(samples, chance) / samples
    return {str(i): 0.5 + 0.5 * share for i, share in enumerate(solved)}


def play_world(alike: float, rng: np.random.Generator, gain: float = 0.0, teams: int = TEAMS) -> list[bool]:
    """Whether each team passes; its skill on a problem goes with the champion's by a correlation of ``alike``."""
    skill = rng.standard_normal(PROBLEMS)
    recorded = evaluated(chances(skill), SAMPLES, rng)
    passed = []
    for _ in range(teams):
        team = chances(alike * skill + np.sqrt(1 - alike**2) * rng.standard_normal(PROBLEMS) + gain)
        lead = lead_over(evaluated(team, SAMPLES, rng), recorded)
        passed.append(lead is not None and lead.passes)
    return passed


def chance_of_one(alike: float, worlds: int) -> float:
    """The share of worlds in which one of the teams passes."""
    rng = np.random.default_rng(7)
    return float(np.mean([any(play_world(alike, rng)) for _ in range(worlds)]))


def share_passed(gain: float, worlds: int) -> float:
    """The share of teams that pass if all are better by the same ``gain`` of skill."""
    rng = np.random.default_rng(3)
    return float(np.mean([play_world(0.95, rng, gain, teams=1)[0] for _ in range(worlds)]))


@pytest.mark.parametrize(("errors", "passes"), [(2.95, False), (3.25, True)])
def test_a_lead_passes_from_three_standard_errors_on(errors: float, passes: bool) -> None:
    """Of a normal mean, 99.8 % lie within 3.09 standard errors."""
    deviations = np.tile([1.0, -1.0], PROBLEMS // 2)
    leads = 0.1 * (errors / np.sqrt(PROBLEMS) + deviations)
    lead = lead_over({str(i): float(one) for i, one in enumerate(leads)}, {str(i): 0.0 for i in range(PROBLEMS)})
    assert lead is not None
    assert lead.passes == passes


def test_a_team_that_is_better_is_crowned() -> None:
    assert share_passed(gain=0.9, worlds=40) > 0.9, "by seven percentage points"


@pytest.mark.slow
@pytest.mark.parametrize("alike", [1.0, 0.95, 0.8, 0.0])
def test_luck_with_problems_is_hardly_ever_crowned_either(alike: float) -> None:
    assert chance_of_one(alike, worlds=400) < 0.1


def test_a_lead_needs_a_problem_in_common() -> None:
    assert lead_over({"a": 1.0}, {"b": 0.0}) is None
    lead = lead_over({"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 0.5, "c": 0.0})
    assert lead is not None
    assert (lead.num_problems, lead.difference.mean, lead.passes) == (2, 0.25, False)


@pytest.mark.parametrize(
    ("problems", "passes", "judged"),
    [
        (29, False, "; a promotion needs 30: more held-out problems, or a larger eval.max_problems"),
        (30, True, ", a 99.8 % interval above 0"),
    ],
)
def test_a_lead_on_few_problems_may_be_luck(problems: int, passes: bool, judged: str) -> None:
    lead = lead_over(dict.fromkeys(map(str, range(problems)), 1.0), dict.fromkeys(map(str, range(problems)), 0.5))
    assert lead is not None
    assert lead.passes == passes
    assert str(lead) == f"by +50.0 percentage points on {problems} held-out problems{judged}"


if __name__ == "__main__":
    worlds = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    for alike in (1.0, 0.95, 0.8, 0.0):
        print(f"correlation {alike:4}: one of {TEAMS} is promoted by luck in {chance_of_one(alike, worlds):.1%}")
    champion, rest = np.random.default_rng(0).standard_normal((2, 100_000))
    for gain in (0.3, 0.6, 0.9):
        better = chances(0.95 * champion + np.sqrt(1 - 0.95**2) * rest + gain).mean() - chances(champion).mean()
        print(f"better by {50 * better:.1f} points: promoted in {share_passed(gain, worlds):.1%}")
