"""The report of a run: results and cost of its training, as one page, Markdown, CSV, JSON and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
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
    longest_episode,
    save_figure,
    turn_panels,
    turns_picture,
)
from magrpo.reports.exhibits import choose_examples, find_watched, watch_exhibits, watch_table
from magrpo.reports.figures import (
    LOADED,
    NO_DIFFERENCE,
    budget_csv,
    evaluation_csv,
    first_and_last,
    format_budget,
    format_difference,
    format_duration,
    format_interval,
    format_tested_difference,
    judge_gain,
    quantity_scale,
    quantity_title,
    shown_quantities,
    sort_summary_keys,
    start_title,
    summary_title,
)
from magrpo.reports.page import Block, Facts, Listing, Pictures, ReportTable, write_page
from magrpo.reports.paper import QUANTITIES, paper_tables, trained_row_name
from magrpo.reports.problem_means import MeansBySummary, compute_problem_means, paired_gain
from magrpo.types import HEADLINE, EvalReport, Interval, Problem


@dataclass(frozen=True)
class RunReport:
    """A run's evaluations in their order, its ledger of budgets, and the evaluated problems by id."""

    config: RunConfig
    reports: Sequence[EvalReport]
    budgets: Sequence[Budget]
    problems: Mapping[str, Problem]

    def write_files(self, folder: Path, run_id: str) -> None:
        """Write ``report.html``, ``.md``, ``.csv`` and ``.json``, the ledger (CSV) and the pictures (PNG, SVG)."""
        folder.mkdir(parents=True, exist_ok=True)
        reports, maxima = self.reports, self.config.reward.maxima
        write_page(folder / "report", f"Run {run_id}", list(self._blocks()), self._summary())
        (folder / "report.csv").write_text(evaluation_csv(reports), encoding="utf-8")
        (folder / "report.json").write_text(json.dumps(self._tree(run_id), indent=1) + "\n", encoding="utf-8")
        if self._trained:
            (folder / "budget.csv").write_text(budget_csv(self.budgets), encoding="utf-8")
        if len(reports) > 1:
            save_figure(learning_picture(reports, maxima), folder / "learning")
            save_figure(cloud_picture(reports, maxima), folder / "cloud")
        if len(reports) > 1 or longest_episode(reports) > 1:
            save_figure(turns_picture(reports, maxima), folder / "turns")

    def evaluation_tables(self) -> list[ReportTable]:
        """A table for each split and mode: the agents before training and after it, and the paired difference."""
        columns = first_and_last(self.reports, start_title(self.config))
        heads = ["", *columns, *(["gain, paired by problem"] if len(columns) == 2 else [])]
        note = f"Percent of the maximum, bootstrap 95 % intervals over problems; tokens are counts. {NO_DIFFERENCE}"
        tables = []
        for key in sort_summary_keys(self._last.summary):
            lines = []
            for name in shown_quantities(self._last.summary[key], self.config.reward.maxima):
                cells = [format_interval(name, report.summary[key][name]) for report in columns.values()]
                if len(columns) == 2:
                    cells.append(format_tested_difference(self._gain(key, name), quantity_scale(name)))
                lines.append([quantity_title(name), *cells])
            tables.append(ReportTable(summary_title(key), heads, lines, note))
            note = ""
        return tables

    def paper_tables(self) -> Iterator[ReportTable]:
        """The run's agents beside the paper's, if the task is one of the paper's."""
        config = self.config
        untrained = "single" if len(config.agents) == 1 else "naive"
        rows = []
        for title, report in first_and_last(self.reports, start_title(config)).items():
            name = trained_row_name(config.env.num_turns) if report.policy_version else untrained
            if title == start_title(config) == LOADED or (len(config.agents) == 1 and report.policy_version):
                continue  # the paper reports no such row
            summary = report.summary[HEADLINE]
            rows.append((title, name, {q: format_interval(q, summary[q]) for q in QUANTITIES if q in summary}))
        yield from paper_tables(config, rows)

    @property
    def _last(self) -> EvalReport:
        return self.reports[-1]

    @property
    def _trained(self) -> bool:
        return self.budgets[-1].updates > 0

    @cached_property
    def _means(self) -> tuple[MeansBySummary, MeansBySummary]:
        """Problem means of the first evaluation and the last."""
        first, last = (compute_problem_means(report, self.config.reward) for report in (self.reports[0], self._last))
        return first, last

    def _gain(self, key: str, name: str) -> Interval:
        first, last = self._means
        return paired_gain(first[key][name], last[key][name], self.config.eval.seed)

    def _summary(self) -> str:
        config = self.config
        agents = ", ".join(f"{agent.name} ({agent.model})" for agent in config.agents)
        turns = "one turn" if config.env.num_turns == 1 else f"{config.env.num_turns} turns"
        training = f"{config.train.num_iterations} iterations, seed {config.train.seed}"
        work = training if config.train.num_iterations else f"an evaluation, seed {config.eval.seed}"
        return f"{agents}; problems {config.problems.kind}, reward {config.reward.kind}, {turns}; {work}."

    def _blocks(self) -> Iterator[Block]:
        reports, reward = self.reports, self.config.reward
        yield Facts("In short", list(self._facts()))
        yield from self.evaluation_tables()
        yield from self.paper_tables()
        turns = longest_episode(reports)
        if len(reports) > 1:
            yield Pictures("Learning curves", learning_panels(reports, reward.maxima), "learning.png", OVER_PROBLEMS)
            yield Pictures("The cloud of joint returns", cloud_panels(reports, reward.maxima), "cloud.png", CLOUD)
        if len(reports) > 1 or turns > 1:
            title = f"Turn 1 against turn {turns}" if turns > 1 else "Problem by problem, before against after"
            note = "The area of a point is the number of trajectories or problems that coincide in it."
            yield Pictures(title, turn_panels(reports, reward.maxima), "turns.png", note)
        yield choose_examples(reports, reward, self.problems)
        watched = find_watched(reports, reward)
        yield watch_table(reports, reward, watched)
        if watched:
            yield watch_exhibits(reports, reward, self.problems, watched)
        if self._trained:
            yield self._budget_table()
        left_out = ("tracking", "notify", "registry", "baselines")
        lines = [line for line in list_changed_values(self.config) if line.partition(".")[0] not in left_out]
        yield Listing("Configuration", "\n".join(lines))

    def _facts(self) -> Iterator[tuple[str, str, str]]:
        for key, name in ((HEADLINE, "held-out return"), ("ood/sampled", "return on new compositions")):
            if key in self._last.summary:
                yield self._fact(name, key, "return")
                if len(self.reports) > 1 and key == HEADLINE:
                    gain = self._gain(key, "return")
                    value, _, limits = format_difference(gain).partition(" ")
                    first, last = self._means
                    both = len(first[key]["return"].keys() & last[key]["return"].keys())
                    yield f"gain, paired by problem: {judge_gain(gain)}", value, f"{limits} points, {both} problems"
        if "pass_at_1" in self._last.summary[HEADLINE]:
            yield self._fact("held-out pass@1", HEADLINE, "pass_at_1")
        if self._trained:
            tokens, _, rest = format_budget(self.budgets[-1]).partition(" generated, ")
            remark = f"generated; {rest}; {format_duration(self.budgets[-1].seconds)} in stages"
            yield "training took", tokens, remark

    def _fact(self, title: str, key: str, name: str) -> tuple[str, str, str]:
        first, last = (report.summary[key][name] for report in (self.reports[0], self._last))
        interval = f"[{100 * last.low:.1f}, {100 * last.high:.1f}]"
        if len(self.reports) == 1:
            return title, f"{last.mean:.1%}", interval
        return title, f"{first.mean:.1%} \u2192 {last.mean:.1%}", f"now {interval}"

    def _budget_table(self) -> ReportTable:
        """Cost and return at each evaluation."""
        budgets = {budget.iteration: budget for budget in self.budgets}
        rows = []
        for report in self.reports:
            if budget := budgets.get(report.policy_version):
                counts = (f"{count:,}" for count in budget.counts.values())
                value = format_interval("return", report.summary[HEADLINE]["return"])
                rows.append((str(budget.iteration), *counts, format_duration(budget.seconds), value))
        note = "Cost of training by each evaluation, evaluations not included. Every iteration: budget.csv."
        return ReportTable("Budget", ("iteration", *UNITS.values(), "time in stages", "held-out return, %"), rows, note)

    def _tree(self, run_id: str) -> dict[str, object]:
        """Every figure of the report; fractions of the maximum."""
        first, last = self._means
        keys = sorted(first.keys() & last.keys()) if len(self.reports) > 1 else []
        gains = {key: {name: asdict(self._gain(key, name)) for name in last[key] if name in first[key]} for key in keys}
        return {
            "run": run_id,
            "evaluations": [
                {
                    "policy_version": report.policy_version,
                    "summary": {k: {n: asdict(v) for n, v in s.items()} for k, s in report.summary.items()},
                }
                for report in self.reports
            ],
            "gains": gains,
            "watch_list": [asdict(one) for one in find_watched(self.reports, self.config.reward)],
            "budget": [asdict(budget) for budget in self.budgets],
        }
