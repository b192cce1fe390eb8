"""The verdict on a run: its word, its sentence, its advice."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.reports.figures import format_tested_difference
from magrpo.reports.verdict import MIN_PROBLEMS, judge_evaluations, judge_gain
from magrpo.stages.evaluate import summarise_rows
from magrpo.training.gate import Lead
from magrpo.types import HEADLINE, EvalReport, EvalRow, Interval
from tests.reports.pages import CONFIG

WORDS = ("better", "no reliable change", "worse", "measured once")


def make_report(config: RunConfig, version: int, parts_by_problem: Mapping[str, float]) -> EvalReport:
    """An evaluation with one sample of each problem, every part of whose reward is a fraction of its maximum."""
    rows = []
    for task_id, fraction in parts_by_problem.items():
        parts = {part: fraction * maximum for part, maximum in config.reward.maxima.items()}
        reward = fraction * sum(config.reward.maxima.values())
        rows.append(EvalRow(task_id, "test", "sampled", 0, (reward,), (parts,), (False,), {}, {}, 7))
    return EvalReport(version, tuple(rows), summarise_rows(rows, config.reward, config.eval.seed))


@pytest.mark.parametrize(
    ("change", "word", "verb"),
    [
        ([0.2, 0.1, 0.3, 0.2, 0.1, 0.3], "better", "rose"),
        ([-0.2, -0.1, -0.3, -0.2, -0.1, -0.3], "worse", "fell"),
        ([0.2, -0.1, 0.1, -0.2, 0.1, -0.1], "no reliable change", "went"),
        ([0.0] * 6, "no reliable change", "went"),
        ([0.2] * 5, "no reliable change", "went"),  # too few problems, whatever their interval
    ],
)
def test_the_word_is_what_the_paired_interval_carries(
    config: RunConfig, change: list[float], word: str, verb: str
) -> None:
    before = {f"test/{index}": 0.5 for index in range(len(change))}
    after = {task_id: 0.5 + one for task_id, one in zip(before, change, strict=True)}
    verdict = judge_evaluations([make_report(config, 0, before), make_report(config, 6, after)], config)
    assert verdict.word == word in WORDS
    assert verdict.sentence.startswith(f"{word}: the joint return on held-out problems {verb} from 50.0% to ")
    interval = " [" if len(set(change)) > 1 else " percentage points (paired over"
    assert f"in 6 iterations, {100 * sum(change) / len(change) + 0.0:+.1f}{interval}" in verdict.sentence
    assert verdict.num_problems == len(change)
    assert verdict.gain is not None
    assert verdict.gain.mean == pytest.approx(sum(change) / len(change))
    assert bool(verdict.advice) == (word != "better")
    assert ("too few for a verdict" in verdict.advice) == (len(change) < MIN_PROBLEMS)


def test_one_evaluation_has_no_gain(config: RunConfig) -> None:
    report = make_report(config, 0, {f"test/{index}": 0.5 for index in range(8)})
    verdict = judge_evaluations([report], config)
    assert (verdict.word, verdict.gain, verdict.before, verdict.advice) == ("measured once", None, None, "")
    assert verdict.after == report.summary[HEADLINE]["return"]
    assert verdict.sentence == "measured once: the joint return on 8 held-out problems is 50.0% of the maximum"
    other = make_report(config, 0, {f"test/{index}": index / 7 for index in range(8)})
    assert re.search(r" is 50\.0% \[\d\d\.\d%, \d\d\.\d%\] of", judge_evaluations([other], config).sentence)


def test_a_verdict_on_one_problem_has_no_interval(config: RunConfig) -> None:
    before, after = (make_report(config, version, {"test/a": version / 4}) for version in (1, 2))
    assert judge_evaluations([after], config).sentence.endswith("on 1 held-out problem is 50.0% of the maximum")
    sentence = judge_evaluations([before, after], config).sentence
    assert sentence.endswith("+25.0 percentage points (paired over 1 problem)")


def test_advice_names_the_key_that_limits_the_evaluation(config: RunConfig) -> None:
    same = {f"test/{index}": 0.5 for index in range(8)}
    reports = [make_report(config, 0, same), make_report(config, 1, same)]
    assert "eval.num_samples" in judge_evaluations(reports, config).advice
    limited = load_config(CONFIG, ["eval.max_problems=8"])
    verdict = judge_evaluations(reports, limited)
    assert "eval.max_problems, now 8" in verdict.advice
    assert "in 1 iteration, +0.0 percentage points" in verdict.sentence


@pytest.mark.parametrize(
    ("iterations", "max_tokens", "advice"),
    [
        (6, None, "train more iterations (train.num_iterations, now 6), "),
        (6, 5000, "train longer (train.max_tokens, now 5000, within train.num_iterations), "),
        (9, None, "let the run finish (after 6 of 9 iterations), "),
        (9, 5000, "let the run finish (after 6 of at most 9 iterations), "),
    ],
)
def test_advice_names_what_ends_training(iterations: int, max_tokens: int | None, advice: str) -> None:
    overrides = [f"train.num_iterations={iterations}", "optim.schedule=constant"]
    config = load_config(CONFIG, [*overrides, *([f"train.max_tokens={max_tokens}"] if max_tokens else [])])
    same = {f"test/{index}": 0.5 for index in range(8)}
    reports = [make_report(config, version, same) for version in (3, 6)]
    assert judge_evaluations(reports, config).advice.startswith(advice)


def test_an_interval_that_touches_0_is_no_reliable_change() -> None:
    assert judge_gain(Interval(0.1, 0.0, 0.2), 50) == "no reliable change"
    assert judge_gain(Interval(0.1, 0.001, 0.2), 50) == "better"
    assert judge_gain(Interval(-0.1, -0.2, -0.001), 50) == "worse"


@pytest.mark.parametrize("rounded", [2**-54, -(2**-54)])
def test_a_change_by_rounding_is_no_change(rounded: float) -> None:
    gain = Interval(rounded, rounded, rounded)
    assert judge_gain(gain, 50) == "no reliable change"
    assert format_tested_difference(gain) == "~ +0.0"
    assert not Lead(gain, 50).passes
