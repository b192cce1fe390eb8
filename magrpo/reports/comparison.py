"""What ``magrpo compare`` says and shows: the verdict, and how runs differ in configuration, evaluation and cost."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from magrpo.algo.stats import bootstrap_difference
from magrpo.config_diff import list_differing_keys, read_flat_config
from magrpo.layout import TRAINING_STAGES
from magrpo.reports import figures
from magrpo.reports.budget import UNITS, format_count
from magrpo.reports.evaluations import EvaluatedRun, paired_gain, shared_keys
from magrpo.reports.over_seeds import Settings, equal_bar_tables, subtract_over_seeds
from magrpo.reports.page import Banner, ReportTable, Section
from magrpo.reports.verdict import Word, judge_gain, judge_run
from magrpo.types import HEADLINE, Interval

NUM_KEYS = 12
"""Differing keys of the configuration that a page shows without a click."""
_SEED = 0
"""Of the resampling, so that equal runs compare equal."""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The verdict on a run, or a setting of a sweep, beside the first one, on held-out problems, sampled."""

    label: str
    reference: str
    word: Word | Literal["not comparable"]
    sentence: str
    """The verdict for people, on one line."""
    advice: str
    """What to do for a more reliable verdict."""
    quantity: str
    """What was compared: ``return``, or ``pass_at_1`` where the rewards have different parts; else empty."""
    difference: Interval | None
    """The run's mean less the reference's, a fraction; None if they do not compare."""

    @property
    def banner(self) -> Banner:
        """The verdict as pages begin with it."""
        return Banner(f"{self.label} against {self.reference}", self.word, self.sentence, self.advice)


def comparison_sections(runs: Sequence[EvaluatedRun]) -> Iterator[Section]:
    """What follows the curves: differing configuration and one table, the rest folded; differences to the first run."""
    keys = figures.sort_summary_keys(shared_keys([run.last.summary for run in runs]))
    yield Section(_evaluation_table(runs, HEADLINE))
    labels = [run.label for run in runs]
    rows = [(key, *values) for key, values in list_differences(runs).items()]
    note = "" if rows else "None: the configurations are equal."
    title = "Configuration, where it differs"
    configuration = ReportTable(title, ("key", *labels), rows, note, text=True)
    finding = f"{title}: {format_count(len(rows), 'keys')}" if rows else ""
    yield Section(configuration, finding, folded=len(rows) > NUM_KEYS)
    yield Section(_return_differences(runs, keys), folded=True)
    for key in keys:
        if key != HEADLINE:
            yield Section(_evaluation_table(runs, key), folded=True)
    for table in (*_at_equal_tokens(runs, keys), *equal_bar_tables({run.label: [run] for run in runs})):
        yield Section(table, folded=True)
    costs = [_run_costs(run) for run in runs]
    rows = [(name, *(of_run[name] for of_run in costs)) for name in costs[0]]
    note = "Stages in seconds, all iterations together; tokens are those sampled."
    yield Section(ReportTable("Cost", ("", *labels), rows, note), folded=True)


def summary_table(runs: Sequence[EvaluatedRun]) -> ReportTable:
    """A line for each run: held-out return, its gain in training, and tokens; fits a terminal of 60 columns."""
    rows = []
    for run in runs:
        verdict = judge_run(run)
        gain = figures.UNDEFINED if verdict.gain is None else figures.format_difference(verdict.gain)
        tokens = f"{run.budgets[-1].tokens:,}"
        cells = (figures.format_interval("return", verdict.after), gain)
        rows.append((run.label, *(cell.replace(" [", "\n[") for cell in cells), tokens))
    note = "Held-out return in percent of the maximum and its gain in training, with 95 % intervals over problems."
    return ReportTable("Runs", ("", "return", "gain", "tokens"), rows, note)


def list_differences(runs: Sequence[EvaluatedRun]) -> dict[str, list[str]]:
    """The configuration keys that differ, each with its value in every run."""
    configs = [read_flat_config(run.store.path) for run in runs]
    return {key: [config.get(key, "(none)") for config in configs] for key in list_differing_keys(configs)}


