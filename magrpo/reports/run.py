"""The report of a run: results and cost of its training as a page and as JSON.

:meth:`RunReport.list_sections` builds the page from top to bottom; each section names the function that computes its
figures.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from magrpo.algo.repetition import RUN
from magrpo.reports import charts, figures
from magrpo.reports.budget import UNITS
from magrpo.reports.evaluations import EvaluatedRun, shared_keys
from magrpo.reports.exhibits import choose_best_answers, choose_examples, describe_choice
from magrpo.reports.health import Finding, answer_rows, list_findings
from magrpo.reports.origin import describe_origin, suggest_commands
from magrpo.reports.page import (
    Exhibits,
    Facts,
    Listing,
    PageSection,
    Pictures,
    Terms,
    make_banner,
    write_page,
)
from magrpo.reports.tables import ReportTable
from magrpo.reports.training_metrics import draw_training_charts, list_training_returns, tabulate_training_metrics
from magrpo.reports.verdict import Verdict, judge_run
from magrpo.run.config_diff import format_changed_values
from magrpo.run.files import read_evaluation
from magrpo.stages.context import Metrics, StageContext
from magrpo.text import format_count
from magrpo.types import HEADLINE

_DESCRIBE_BEST = (
    "The answers with the highest reward, one per problem; among equal rewards, the one copied most. If they are poor, "
    "the reward favours something else. In texts, passages copied from the prompt are marked."
)
_ELSEWHERE = ("tracking", "notify", "registry", "baselines")
"""Sections of the configuration that do not describe the training."""


class RunReport(EvaluatedRun):
    """An evaluated run that writes the files of its report."""

    def write_files(self, folder: Path) -> None:
        """Write ``report.html`` and ``report.json``."""
        title = f"Run {self.run_id}"
        write_page(folder / "report.html", title, list(self.list_sections()), self._describe_run())
        text = json.dumps(self._collect_figures(), indent=1, default=asdict)
        (folder / "report.json").write_text(text + "\n", encoding="utf-8")

    def list_sections(self) -> Iterator[PageSection]:
        """Yield the verdict, the curves, one before and after, and one table; the other sections are folded."""
        examples = choose_examples(self)
        first_table, *more_tables = figures.tabulate_quantities(self).values()
        yield PageSection(make_banner(self.verdict, self.findings))
        yield PageSection(Facts("Summary", list(self._list_facts())))
        if len(self.reports) > 1:
            yield self._draw_learning_curves()
        if examples:
            title = "Before and after" if len(self.reports) > 1 else "An answer"
            yield PageSection(Exhibits(title, examples[:1], describe_choice(self)))
        yield PageSection(first_table)
        yield PageSection(Terms("Next steps", list(suggest_commands(self.store, self.config)), code=True))
        best_answers = Exhibits("Highest rewards", choose_best_answers(self), _DESCRIBE_BEST)
        yield PageSection(best_answers, folded=not self.findings)
        yield PageSection(self._health_table(), folded=True)
        if self._trained:
            training_charts = list(draw_training_charts(self.stage_metrics, self.config))
            yield PageSection(Pictures("Training, iteration by iteration", training_charts), folded=True)
            yield PageSection(tabulate_training_metrics(self.stage_metrics), folded=True)
        for table in more_tables:
            yield PageSection(table, folded=True)
        if len(charts.list_priced_turns(self.reports)) > 1:
            yield self._draw_scatter()
        if len(examples) > 1:
            yield PageSection(Exhibits("More examples", examples[1:], "Chosen by the same rule."), folded=True)
        if self._trained:
            yield PageSection(self._budget_table(), f"Budget: {figures.format_budget(self.budgets[-1])}", folded=True)
        changed = [line for line in format_changed_values(self.config) if line.partition(".")[0] not in _ELSEWHERE]
        finding = f"Configuration: {format_count(len(changed), 'values')} that differ from the defaults"
        yield PageSection(Listing("Configuration", "\n".join(changed)), finding, folded=True)
        yield PageSection(Terms("About this run", describe_origin(self.store, self.config)))

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the run."""
        return judge_run(self)

    @cached_property
    def findings(self) -> list[Finding]:
        """Problems of the run that its return hides."""
        return list_findings(self.stage_metrics, self.reports, self.config)

    @property
    def _trained(self) -> bool:
        return self.budgets[-1].updates > 0

    def _describe_run(self) -> str:
        config = self.config
        agents = ", ".join(f"{agent.name} ({agent.model})" for agent in config.agents)
        turns = "one turn" if config.env.num_turns == 1 else f"{config.env.num_turns} turns"
        training = f"{format_count(config.train.num_iterations, 'iterations')}, seed {config.train.seed}"
        work = training if config.train.num_iterations else f"an evaluation, seed {config.eval.seed}"
        return f"{agents}; problems {config.problems.kind}, reward {config.reward.kind}, {turns}; {work}."

    def _list_facts(self) -> Iterator[tuple[str, str, str]]:
        """Yield the figures of the summary: title, value and remark."""
        yield self._make_fact("held-out return", HEADLINE, "return")
        if self.verdict.gain is not None:
            value, _, limits = figures.format_difference(self.verdict.gain).partition(" ")
            num_problems = format_count(self.verdict.num_problems, "problems")
            yield "gain, paired by problem", value, f"{limits} points, {num_problems}".lstrip()
        if "ood/sampled" in self.last.summary:
            yield self._make_fact("return on new compositions", "ood/sampled", "return")
        if "pass_at_1" in self.last.summary[HEADLINE]:
            yield self._make_fact("held-out pass@1", HEADLINE, "pass_at_1")
        if self._trained:
            tokens = format_count(self.budgets[-1].tokens, "tokens")
            rest = figures.format_budget(self.budgets[-1]).partition(" generated, ")[2]
            seconds = figures.format_duration(self.budgets[-1].seconds)
            yield "training generated", tokens, f"in {seconds} of stage time; {rest}"

    def _make_fact(self, title: str, key: str, name: str) -> tuple[str, str, str]:
        value, _, limits = figures.format_share(self.last.summary[key][name]).partition(" ")
        first = self.reports[0].summary.get(key, {}).get(name)
        if len(self.reports) > 1 and first is not None:
            value, limits = f"{first.mean:.1%} \u2192 {value}", f"now {limits}" if limits else ""
        return title, value, limits

    def _health_table(self) -> ReportTable:
        """Tabulate the answers and updates of each agent, and the settings that change them."""
        rows = [
            (title, *cells, settings)
            for title, cells, settings in answer_rows(self.stage_metrics, self.reports, self.config)
        ]
        note = (
            "Sampled answers to held-out problems at the first and the last evaluation; entropy and gradient norm of "
            "the first and the last iteration. A word counts as copied or repeated if the passage has at least "
            f"{RUN} words."
        )
        columns = ("", *(agent.name for agent in self.config.agents), "settings")
        return ReportTable("Training health", columns, rows, note, text=True)

    def _budget_table(self) -> ReportTable:
        """Tabulate cost and return at each evaluation."""
        budgets = {budget.iteration: budget for budget in self.budgets}
        rows = []
        for report in self.reports:
            if budget := budgets.get(report.policy_version):
                counts = (f"{count:,}" for count in budget.counts.values())
                value = figures.format_interval("return", report.summary[HEADLINE]["return"])
                rows.append((str(budget.iteration), *counts, figures.format_duration(budget.seconds), value))
        note = "Training cost up to each evaluation, without evaluations. For every iteration see report.json."
        return ReportTable("Budget", ("iteration", *UNITS.values(), "time in stages", "held-out return, %"), rows, note)

    def _draw_learning_curves(self) -> PageSection:
        training = list_training_returns(self.stage_metrics, self.config)
        panels = charts.learning_panels(self.reports, self.config.reward.maxima, training)
        first, last = (report.summary[HEADLINE]["return"].mean for report in (self.reports[0], self.last))
        words = "No reliable change of the held-out return:"
        if self.verdict.word.startswith("better"):
            words = "The held-out return rose"
        elif self.verdict.word == "worse":
            words = "The held-out return fell"
        curves = Pictures("Learning curves", panels, charts.OVER_PROBLEMS)
        return PageSection(curves, f"{words} from {first:.1%} to {last:.1%}")

    def _draw_scatter(self) -> PageSection:
        """Draw the first turn with a reward against the last."""
        first, *_, last = charts.list_priced_turns(self.reports)
        panels = charts.turn_panels(self.reports, self.config.reward)
        note = "The area of a point shows how many trajectories coincide there."
        return PageSection(Pictures(f"Turn {first} against turn {last}", panels, note), folded=len(self.reports) > 1)

    def _collect_figures(self) -> dict[str, object]:
        """Collect every figure of the report, as fractions of the maximum."""
        keys = sorted(shared_keys([self.means[0], self.means[-1]])) if len(self.reports) > 1 else []
        return {
            "run": self.run_id,
            "evaluations": [{"policy_version": one.policy_version, "summary": one.summary} for one in self.reports],
            "gains": {key: self.list_gains(key) for key in keys},
            "budget": self.budgets,  # cumulative; ``executions`` depends on interruptions of the run
        }


def write_report(context: StageContext) -> Metrics:
    """Write the report of a training run, its last stage."""
    store = context.store
    # Stages have the planned configuration, which counts too many iterations if train.max_tokens ended the training.
    config = store.config()
    reports = [read_evaluation(store.folder(pointer)) for pointer in context.inputs]
    RunReport(store, config, reports).write_files(context.folder)
    before, after = (report.summary[HEADLINE]["return"].mean for report in (reports[0], reports[-1]))
    return {"report/return_gain": after - before}
