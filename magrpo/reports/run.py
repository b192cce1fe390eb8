"""The report of a run, one page and the same as Markdown, CSV and JSON: what it learned and what that took."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from magrpo.config import RunConfig
from magrpo.config_diff import list_changed_values
from magrpo.reports.budget import UNITS, Budget
from magrpo.reports.charts import (
    CLOUD,
    OVER_PROBLEMS,
    cloud_panels,
    cloud_picture,
    learning_panels,
    learning_picture,
    num_turns,
    save,
    turn_panels,
    turns_picture,
)
from magrpo.reports.exhibits import examples, watch_exhibits, watch_list, watch_table
from magrpo.reports.figures import (
    LOADED,
    NO_DIFFERENCE,
    SPLIT_TITLES,
    budget_csv,
    cell,
    column_title,
    columns_of,
    compared,
    difference_cell,
    evaluation_csv,
    format_duration,
    keys_of,
    signed,
    spent,
    start_title,
    verdict,
)
from magrpo.reports.page import Block, Facts, Listing, Pictures, write_page
from magrpo.reports.paper import QUANTITIES, beside_the_paper, trained_row
from magrpo.reports.problem_means import paired_gain, problem_means
from magrpo.reports.tables import Section
from magrpo.types import HEADLINE, EvalReport, Problem


def write_report(
    folder: Path,
    run_id: str,
    config: RunConfig,
    reports: Sequence[EvalReport],
    budgets: Sequence[Budget],
    problems: Mapping[str, Problem],
) -> None:
    """Write ``report.html``, ``.md``, ``.csv`` and ``.json``, the ledger (CSV) and the pictures (PNG, SVG).

    Args:
        reports: the evaluations of the run in the order in which they were made.
        budgets: its ledger.
        problems: those it was evaluated on, by id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    title, about = f"Run {run_id}", _about(config)
    blocks = list(_blocks(config, reports, budgets, problems))
    write_page(folder / "report", title, blocks, about)
    (folder / "report.csv").write_text(evaluation_csv(reports), encoding="utf-8")
    tree = _tree(run_id, config, reports, budgets)
    (folder / "report.json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    if budgets[-1].updates:
        (folder / "budget.csv").write_text(budget_csv(budgets), encoding="utf-8")
    maxima = config.reward.maxima
    if len(reports) > 1:
        save(learning_picture(reports, maxima), folder / "learning")
        save(cloud_picture(reports, maxima), folder / "cloud")
    if len(reports) > 1 or num_turns(reports) > 1:
        save(turns_picture(reports, maxima), folder / "turns")


def evaluation_sections(config: RunConfig, reports: Sequence[EvalReport]) -> list[Section]:
    """A table for each split and mode: the agents before training, the trained ones, and the paired difference."""
    rows = compared(reports, start_title(config))
    means = [problem_means(report, config.reward) for _, report in rows]
    heads = ["", *(name for name, _ in rows), *(["gain, paired by problem"] if len(rows) == 2 else [])]
    note = f"Percent of the maximum, bootstrap 95 % intervals over problems; tokens are counts. {NO_DIFFERENCE}"
    sections = []
    for split, mode, key in keys_of(rows[-1][1]):
        lines = []
        for column in columns_of(rows[-1][1].summary[key], config.reward.maxima):
            line = [column_title(column), *(cell(column, report.summary[key][column]) for _, report in rows)]
            if len(rows) == 2:
                gain = paired_gain(means[0][key][column], means[1][key][column], config.eval.seed)
                line.append(difference_cell(gain, 1.0 if column.endswith("_tokens") else 100.0))
            lines.append(line)
        title = f"{SPLIT_TITLES[split]}, {mode}"
        sections.append(Section(title[0].upper() + title[1:], heads, lines, note))
        note = ""
    return sections


def _about(config: RunConfig) -> str:
    agents = ", ".join(f"{agent.name} ({agent.model})" for agent in config.agents)
    turns = "one turn" if config.env.num_turns == 1 else f"{config.env.num_turns} turns"
    trained = f"{config.train.num_iterations} iterations, seed {config.train.seed}"
    what = trained if config.train.num_iterations else f"an evaluation, seed {config.eval.seed}"
    return f"{agents}; problems {config.problems.kind}, reward {config.reward.kind}, {turns}; {what}."


def _blocks(
    config: RunConfig, reports: Sequence[EvalReport], budgets: Sequence[Budget], problems: Mapping[str, Problem]
) -> Iterator[Block]:
    reward = config.reward
    yield Facts("In short", list(_facts(config, reports, budgets)))
    yield from evaluation_sections(config, reports)
    yield from _beside_the_paper(config, reports)
    turns = num_turns(reports)
    if len(reports) > 1:
        yield Pictures("Learning curves", learning_panels(reports, reward.maxima), "learning.png", OVER_PROBLEMS)
        yield Pictures("The cloud of joint returns", cloud_panels(reports, reward.maxima), "cloud.png", CLOUD)
    if len(reports) > 1 or turns > 1:
        title = f"Turn 1 against turn {turns}" if turns > 1 else "Problem by problem, before against after"
        note = "The area of a point is the number of trajectories or problems that coincide in it."
        yield Pictures(title, turn_panels(reports, reward.maxima), "turns.png", note)
    yield examples(reports, reward, problems)
    watched = watch_list(reports, reward)
    yield watch_table(reports, reward, watched)
    if watched:
        yield watch_exhibits(reports, reward, problems, watched)
    if budgets[-1].updates:
        yield _ledger(reports, budgets)
    shown = [
        line
        for line in list_changed_values(config)
        if line.partition(".")[0] not in ("tracking", "notify", "registry", "baselines")
    ]
    yield Listing("Configuration", "\n".join(shown))


def _beside_the_paper(config: RunConfig, reports: Sequence[EvalReport]) -> Iterator[Section]:
    untrained = "single" if len(config.agents) == 1 else "naive"
    rows = []
    for title, report in compared(reports, start_title(config)):
        name = trained_row(config.env.num_turns) if report.policy_version else untrained
        if title == start_title(config) == LOADED or (len(config.agents) == 1 and report.policy_version):
            continue  # the paper has no such row
        summary = report.summary[HEADLINE]
        rows.append((title, name, {q: cell(q, summary[q]) for q in QUANTITIES if q in summary}))
    yield from beside_the_paper(config, rows)


def _facts(
    config: RunConfig, reports: Sequence[EvalReport], budgets: Sequence[Budget]
) -> Iterator[tuple[str, str, str]]:
    first, last = reports[0], reports[-1]
    for key, name in ((HEADLINE, "held-out return"), ("ood/sampled", "return on new compositions")):
        if key in last.summary:
            yield _fact(name, first, last, key, "return")
            if len(reports) > 1 and key == HEADLINE:
                then, now = (problem_means(report, config.reward)[key]["return"] for report in (first, last))
                gain = paired_gain(then, now, config.eval.seed)
                value, _, limits = signed(gain).partition(" ")
                both = len(then.keys() & now.keys())
                yield f"gain, paired by problem: {verdict(gain)}", value, f"{limits} points, {both} problems"
    if "pass_at_1" in last.summary[HEADLINE]:
        yield _fact("held-out pass@1", first, last, HEADLINE, "pass_at_1")
    if budgets[-1].updates:
        tokens, _, rest = spent(budgets[-1]).partition(" generated, ")
        yield "training took", tokens, f"generated; {rest}; {format_duration(budgets[-1].seconds)} in stages"


def _fact(name: str, first: EvalReport, last: EvalReport, key: str, quantity: str) -> tuple[str, str, str]:
    then, now = first.summary[key][quantity], last.summary[key][quantity]
    limits = f"now [{100 * now.low:.1f}, {100 * now.high:.1f}]"
    if first is last:
        return name, f"{now.mean:.1%}", limits.removeprefix("now ")
    return name, f"{then.mean:.1%} \u2192 {now.mean:.1%}", limits


def _ledger(reports: Sequence[EvalReport], budgets: Sequence[Budget]) -> Section:
    """What training had taken at each evaluation, and what it had come to."""
    at = {budget.iteration: budget for budget in budgets}
    rows = [
        (
            str(report.policy_version),
            *(f"{getattr(at[report.policy_version], unit):,}" for unit in UNITS),
            format_duration(at[report.policy_version].seconds),
            cell("return", report.summary[HEADLINE]["return"]),
        )
        for report in reports
        if report.policy_version in at
    ]
    note = "What training had taken by each evaluation; evaluations are not in it. Every iteration: budget.csv."
    return Section("Budget", ("iteration", *UNITS.values(), "time in stages", "held-out return, %"), rows, note)


def _tree(
    run_id: str, config: RunConfig, reports: Sequence[EvalReport], budgets: Sequence[Budget]
) -> dict[str, object]:
    """Everything of the report that is a figure; fractions of the maximum."""
    gains: dict[str, dict[str, dict[str, float]]] = {}
    if len(reports) > 1:
        then, now = (problem_means(report, config.reward) for report in (reports[0], reports[-1]))
        for key in sorted(then.keys() & now.keys()):
            names = [name for name in now[key] if name in then[key]]
            gains[key] = {
                name: asdict(paired_gain(then[key][name], now[key][name], config.eval.seed)) for name in names
            }
    return {
        "run": run_id,
        "evaluations": [
            {
                "policy_version": report.policy_version,
                "summary": {k: {n: asdict(v) for n, v in s.items()} for k, s in report.summary.items()},
            }
            for report in reports
        ],
        "gains": gains,
        "watch_list": [asdict(one) for one in watch_list(reports, config.reward)],
        "budget": [asdict(budget) for budget in budgets],
    }
