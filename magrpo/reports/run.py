"""The report of a run: results and cost of its training, as one page, CSV, JSON and pictures."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from matplotlib.figure import Figure

from magrpo.algo.repetition import RUN
from magrpo.config.run import RunConfig
from magrpo.reports import charts, figures
from magrpo.reports.budget import UNITS, format_count
from magrpo.reports.charts import Panel
from magrpo.reports.evaluations import EvaluatedRun, paired_gain
from magrpo.reports.exhibits import (
    choose_best_answers,
    choose_examples,
    describe_choice,
    find_watched,
    watch_exhibits,
    watch_table,
)
from magrpo.reports.health import Finding, StageMetrics, answer_rows, list_findings, metric_series
from magrpo.reports.origin import describe_origin, list_next_commands
from magrpo.reports.page import (
    Exhibits,
    Facts,
    Listing,
    Pictures,
    ReportTable,
    Section,
    Terms,
    make_banner,
    write_page,
)
from magrpo.reports.paper import QUANTITIES, paper_tables, trained_row_name
from magrpo.reports.verdict import Verdict, judge_run
from magrpo.run.config_diff import list_changed_values
from magrpo.types import HEADLINE, EvalReport, Interval

_ONE_PROBLEM = "one problem: no interval"
_DESCRIBE_BEST = (
    "The answers with the highest reward, one per problem; among equal rewards, the one copied most. If they are poor, "
    "the reward favours something else. In texts, passages copied from the prompt are marked."
)


class RunReport(EvaluatedRun):
    """An evaluated run and the files of its report."""

    def write_files(self, folder: Path) -> None:
        """Write ``report.html``, ``.csv`` and ``.json``, the ledger (CSV) and the pictures (PNG, SVG)."""
        folder.mkdir(parents=True, exist_ok=True)
        drawn = list(self._draw_pictures())
        sections = list(self._list_sections([section for _, section, _ in drawn]))
        write_page(folder / "report.html", f"Run {self.store.run_id}", sections, self._describe_run())
        figures.write_csv(folder / "report.csv", figures.EVALUATION_COLUMNS, figures.evaluation_rows(self.reports))
        text = json.dumps(self._collect_figures(), indent=1, default=asdict)
        (folder / "report.json").write_text(text + "\n", encoding="utf-8")
        if self._trained:
            # The budget is cumulative; ``executions`` depends on interruptions of the run.
            rows = ([one.iteration, *one.counts.values(), f"{one.seconds:.3f}"] for one in self.budgets)
            figures.write_csv(folder / "budget.csv", ["iteration", *UNITS, "seconds"], rows)
        for name, _, figure in drawn:
            charts.save_figure(figure, folder / name)

    def evaluation_tables(self) -> list[ReportTable]:
        """A table for each split and mode: the agents before training and after it, and the paired difference."""
        columns = figures.first_and_last(self.reports, figures.start_title(self.config))
        heads = ["", *columns, *(["gain, paired by problem"] if len(columns) == 2 else [])]
        note = "Percent of the maximum, bootstrap 95 % intervals over problems; tokens are counts. "
        tables: list[ReportTable] = []
        for key in figures.sort_summary_keys(self.last.summary):
            lines = []
            for name in figures.shown_quantities(self.last.summary[key], self.config.reward.maxima):
                cells = [figures.format_interval(name, report.summary[key][name]) for report in columns.values()]
                if len(columns) == 2:
                    cells.append(figures.format_tested_difference(self._gain(key, name), figures.quantity_scale(name)))
                if figures.count_problems(self.last, key.partition("/")[0]) == 1:
                    cells = [cell.partition(" [")[0] for cell in cells]  # one problem has no interval over problems
                lines.append([figures.quantity_title(name), *cells])
            tables.append(
                ReportTable(figures.summary_title(key), heads, lines, "" if tables else note + figures.NO_DIFFERENCE)
            )
        return tables

    def paper_tables(self) -> Iterator[ReportTable]:
        """The run's agents beside the paper's, if the task is one of the paper's."""
        config = self.config
        untrained = "single" if len(config.agents) == 1 else "naive"
        rows = []
        start = figures.start_title(config)
        for title, report in figures.first_and_last(self.reports, start).items():
            name = trained_row_name(config.env.num_turns) if report.policy_version else untrained
            if title == start == figures.LOADED or (len(config.agents) == 1 and report.policy_version):
                continue  # the paper reports no such row
            summary = report.summary[HEADLINE]
            rows.append((title, name, {q: figures.format_interval(q, summary[q]) for q in QUANTITIES if q in summary}))
        yield from paper_tables(config, rows)

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the run."""
        return judge_run(self)

    @cached_property
    def findings(self) -> list[Finding]:
        """What the return of the run hides."""
        return list_findings(*self._health)

    @property
    def _health(self) -> tuple[StageMetrics, RunConfig, Sequence[EvalReport]]:
        return self.stage_metrics, self.config, self.reports

    def _training_returns(self) -> list[charts.Point]:
        """The return of each iteration in percent of the maximum."""
        series = metric_series(self.stage_metrics, "credit", "reward/joint")
        return [(iteration, 100 * self.config.reward.fraction(value)) for iteration, value in series]

    @property
    def _trained(self) -> bool:
        return self.budgets[-1].updates > 0

    def _gain(self, key: str, name: str) -> Interval:
        """The change from the first evaluation to the last, paired by problem."""
        return paired_gain(self.means[0][key][name], self.means[-1][key][name], self.config.eval.seed)

    def _describe_run(self) -> str:
        config = self.config
        agents = ", ".join(f"{agent.name} ({agent.model})" for agent in config.agents)
        turns = "one turn" if config.env.num_turns == 1 else f"{config.env.num_turns} turns"
        training = f"{format_count(config.train.num_iterations, 'iterations')}, seed {config.train.seed}"
        work = training if config.train.num_iterations else f"an evaluation, seed {config.eval.seed}"
        return f"{agents}; problems {config.problems.kind}, reward {config.reward.kind}, {turns}; {work}."

    def _list_sections(self, pictures: Sequence[Section]) -> Iterator[Section]:
        """The verdict, the curves, one before and after, one table; the rest is folded."""
        yield Section(make_banner(self.verdict, self.findings))
        yield Section(Facts("Summary", list(self._list_facts())))
        yield from pictures[:1]
        examples = choose_examples(self)
        if examples:
            title = "Before and after" if len(self.reports) > 1 else "An answer"
            yield Section(Exhibits(title, examples[:1], describe_choice(self)))
        table, *more = self.evaluation_tables()
        yield Section(table, self._find_largest_change())
        yield Section(Terms("Next steps", list(list_next_commands(self.store, self.config)), code=True))
        answers = Section(
            Exhibits("Highest rewards", choose_best_answers(self), _DESCRIBE_BEST), folded=not self.findings
        )
        yield answers
        yield from self._list_health()
        for block in (*more, *self.paper_tables()):
            yield Section(block, folded=True)
        yield from pictures[1:]
        if len(examples) > 1:
            yield Section(Exhibits("More examples", examples[1:], "Chosen by the same rule."), folded=True)
        yield from self._list_details()

    def _list_health(self) -> Iterator[Section]:
        """The answers and updates of each agent, and their course in training."""
        names = [agent.name for agent in self.config.agents]
        rows = [(title, *cells, settings) for title, cells, settings in answer_rows(*self._health)]
        note = (
            "Sampled answers to held-out problems at the first and the last evaluation; entropy and gradient norm of "
            "the first and the last iteration. A word counts as copied or repeated if the passage has at least "
            f"{RUN} words."
        )
        columns = ("", *names, "settings")
        yield Section(ReportTable("Training health", columns, rows, note, text=True), folded=True)
        panels = list(self._draw_health(names))
        if panels:
            yield Section(Pictures("Training, iteration by iteration", panels), folded=True)

    def _draw_health(self, names: Sequence[str]) -> Iterator[Panel]:
        """Panels of training metrics; one without values is left out."""

        def collect(stage: str, keys: Mapping[str, str], scale: float = 1.0) -> dict[str, list[charts.Point]]:
            """The points of each label that has any; ``keys``: the metric of each label."""
            series = {label: metric_series(self.stage_metrics, stage, key) for label, key in keys.items()}
            return {label: [(i, scale * value) for i, value in points] for label, points in series.items() if points}

        lengths = {name: f"rollout/{name}/response_tokens" for name in names}
        cut = {name: f"rollout/{name}/cut_off_frac" for name in names}
        copied = {name: f"rollout/{name}/copied_frac" for name in names}
        signals = {figures.quantity_title(part): f"signal/{part}" for part in self.config.reward.maxima}
        drawn = (
            ("Length of an answer", "tokens", collect("rollout", lengths)),
            ("Answers cut at the limit", "percent", collect("rollout", cut, 100)),
            ("Words copied from the prompt", "percent", collect("rollout", copied, 100)),
            ("Groups that differ in a part of the reward", "percent", collect("credit", signals, 100)),
            ("Groups with equal returns", "percent", collect("credit", {"": "reward/frac_groups_equal"}, 100)),
            ("Entropy", "nats per token", collect("update", {name: f"update/{name}/entropy" for name in names})),
            ("Gradient norm before clipping", "", collect("update", {n: f"update/{n}/grad_norm" for n in names})),
        )
        for title, unit, series in drawn:
            if series:
                yield charts.series_panel(title, series, unit)

    def _list_details(self) -> Iterator[Section]:
        watched = find_watched(self)
        if watched:
            finding = f"Watch list: the return rose, the tests did not ({format_count(len(watched), 'problems')})"
            yield Section(watch_table(self, watched), finding, folded=True)
            yield Section(watch_exhibits(self, watched), folded=True)
        if self._trained:
            yield Section(self._budget_table(), f"Budget: {figures.format_budget(self.budgets[-1])}", folded=True)
        left_out = ("tracking", "notify", "registry", "baselines")
        lines = [line for line in list_changed_values(self.config) if line.partition(".")[0] not in left_out]
        finding = f"Configuration: {format_count(len(lines), 'values')} that differ from the defaults"
        yield Section(Listing("Configuration", "\n".join(lines)), finding, folded=True)
        yield Section(Terms("About this run", describe_origin(self.store, self.config)))

    def _find_largest_change(self) -> str:
        """A heading for the first table: the part of the return that changed most, on held-out problems."""
        title = figures.summary_title(HEADLINE)
        if len(self.reports) == 1:
            return title
        gains = self._part_gains("test")
        part = charts.largest_reliable_change(gains)
        if part is None:
            return f"{title}: no part of the return changed reliably"
        return f"{title}: {figures.quantity_title(part)} changed most, {figures.format_difference(gains[part])}"

    def _part_gains(self, split: str) -> dict[str, Interval]:
        """The gain of every part of the reward on the sampled answers to the problems of a split."""
        return {part: self._gain(f"{split}/sampled", part) for part in self.config.reward.maxima}

    def _draw_pictures(self) -> Iterator[tuple[str, Section, Figure]]:
        """The name of each picture's files, its section of the page and its figure; the curves come first."""
        reports, maxima = self.reports, self.config.reward.maxima
        if len(reports) > 1:
            splits = [key.partition("/")[0] for key in self.last.summary if key.endswith("/sampled")]
            gains = {split: self._part_gains(split) for split in splits}
            panels = charts.learning_panels(reports, maxima, self._training_returns(), gains)
            figure = charts.compose_figure(panels[:2], charts.OVER_PROBLEMS)
            first, last = (report.summary[HEADLINE]["return"].mean for report in (reports[0], self.last))
            words = "No reliable change of the held-out return:"
            if self.verdict.word.startswith("better"):
                words = "The held-out return rose"
            elif self.verdict.word == "worse":
                words = "The held-out return fell"
            finding = f"{words} from {first:.1%} to {last:.1%}"
            yield "learning", Section(Pictures("Learning curves", panels, charts.OVER_PROBLEMS), finding), figure
            panels = charts.cloud_panels(reports, maxima)
            figure = charts.compose_figure(panels, charts.CLOUD)
            cloud = Pictures("Return of every trajectory", panels, charts.CLOUD)
            yield "cloud", Section(cloud, charts.describe_cloud(reports, maxima), folded=True), figure
        panels, turns = charts.turn_panels(reports, maxima), charts.longest_episode(reports)
        note = "The area of a point shows how many trajectories or problems coincide there."
        if turns > 1:
            block = Pictures(f"Turn 1 against turn {turns}", panels, note)
            yield "turns", Section(block, folded=len(reports) > 1), charts.compose_figure(panels, "", 5.0)
        elif len(reports) > 1:
            block = Pictures("Problem by problem", panels, note)
            finding = charts.describe_scatter(reports, maxima)
            yield "turns", Section(block, finding, folded=True), charts.compose_figure(panels, charts.ONE_TURN, 5.3)

    def _list_facts(self) -> Iterator[tuple[str, str, str]]:
        for key, title in ((HEADLINE, "held-out return"), ("ood/sampled", "return on new compositions")):
            if key in self.last.summary:
                yield self._make_fact(title, key, "return")
                if len(self.reports) > 1 and key == HEADLINE:
                    gain = self._gain(key, "return")
                    value, _, limits = figures.format_difference(gain).partition(" ")
                    both = len(self.means[0][key]["return"].keys() & self.means[-1][key]["return"].keys())
                    interval = f"{limits} points, {format_count(both, 'problems')}"
                    yield "gain, paired by problem", value, interval if both > 1 else _ONE_PROBLEM
        if "pass_at_1" in self.last.summary[HEADLINE]:
            yield self._make_fact("held-out pass@1", HEADLINE, "pass_at_1")
        if self._trained:
            tokens = format_count(self.budgets[-1].tokens, "tokens")
            rest = figures.format_budget(self.budgets[-1]).partition(" generated, ")[2]
            seconds = figures.format_duration(self.budgets[-1].seconds)
            yield "training generated", tokens, f"in {seconds} of stage time; {rest}"

    def _make_fact(self, title: str, key: str, name: str) -> tuple[str, str, str]:
        first, last = (report.summary[key][name] for report in (self.reports[0], self.last))
        interval = f"[{100 * last.low:.1f}, {100 * last.high:.1f}]"
        if figures.count_problems(self.last, key.partition("/")[0]) == 1:
            interval = _ONE_PROBLEM
        if len(self.reports) == 1:
            return title, f"{last.mean:.1%}", interval
        return (
            title,
            f"{first.mean:.1%} \u2192 {last.mean:.1%}",
            interval if interval == _ONE_PROBLEM else f"now {interval}",
        )

    def _budget_table(self) -> ReportTable:
        """Cost and return at each evaluation."""
        budgets = {budget.iteration: budget for budget in self.budgets}
        rows = []
        for report in self.reports:
            if budget := budgets.get(report.policy_version):
                counts = (f"{count:,}" for count in budget.counts.values())
                value = figures.format_interval("return", report.summary[HEADLINE]["return"])
                rows.append((str(budget.iteration), *counts, figures.format_duration(budget.seconds), value))
        note = "Training cost up to each evaluation, without evaluations. For every iteration see budget.csv."
        return ReportTable("Budget", ("iteration", *UNITS.values(), "time in stages", "held-out return, %"), rows, note)

    def _collect_figures(self) -> dict[str, object]:
        """Every figure of the report; fractions of the maximum."""
        first, last = self.means[0], self.means[-1]
        keys = sorted(first.keys() & last.keys()) if len(self.reports) > 1 else []
        return {
            "run": self.store.run_id,
            "evaluations": [{"policy_version": one.policy_version, "summary": one.summary} for one in self.reports],
            "gains": {key: {name: self._gain(key, name) for name in last[key] if name in first[key]} for key in keys},
            "watch_list": find_watched(self),
            "budget": self.budgets,
        }
