from __future__ import annotations

from dataclasses import replace

import pytest

from magrpo.errors import ConfigError
from magrpo.rewards.coding import MAXIMA, UNREADABLE, VARIANTS, TeamReward
from magrpo.rewards.common import choose_report
from magrpo.types import ExecutionReport
from tests.rewards.test_coding import AUX, MAIN, PROBLEM, RAISED, report

REWARD = TeamReward()
OTHER = "def aux(xs):\n    return xs[0]"


def test_every_proposal_is_tried_and_the_best_pair_counts() -> None:
    texts = {"helper1": OTHER, "helper2": AUX, "main": MAIN}
    wanted = REWARD.executions(PROBLEM, texts, {})
    assert wanted.keys() == {f"{name}:helper{number}" for name in ("program", UNREADABLE) for number in (1, 2)}
    assert OTHER in wanted["program:helper1"].source
    assert AUX in wanted["program:helper2"].source
    reports = dict.fromkeys(wanted, RAISED)
    reports |= {"program:helper1": report(1, calls=4), "program:helper2": report(4, calls=4)}
    variants = REWARD.executions(PROBLEM, texts, reports)
    assert variants.keys() == {"wrapper:helper1", "wrapper:helper2"}
    reports |= dict.fromkeys(variants, report(0))
    variants = REWARD.executions(PROBLEM, texts, reports)
    assert variants.keys() == {f"{name}:helper2" for name in VARIANTS[1:]} | {"identity:helper1", "empty:helper1"}
    reports |= dict.fromkeys(variants, report(0))
    assert REWARD.executions(PROBLEM, texts, reports) == {}
    price = REWARD.price(PROBLEM, texts, reports)
    assert (price.total, price.parts) == (4.0, dict(MAXIMA))
    assert len(reports) == REWARD.max_executions - 1
    assert REWARD.passed(reports)


def test_a_proposal_that_fails_costs_nothing_if_another_fits() -> None:
    broken = {"helper1": "no code", "helper2": AUX, "main": MAIN}
    reports: dict[str, ExecutionReport] = {"program:helper1": report(0), "program:helper2": report(4)}
    assert REWARD.price(PROBLEM, broken, reports).parts["structure"] == 1.0
    alone = {"helper1": "no code", "helper2": "neither", "main": MAIN}
    both = dict.fromkeys(reports, report(0))
    assert REWARD.price(PROBLEM, alone, both).parts == {
        "structure": 0.6,
        "syntax": 0.5,
        "tests": 0.0,
        "cooperation": 0.0,
    }
    assert not REWARD.passed(both)


def test_every_member_has_a_local_part_of_its_own() -> None:
    texts = {"helper1": "no code", "helper2": AUX, "main": MAIN}
    reports: dict[str, ExecutionReport] = {"program:helper1": report(4), "program:helper2": report(0)}
    price = TeamReward(local_weight=1.0).price(PROBLEM, texts, reports)
    assert price.local == {"helper1": 0.0, "helper2": 0.4, "main": 0.6}
    assert REWARD.price(PROBLEM, texts, reports).local == {}


def test_each_pair_has_its_hidden_tests() -> None:
    problem, texts = replace(PROBLEM, hidden_test=PROBLEM.test), {"helper1": OTHER, "helper2": AUX, "main": MAIN}
    wanted = REWARD.executions(problem, texts, {})
    names = [f"{name}{end}" for name in ("program", UNREADABLE) for end in ("", "_hidden")]
    assert wanted.keys() == {f"{name}:helper{number}" for name in names for number in (1, 2)}
    reports = dict.fromkeys(wanted, report(4)) | {"program_hidden:helper1": report(0), "program:helper2": report(2)}
    assert REWARD.price(problem, texts, reports).parts["tests"] == 6 / 8
    assert not REWARD.passed(reports)


def test_names_of_many_helpers_do_not_mix() -> None:
    reward = TeamReward(num_helpers=11)
    texts = {**{f"helper{i}": OTHER for i in range(1, 12)}, "main": MAIN}
    reports = {f"program:helper{i}": report(4 if i == 11 else 0) for i in range(1, 12)}
    assert reward.passed(reports)
    assert reward.price(PROBLEM, texts, reports).parts["tests"] == 1.0
    assert not reward.passed({"program:helper11": report(0), "program:helper1": report(0)})


def test_another_number_of_helpers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.num_helpers = 2, but env has 1"):
        REWARD.executions(PROBLEM, {"helper1": AUX, "main": MAIN}, {})


def test_the_best_program_is_chosen_by_shown_and_hidden_tests_together() -> None:
    reports: dict[str, ExecutionReport] = {
        "program:helper1": report(3),
        "program_hidden:helper1": report(0),
        "program:helper2": report(2),
        "program_hidden:helper2": report(4),
        "constant:helper1": report(4),
    }
    best = choose_report(reports)
    assert best is not None
    assert (best.tests_passed, best.tests_total) == (6, 8)
    assert choose_report({}) is None