def compare_with_first(runs: Sequence[EvaluatedRun]) -> list[RunComparison]:
    """The verdict on every run but the first, beside the first."""
    return [judge_difference(runs[0], run) for run in runs[1:]]


def judge_difference(first: EvaluatedRun, second: EvaluatedRun) -> RunComparison:
    """The verdict on the second run beside the first.

    Where the rewards have different parts, pass@1 is compared in place of the return; without it nothing is.
    """
    labels, quantity = (second.label, first.label), "return"
    if dict(first.config.reward.maxima) != dict(second.config.reward.maxima):
        quantity = "pass_at_1"
        if any(quantity not in run.last.summary[HEADLINE] for run in (first, second)):
            sentence = "The rewards have different parts: neither the returns nor any other quantity can be compared."
            return RunComparison(*labels, "not comparable", sentence, "", "", None)
    value, pairing = compare_means(first, second, HEADLINE, quantity)
    num_problems = min(len(run.means[-1][HEADLINE][quantity]) for run in (first, second))
    ends = [run.last.summary[HEADLINE][quantity].mean for run in (second, first)]
    seeds = "The interval covers other problems, not other seeds of the training: magrpo sweep --seeds 3 does."
    word = judge_gain(value, num_problems)
    advice = seeds if word != "no reliable change" else f"{seeds} More problems or samples narrow it."
    sentence = (
        f"{_describe_relation(*labels, word)}: held-out {figures.quantity_title(quantity)} {ends[0]:.1%} against "
        f"{ends[1]:.1%}, {figures.format_difference(value)} percentage points (95 % interval; {pairing})."
    )
    return RunComparison(*labels, word, sentence, advice, quantity, value)


def judge_settings(settings: Settings) -> list[RunComparison]:
    """The verdict on every setting but the first beside the first, at the end of training, paired by seed."""
    first, *others = settings
    comparisons = []
    for label in others:
        by_seed = [{run.config.train.seed: run for run in settings[name]} for name in (label, first)]
        seeds = [seed for seed in by_seed[0] if seed in by_seed[1]]
        pairs = [((by_seed[0][seed], -1), (by_seed[1][seed], -1)) for seed in seeds]
        value = subtract_over_seeds(pairs, "return") if len(pairs) > 1 else None
        maxima = [dict(run.config.reward.maxima) for runs in (settings[label], settings[first]) for run in runs]
        if value is None or any(one != maxima[0] for one in maxima):
            reason, advice = "their rewards have different parts", ""
            if value is None:
                reason, advice = "two seeds on equal problems are needed", "Train more seeds: magrpo sweep --seeds 3"
            sentence = f"{label} and {first} do not compare: {reason}."
            comparisons.append(RunComparison(label, first, "not comparable", sentence, advice, "", None))
            continue
        word = judge_gain(value, len(pairs[0][0][0].means[-1][HEADLINE]["return"]))
        sentence = (
            f"{_describe_relation(label, first, word)}: held-out return {figures.format_difference(value)} percentage "
            f"points (95 % interval for new seeds on new problems; {len(pairs)} seeds)."
        )
        advice = "Train more seeds." if word == "no reliable change" else ""
        comparisons.append(RunComparison(label, first, word, sentence, advice, "return", value))
    return comparisons


def _describe_relation(label: str, reference: str, word: Word) -> str:
    relations = {"better": "is better than", "worse": "is worse than"}
    return f"{label} {relations.get(word, 'is neither reliably better nor worse than')} {reference}"


