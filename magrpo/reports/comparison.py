"""The verdicts of ``magrpo compare``: each run against the first one."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from magrpo.algo.stats import bootstrap_difference
from magrpo.reports import figures
from magrpo.reports.evaluations import EvaluatedRun, paired_gain
from magrpo.reports.page import Banner
from magrpo.reports.verdict import Word, judge_gain
from magrpo.run.comparability import pass_alike, score_alike
from magrpo.run.config_diff import list_differing_keys, read_flat_config
from magrpo.text import format_count
from magrpo.types import HEADLINE, Interval

_SEED = 0
"""Seed of the bootstrap; fixed, so that equal runs compare equal."""
_AT_THE_ENDS = (-1, -1)
"""Indices of the last evaluations of two runs."""
_TOLERANCE = 0.1
"""Relative difference below which two budgets of tokens count as equal."""
_EQUAL_TOKENS = "The page has their curves over tokens; evaluate more often (eval.every) for a verdict at equal tokens."


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The verdict on a run in comparison with the first run, by sampled answers to held-out problems."""

    label: str
    reference: str
    word: Word | Literal["not comparable", "unequal budgets"]
    sentence: str
    """The verdict in words, on one line."""
    advice: str
    """Advice for a more reliable verdict."""
    quantity: str
    """Quantity compared: ``return``, or ``pass_at_1`` where the rewards differ; empty if none."""
    difference: Interval | None
    """Mean of the run minus mean of the reference, a fraction; None if the two are not comparable."""
    iterations: tuple[int, int] | None = None
    """Iterations of the run and of the reference at which they were compared; None if they are not comparable."""

    @property
    def banner(self) -> Banner:
        """The verdict as a banner for the top of a page."""
        return Banner(f"{self.label} against {self.reference}", self.word, self.sentence, self.advice)


def list_differences(runs: Sequence[EvaluatedRun]) -> dict[str, list[object]]:
    """Return the configuration keys that differ, each with its value in every run."""
    configs = [read_flat_config(run.store.path) for run in runs]
    return {key: [config.get(key, "(none)") for config in configs] for key in list_differing_keys(configs)}


def returns_compare(first: EvaluatedRun, second: EvaluatedRun) -> bool:
    """Whether returns of the two can be subtracted: the same problems, rewards and penalties, and the same oracle."""
    same_oracle = first.config.eval.stop_above == second.config.eval.stop_above
    return same_oracle and share_problems(first, second) and score_alike(first.config, second.config)


def judge_difference(first: EvaluatedRun, second: EvaluatedRun) -> RunComparison:
    """Judge the second run against the first.

    Where rewards or penalties differ, pass@1 replaces the return. Runs without pass@1, without a common problem or with
    different oracles are not comparable. Runs whose training cost different numbers of tokens are judged at an equal
    number, if both have an evaluation there; otherwise there are figures but no verdict.
    """
    labels, quantity = (second.run_id, first.run_id), "return"
    if not share_problems(first, second):
        kinds = f"{second.config.problems.kind} and {first.config.problems.kind}"
        return _refuse(*labels, f"{second.run_id} and {first.run_id} were evaluated on different problems ({kinds}).")
    if first.config.eval.stop_above != second.config.eval.stop_above:
        return _refuse(*labels, "They stop at different rewards (eval.stop_above), which is an oracle's help.")
    if not score_alike(first.config, second.config):
        quantity = "pass_at_1"
        has_passed = all(quantity in run.last.summary[HEADLINE] for run in (first, second))
        if not (has_passed and pass_alike(first.config, second.config)):
            return _refuse(*labels, "The rewards differ: neither the returns nor any other quantity can be compared.")
    matched = match_budgets(second, first)
    index, first_index = matched or _AT_THE_ENDS
    compared = compare_means(first, second, HEADLINE, quantity, (first_index, index))
    reports, value = (second.reports[index], first.reports[first_index]), compared.value
    figures_text = (
        f"held-out {figures.quantity_title(quantity)} {compared.second_mean:.1%} against {compared.first_mean:.1%}, "
        f"{figures.format_difference(value)} percentage points "
        f"({'95 % interval; ' if value.has_width else ''}{compared.pairing})"
    )
    budgets = _describe_budgets(second, first)
    iterations = reports[0].policy_version, reports[1].policy_version
    if matched is None:
        sentence = f"{second.run_id} trained {budgets}, so neither is called better: at their ends {figures_text}."
        return RunComparison(*labels, "unequal budgets", sentence, _EQUAL_TOKENS, quantity, value, iterations)
    word = judge_gain(value, compared.num_problems)
    seeds = "The interval covers other problems, not other seeds of the training: magrpo study does."
    advice = seeds if word != "no reliable change" else f"{seeds} More problems or samples narrow it."
    where = "" if matched == _AT_THE_ENDS else _describe_match(second.run_id, iterations, budgets)
    sentence = f"{_describe_relation(*labels, word)}{where}: {figures_text}."
    return RunComparison(*labels, word, sentence, advice, quantity, value, iterations)


