"""The verdict on a run in words: whether its agents became better, the gain with its interval, and the next step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from magrpo.config.run import RunConfig
from magrpo.errors import ConfigError
from magrpo.reports.evaluations import (
    EvaluatedRun,
    compute_problem_means,
    paired_gain,
    subtract_means,
)
from magrpo.reports.figures import format_difference, format_share, quantity_title
from magrpo.reports.health import NEAR_FULL, find_answer_faults
from magrpo.reports.series import first_and_last
from magrpo.run.files import committed_iterations, read_evaluation
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.text import format_count
from magrpo.types import HEADLINE, EvalReport, Interval

ProblemMeans = Mapping[str, Mapping[str, float]]
"""Means of the problems of one evaluation, by quantity and problem."""
Word = Literal["better", "better with reservations", "no reliable change", "worse", "measured once"]
"""``better with reservations``: the return rose, but the answers show faults (:mod:`magrpo.reports.health`)."""
MIN_PROBLEMS = 6
"""Fewest problems for a trusted interval: with 5, all change in the same direction by luck in 1 case of 16."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the sampled joint return on held-out problems changed between two evaluations, of one run or of two runs."""

    word: Word
    sentence: str
    """The verdict in words, on one line, without a full stop; begins with the verdict's word."""
    advice: str
    """Advice where the change is not reliable or is for the worse; empty otherwise."""
    before: Interval | None
    """Return before training, a fraction of the maximum; None if it was measured once."""
    after: Interval
    """Return after training, a fraction of the maximum."""
    gain: Interval | None
    """``after`` minus ``before``, with its 95 % interval over problems; None if the return was measured once."""
    num_problems: int
    """Number of problems over which the gain, or the single measurement, is averaged."""


def judge_run(run: EvaluatedRun) -> Verdict:
    """Judge a run by its first and its last evaluation."""
    return judge_evaluations(run.reports, run.config)


def read_verdict(store: RunStore) -> Verdict | None:
    """Judge the first and the last evaluation of a run so far; None if there is none, or one is damaged."""
    iterations = committed_iterations(store, "evaluate")
    folders = [Step("evaluate", iteration).output for iteration in first_and_last(iterations)]
    try:
        reports = [read_evaluation(store.stage_folder(folder)) for folder in folders]
    except ConfigError:  # an evaluation is damaged; notices are then sent without a verdict
        return None
    return judge_evaluations(reports, store.config()) if reports else None


def judge_evaluations(reports: Sequence[EvalReport], config: RunConfig) -> Verdict:
    """Judge the evaluations of a run, at least one, in order of iteration."""
    last = reports[-1].summary[HEADLINE]["return"]
    before, after = (compute_problem_means(report, config.reward)[HEADLINE] for report in (reports[0], reports[-1]))
    gain = paired_gain(before["return"], after["return"], config.eval.seed) if len(reports) > 1 else None
    if gain is None:  # or no problem could be judged in both evaluations
        over = format_count(len(after["return"]), "held-out problems")
        text = f"the joint return on {over} is {format_share(last)} of the maximum"
        return Verdict("measured once", f"measured once: {text}", "", None, last, None, len(after["return"]))
    first = reports[0].summary[HEADLINE]["return"]
    num_problems = len(subtract_means(after["return"], before["return"]))
    word = judge_gain(gain, num_problems)
    verb = {"better": "rose", "worse": "fell"}.get(word, "went")
    rest = ""
    if word == "better":
        faults = [fault.sentence for fault in find_answer_faults(reports, config)]
        word = "better with reservations" if faults else word
        rest = _describe_rest(faults, _find_unmoved(before, after, reports[-1], config))
    iterations = reports[-1].policy_version - reports[0].policy_version
    sentence = (
        f"{word}: the joint return on held-out problems {verb} from {first.mean:.1%} to {last.mean:.1%} of the maximum "
        f"in {format_count(iterations, 'iterations')}, {format_difference(gain)} percentage points "
        f"({'95 % interval, ' if gain.has_width else ''}paired over "
        f"{format_count(num_problems, 'problems')}){rest}"
    )
    advice = _advise(word, num_problems, reports[-1].policy_version, config)
    return Verdict(word, sentence, advice, first, last, gain, num_problems)


def judge_gain(gain: Interval, num_problems: int) -> Word:
    """Choose the word for a change whose interval over ``num_problems`` problems is paired by problem."""
    if num_problems < MIN_PROBLEMS or gain.sign == 0:
        return "no reliable change"
    return "better" if gain.sign > 0 else "worse"


def _find_unmoved(before: ProblemMeans, after: ProblemMeans, last: EvalReport, config: RunConfig) -> dict[str, float]:
    """Find the parts of the reward that training did not change, with their share of the maximum at the end.

    Leaves out parts that are nearly full, which have nothing to gain.
    """
    unmoved = {}
    for part in config.reward.maxima:
        gain = paired_gain(before[part], after[part], config.eval.seed)
        share = last.summary[HEADLINE][part].mean
        if gain is not None and gain.sign == 0 and share < NEAR_FULL:
            unmoved[part] = share
    return unmoved


def _describe_rest(faults: Sequence[str], unmoved: Mapping[str, float]) -> str:
    """Describe what qualifies a rise of the return: parts that did not move, and faults of the answers."""
    rest = ""
    if unmoved:
        parts = ", ".join(f"{quantity_title(part)} ({share:.1%} of its maximum)" for part, share in unmoved.items())
        rest += f"; no reliable change in {parts}"
    if faults:
        rest += f"; but {', and '.join(faults)}"
    return rest


def _advise(word: Word, num_problems: int, iteration: int, config: RunConfig) -> str:
    if word.startswith("better"):
        return ""
    if word == "worse":
        return "try a smaller learning rate (optim.lr) or other seeds (magrpo study)"
    parts = [_advise_on_length(iteration, config)]
    if config.eval.max_problems is not None and config.eval.max_problems <= num_problems:
        parts.append(f"evaluate more problems (eval.max_problems, now {config.eval.max_problems})")
    else:
        parts.append(f"draw more samples of each problem (eval.num_samples, now {config.eval.num_samples})")
    parts.append("repeat with other seeds (magrpo study)")
    too_few = f"{format_count(num_problems, 'problems')}: too few for a verdict, {MIN_PROBLEMS} are needed; "
    advice = ", ".join(parts)
    return too_few + advice if num_problems < MIN_PROBLEMS else advice


def _advise_on_length(iteration: int, config: RunConfig) -> str:
    """Advise a run whose last evaluation is that of ``iteration`` to train longer."""
    planned, max_tokens = config.train.num_iterations, config.train.max_tokens
    if iteration < planned:
        limit = "" if max_tokens is None else "at most "
        return f"let the run finish (after {iteration} of {limit}{planned} iterations)"
    if max_tokens is not None:
        return f"train longer (train.max_tokens, now {max_tokens}, within train.num_iterations)"
    return f"train more iterations (train.num_iterations, now {planned})"