def compare_means(first: EvaluatedRun, second: EvaluatedRun, key: str, quantity: str) -> tuple[Interval, str]:
    """The second run's mean of ``quantity`` less the first's, a fraction, and a note on the pairing.

    Paired by problem if every problem of one evaluation is in the other with the same text, else unpaired.
    """
    minuend, subtrahend = (run.means[-1][key][quantity] for run in (second, first))
    same = [t for t in subtrahend if t in minuend and first.problems[t] == second.problems[t]]
    if same and len(same) == min(len(minuend), len(subtrahend)):
        return paired_gain(
            subtrahend, {t: minuend[t] for t in same}, _SEED
        ), f"{format_count(len(same), 'problems')}, paired"
    value = bootstrap_difference(list(minuend.values()), list(subtrahend.values()), _SEED)
    return value, f"other problems, unpaired; {len(same)} in both"


def _return_differences(runs: Sequence[EvaluatedRun], keys: Sequence[str]) -> ReportTable:
    rows = []
    for key in keys:
        for run in runs[1:]:
            value, pairing = compare_means(runs[0], run, key, "return")
            labels = f"{run.label} \u2212 {runs[0].label}"
            rows.append((figures.summary_title(key), labels, figures.format_tested_difference(value), pairing))
    note = (
        "Percentage points of the maximum, bootstrap 95 % intervals over problems. They cover new problems of the same "
        f"kind, not other seeds of the training. {figures.NO_DIFFERENCE}"
    )
    return ReportTable("Differences of return", ("", "runs", "difference", "problems"), rows, note)


def _evaluation_table(runs: Sequence[EvaluatedRun], key: str) -> ReportTable:
    summaries = [run.last.summary[key] for run in runs]
    shared = {name: summaries[0][name] for name in shared_keys(summaries)}
    parts = {part: value for part, value in runs[0].config.reward.maxima.items() if part in shared}
    rows = [
        (figures.quantity_title(name), *(figures.format_interval(name, summary[name]) for summary in summaries))
        for name in figures.shown_quantities(shared, parts)
    ]
    rows.append(("problems", *(str(len(run.means[-1][key]["return"])) for run in runs)))
    note = "Percent of each run's maximum, 95 % intervals over problems; tokens are counts."
    return ReportTable(figures.summary_title(key), ("", *(run.label for run in runs)), rows, note)


def _at_equal_tokens(runs: Sequence[EvaluatedRun], keys: Sequence[str]) -> Iterator[ReportTable]:
    """Each run's evaluation nearest to the tokens of the cheapest one; no table unless two runs trained."""
    trained = [run for run in runs if run.budgets[-1].updates]
    if len(trained) < 2:
        return
    tokens = min(run.budgets[-1].tokens for run in trained)
    rows = []
    for run in trained:
        report = run.reports[run.nearest_evaluation(tokens)]
        counts = (f"{count:,}" for count in run.budget_at(report).counts.values())
        returns = (figures.format_interval("return", report.summary[key]["return"]) for key in keys)
        rows.append((run.label, str(report.policy_version), *counts, *returns))
    note = (
        f"Each run at the evaluation nearest to {tokens:,} tokens generated in training, the total of the cheapest "
        "run, and its cost by then. Return in percent of the run's own maximum."
    )
    columns = ("run", "iteration", *UNITS.values(), *map(figures.summary_title, keys))
    yield ReportTable("At an equal budget of tokens", columns, rows, note)


def _run_costs(run: EvaluatedRun) -> dict[str, str]:
    seconds: dict[str, float] = defaultdict(float)
    gpus = 0.0
    for _, stage, metrics in run.store.stage_metrics():
        name = stage.partition(".")[0]
        seconds[name] += metrics.get(f"time/{name}_s", 0.0)
        gpus += metrics.get("start/gpus", 0.0)
    total = sum(seconds.values())
    evaluated = sum(row.generated_tokens for report in run.reports for row in report.rows)
    costs = {f"{UNITS[unit]}, training": f"{count:,}" for unit, count in run.budgets[-1].counts.items()}
    costs["tokens generated, evaluation"] = f"{evaluated:,}"
    costs |= {stage: f"{seconds[stage]:.1f}" for stage in ("prepare", *TRAINING_STAGES, "evaluate", "report")}
    return costs | {"all": figures.format_duration(total), "GPU-hours": f"{gpus * total / 3600:.2f}"}