def match_budgets(one: EvaluatedRun, other: EvaluatedRun) -> tuple[int, int] | None:
    """Find the latest evaluations of two runs, as indices, at which their training had cost equally many tokens.

    Returns -1 and -1, the last evaluations, also if one of the runs does not train: its agents have another run's
    budget. Returns None if there are no such evaluations.
    """
    if not (one.budgets[-1].updates and other.budgets[-1].updates):
        return _AT_THE_ENDS
    # Training after the last evaluation, as in an interrupted run, does not count: no figure shows its effect.
    ends = one.budget_at(one.last).tokens, other.budget_at(other.last).tokens
    if _are_close(*ends):
        return _AT_THE_ENDS
    cheaper, dearer = (one, other) if ends[0] < ends[1] else (other, one)
    tokens = min(ends)
    nearest = dearer.nearest_evaluation(tokens)
    if not _are_close(dearer.budget_at(dearer.reports[nearest]).tokens, tokens):
        return None
    return (-1, nearest) if cheaper is one else (nearest, -1)


def _are_close(tokens: int, others: int) -> bool:
    return max(tokens, others) <= (1 + _TOLERANCE) * min(tokens, others)


def _describe_budgets(run: EvaluatedRun, reference: EvaluatedRun) -> str:
    """``6 against 12 iterations, 12,000 against 24,100 tokens``: the cost of training up to the last evaluations."""
    budgets = run.budget_at(run.last), reference.budget_at(reference.last)
    iterations = f"{budgets[0].iteration} against {format_count(budgets[1].iteration, 'iterations')}"
    return f"{iterations}, {budgets[0].tokens:,} against {budgets[1].tokens:,} tokens"


def share_problems(first: EvaluatedRun, second: EvaluatedRun) -> bool:
    """Whether any held-out problem evaluated by both runs has the same text in both."""
    evaluated = [run.means[-1][HEADLINE]["return"] for run in (first, second)]
    both = set(evaluated[0]) & set(evaluated[1])
    return any(first.problems[task_id] == second.problems[task_id] for task_id in both)


def _refuse(label: str, reference: str, sentence: str) -> RunComparison:
    return RunComparison(label, reference, "not comparable", sentence, advice="", quantity="", difference=None)


def _describe_match(label: str, iterations: tuple[int, int], budgets: str) -> str:
    """Say which evaluations are compared if the two runs cost different numbers of tokens in the end."""
    return f" at equal tokens, after {iterations[0]} against {iterations[1]} iterations ({label}: {budgets})"


def _describe_relation(label: str, reference: str, word: Word) -> str:
    relations = {"better": "is better than", "worse": "is worse than"}
    return f"{label} {relations.get(word, 'is neither reliably better nor worse than')} {reference}"


class MeanDifference(NamedTuple):
    """The mean of a quantity in a second run minus that in a first one, all as fractions."""

    value: Interval
    first_mean: float
    second_mean: float
    num_problems: int
    """Problems of the smaller evaluation; those of both means if they are paired."""
    pairing: str
    """The pairing in words."""


def compare_means(
    first: EvaluatedRun, second: EvaluatedRun, key: str, quantity: str, indices: tuple[int, int] = _AT_THE_ENDS
) -> MeanDifference:
    """Subtract the first run's mean of ``quantity`` from the second's.

    ``indices``: the evaluation taken from each run, by default the last one. The means are paired by problem, and leave
    out other problems, if every problem of one evaluation is in the other with the same text.
    """
    subtrahend, minuend = (run.means[i][key][quantity] for run, i in zip((first, second), indices, strict=True))
    same = [t for t in subtrahend if t in minuend and first.problems[t] == second.problems[t]]
    paired = paired_gain(subtrahend, {t: minuend[t] for t in same}, _SEED)
    num_problems = min(len(minuend), len(subtrahend))
    if paired is not None and len(same) == num_problems:
        first_mean, second_mean = (fmean(run[task_id] for task_id in same) for run in (subtrahend, minuend))
        pairing = f"{format_count(num_problems, 'problems')}, paired"
        return MeanDifference(paired, first_mean, second_mean, num_problems, pairing)
    value = bootstrap_difference(list(minuend.values()), list(subtrahend.values()), _SEED)
    if num_problems == 1:  # its spread is unknown, whatever that of the others
        value = Interval.without_width(value.mean)
    pairing = f"other problems, unpaired; {len(same)} in both"
    return MeanDifference(value, fmean(subtrahend.values()), fmean(minuend.values()), num_problems, pairing)
