"""The tables of ``magrpo evaluate --baselines``, from the committed rows: a page and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from magrpo.algo.stats import cross_play_values
from magrpo.config.run import REFERENCE, BaselineRow, RunConfig
from magrpo.envs.program import AgentProgram
from magrpo.reports import figures
from magrpo.reports.charts import Panel, dot_panel
from magrpo.reports.evaluations import (
    MIN_SEEDS,
    PAPER,
    Means,
    common_parts,
    common_share,
    compute_problem_means,
    interval_of_table,
    interval_over_seeds,
    measure_texts,
    shared_keys,
    subtract_means,
)
from magrpo.reports.page import Banner, PageSection, Pictures, write_page
from magrpo.reports.tables import ReportTable
from magrpo.reports.verdict import MIN_PROBLEMS
from magrpo.run.files import TIMED_ANSWERS, read_evaluation, run_of_weights
from magrpo.run.steps import Step
from magrpo.run.store import RunStore, read_records
from magrpo.stages.context import Metrics, StageContext
from magrpo.text import format_count
from magrpo.types import HEADLINE, PENALTY, EvalReport, Interval, TimedAnswer

PAPER_ROWS = ("single", "single_grpo", "naive", "sequential", "discussion", "magrpo", "one_turn", "two_turns")
"""The rows of the tables of arXiv 2508.04652, by name."""


@dataclass
class BaselineResult:
    """The measurements of one row of the table."""

    row: BaselineRow
    report: EvalReport
    timed: Sequence[TimedAnswer]
    common: Mapping[str, float]
    """Parts shared by the rewards of all rows, with their maxima."""
    comparable: bool
    """Whether its reward has the same parts as the run's, so that returns are comparable."""
    other_runs: Sequence[BaselineResult] = ()
    """The same row in runs with other seeds."""

    @cached_property
    def means(self) -> dict[str, Means]:
        """Problem means by split and mode. ``common``: the shared parts as a share of their joint maximum."""
        means_by_key = compute_problem_means(self.report, self.row.reward)
        for means in means_by_key.values():
            means["common"] = {
                task_id: common_share({part: means[part][task_id] for part in self.common}, self.common)
                for task_id in means["return"]
            }
            if not self.comparable:
                del means["return"]
        if not isinstance(self.row.env, AgentProgram):  # its texts are not what its agents said
            roles = {agent.name: agent.role for agent in self.row.agents}
            for key, measured in measure_texts(self.report, self.row.reward, roles).items():
                means_by_key[key] |= measured
        means_by_key[HEADLINE] |= {
            "seconds": {answer.task_id: answer.seconds for answer in self.timed},
            "tokens_per_s": {
                answer.task_id: answer.tokens / answer.seconds
                for answer in self.timed
                if answer.seconds  # an episode of a program may ask no agent
            },
        }
        return dict(means_by_key)

    def list_paper_columns(self) -> list[str]:
        """Return the quantities that the paper tabulates between response time and return.

        They are the parts of the reward, unless the reward measures the texts of agents in another way.
        """
        measured = [name for name in self.means[HEADLINE] if name.startswith(PAPER)]
        return measured or list(self.row.reward.maxima)

    def list_means(self, key: str, quantity: str) -> list[Mapping[str, float]]:
        """Return the problem means of this run and of the other runs; empty if one of them lacks the quantity."""
        found = [result.means.get(key, {}).get(quantity, {}) for result in (self, *self.other_runs)]
        return found if all(found) else []

    def compute_mean(self, quantity: str) -> float:
        """Compute the mean over held-out problems and runs, sampled; all of them must have the quantity."""
        return fmean(fmean(one.values()) for one in self.list_means(HEADLINE, quantity))

    def format_mean(self, quantity: str) -> str:
        """Format the mean over held-out problems and runs, sampled; a dash without a value."""
        if not self.list_means(HEADLINE, quantity):
            return figures.UNDEFINED
        mean = self.compute_mean(quantity) * figures.quantity_scale(quantity)
        return f"{mean:.2f}" if quantity == "seconds" else f"{mean:.1f}"


def read_baselines(store: RunStore, config: RunConfig) -> list[BaselineResult]:
    """Read the committed rows of a run in order."""
    rows = config.baselines.rows
    common = common_parts([row.reward.maxima for row in rows])
    results = []
    for row in rows:
        folder = store.stage_folder(Step("baseline", 0, row.name).output)
        comparable = dict(row.reward.maxima) == dict(config.reward.maxima)
        timed = read_records(folder / TIMED_ANSWERS, TimedAnswer)
        results.append(BaselineResult(row, read_evaluation(folder), timed, common, comparable))
    return results


def pool_baselines(runs: Sequence[Sequence[BaselineResult]], titles: Mapping[str, str]) -> list[BaselineResult]:
    """Return the rows that all runs have, each with the measurements of every run, in the order of the first run.

    ``titles``: title by name of the row, used where the runs disagree about it.
    """
    by_name = [{result.row.name: result for result in results} for results in runs]
    pooled = []
    for name, first in by_name[0].items():
        others = [results[name] for results in by_name[1:] if name in results]
        if len(others) == len(runs) - 1:
            same = all(other.row.title == first.row.title for other in others)
            title = first.row.title if same else titles.get(name, first.row.title)
            pooled.append(replace(first, row=first.row.model_copy(update={"title": title}), other_runs=others))
    return pooled


@dataclass(frozen=True)
class BaselineTable:
    """Agents beside baselines: the configuration of the run and the measurements of its rows."""

    config: RunConfig
    rows: Sequence[BaselineResult]

    def write_files(self, folder: Path, title: str = "Agents and baselines") -> None:
        """Write ``baselines.html`` and ``baselines.json``."""
        picture = Pictures("Rows", [self._draw_rows()], f"Held-out problems, sampled; {self._describe_intervals()}.")
        tables = [PageSection(table, folded=index > 0) for index, table in enumerate(self.list_tables())]
        write_page(folder / "baselines.html", title, [self.judge_rows(), picture, *tables], width="90rem")
        measured: list[dict[str, object]] = []
        for result in self.rows:
            for key, means in result.means.items():
                for quantity in means:
                    value = self._interval(result, key, quantity)
                    if value is not None:
                        measured.append(
                            {
                                "row": result.row.name,
                                "of": key,
                                "quantity": quantity,
                                "value": value,
                                f"less_{REFERENCE}": self._subtract_reference(result, key, quantity),
                            }
                        )
        tree = {
            "rows": [json.loads(result.row.model_dump_json()) for result in self.rows],
            "left_out": self.config.baselines.left_out,
            "figures": measured,
        }
        text = json.dumps(tree, indent=1, default=asdict)
        (folder / "baselines.json").write_text(text + "\n", encoding="utf-8")

    def judge_rows(self) -> Banner:
        """Judge the table: the best row, and its distance to the next one or to the trained team. Opens the page.

        Rows helped by an oracle, and teams with agents of several runs, are not ranked.
        """
        quantity = self._ranked_quantity
        ranked = sorted(
            (result for result in self.rows if _may_be_ranked(result.row)),
            key=lambda result: -result.compute_mean(quantity),
        )
        if not ranked:
            return Banner("Verdict", "no verdict", "No row answers on its own, without an oracle, so none is ranked.")
        best, *others = ranked
        share = f"{best.format_mean(quantity)} % of the {_name_maximum(quantity)}"
        if not others:
            return Banner("Verdict", "one row", f"{best.row.title} reaches {share}; no other row is ranked.")
        trained = next((result for result in others if result.row.is_trained_team), None)
        other = trained or others[0]
        lead = self._subtract(best, other, HEADLINE, quantity)
        assert lead is not None, "rows are evaluated on the same problems"
        mean, *remarks = figures.format_difference(lead).split(" ", 1)
        is_clear = lead.sign > 0
        if self._num_runs == 1 and self._num_problems < MIN_PROBLEMS:
            is_clear = False
            remarks = [f"over {format_count(self._num_problems, 'problems')}, and a verdict needs {MIN_PROBLEMS}"]
        elif 1 < self._num_runs < MIN_SEEDS:
            is_clear, remarks = False, ["too few seeds for an interval"]
        word = "clear winner" if is_clear else "no clear winner"
        sentence = (
            f"{best.row.title} reaches {share}; {other.row.title} reaches {other.format_mean(quantity)} "
            f"(difference {', '.join([f'{mean} percentage points', *remarks])})."
        )
        return Banner("Verdict", word, sentence)

    def paper_table(self) -> ReportTable:
        """Tabulate the paper's rows in its columns: speed, response time, quality and return, as means."""
        results = [result for result in self.rows if result.row.name in PAPER_ROWS]
        widest = max((result.list_paper_columns() for result in results), key=len, default=[])
        titles = {"tokens_per_s": "speed,\ntok/s", "seconds": "time,\ns"}
        quantities = [*titles, *widest, "return"]
        columns = [titles.get(name, figures.quantity_title(name.removeprefix(PAPER))) for name in quantities]
        lines = [(result.row.title, *map(result.format_mean, quantities)) for result in results]
        note = "Means. Speed and response time: problems asked one at a time. The rest: percent of the maximum."
        if any(name.startswith(PAPER) for name in widest):
            note += (
                " Structure: lengths, their ratio, and the ratio of different words; consistency: shared vocabulary; "
                "coherence: transition words. All are measured in every answer; the return stops at a level of 0."
            )
        if any(figures.UNDEFINED in line for line in lines):
            note += " A dash: not defined for this row."
        return ReportTable("Held-out problems, sampled: the columns of the paper", ("", *columns), lines, note)

    @property
    def _ranked_quantity(self) -> str:
        """The quantity by which all rows are comparable: the return, or the parts that all rewards share."""
        return self._returns[-1]

    @property
    def _num_runs(self) -> int:
        return len(self.rows[0].other_runs) + 1

    @property
    def _num_problems(self) -> int:
        """Number of held-out problems; the rows are evaluated on the same."""
        return len(self.rows[0].means[HEADLINE][self._ranked_quantity])

    def _describe_intervals(self) -> str:
        if self._num_runs == 1:
            return "95 % intervals over problems" if self._num_problems > 1 else "a single problem has no interval"
        if self._num_runs >= MIN_SEEDS:
            problems = "new problems" if self._num_problems > 1 else "the same problem"
            return f"95 % intervals for new seeds on {problems}, from {self._num_runs} runs"
        return f"means of {self._num_runs} runs: too few seeds for an interval, which takes {MIN_SEEDS}"

    def _draw_rows(self) -> Panel:
        quantity = self._ranked_quantity
        values = [(result.row.title, self._interval(result, HEADLINE, quantity)) for result in self.rows]
        dots = {title: value for title, value in values if value is not None}
        trained = [result.row.title for result in self.rows if result.row.is_trained_team]
        measured = "Joint return" if quantity == "return" else "Common parts"
        title = f"{measured}, percent of the maximum"
        return dot_panel(title, dots, trained)

    def list_tables(self) -> Iterator[ReportTable]:
        """Yield every table, the summary first."""
        yield self.summary_table()
        yield self.paper_table()
        yield from self.cross_play_tables()
        for key in figures.sort_summary_keys(self.rows[0].means):
            yield self._quality_table(key)
        yield self._settings_table()
        if self.config.baselines.left_out:
            yield ReportTable("Left out", ("row", "why"), list(self.config.baselines.left_out.items()), text=True)

    def summary_table(self, *, brief: bool = False) -> ReportTable:
        """Tabulate return, pass@1 and cost on held-out problems, sampled, and differences to the reference.

        If ``brief``, for terminals, without cost, and of the returns only the one that ranks the rows.
        """
        returns = self._returns[-1:] if brief else self._returns
        costs = {} if brief else {"tokens": "generated_tokens", "seconds": "seconds"}
        lines = []
        for result in self.rows:
            cells = [result.row.title]
            for quantity in returns:
                cells += [self._format_value(result, HEADLINE, quantity), self._format_difference(result, quantity)]
            cells += [self._format_value(result, HEADLINE, name) for name in self._solved]
            lines.append([*cells, *map(result.format_mean, costs.values())])
        heads = [head for name in returns for head in (name, f"\u2212 {REFERENCE}")]
        note = (
            "Percent of the maximum; differences in percentage points, paired by problem; "
            f"{self._describe_intervals()}. {figures.NO_DIFFERENCE}{self._common_note} "
            "A dash: not defined for this row."
        )
        if costs:
            note += (
                " Tokens of all agents and turns; seconds of sampling for one problem asked alone, of "
                f"{len(self.rows[0].timed)} problems."
            )
        columns = ("", *heads, *map(figures.quantity_title, self._solved), *costs)
        return ReportTable("Held-out problems, sampled: summary", columns, lines, note)

    def cross_play_tables(self) -> Iterator[ReportTable]:
        """Yield the table of returns of teams made of two runs, if there are such rows in a single table.

        The note subtracts from the return of each run's own team the mean of the teams that mix it with another run.
        """
        returns: dict[tuple[str, str], Mapping[str, float]] = {}
        cells: dict[tuple[str, str], str] = {}
        for result in self.rows:
            if result.row.is_trained_team or result.row.is_mixed_team:
                agents = result.row.agents
                sources = [run_of_weights(agent.start_from) for agent in agents if agent.start_from is not None]
                pair = sources[0], sources[-1]  # the run of the first role, and that of its partners
                returns[pair] = result.means[HEADLINE][self._ranked_quantity]
                cells[pair] = self._format_value(result, HEADLINE, self._ranked_quantity)
                first_role = agents[0].role  # the same in all rows
        runs = list(dict.fromkeys(first for first, _ in returns))
        if len(runs) < 2 or len(returns) < len(runs) ** 2 or self._num_runs > 1:
            return
        tasks = shared_keys(list(returns.values()))  # the sandbox may have failed on a problem in some rows
        if not tasks:
            return
        values = cross_play_values([[[returns[a, b][task_id] for task_id in tasks] for b in runs] for a in runs])
        difference = figures.format_difference(interval_of_table(values, self.config.eval.seed))
        maximum = _name_maximum(self._ranked_quantity)
        yield ReportTable(
            f"Cross-play: {first_role} from the run of the row, its partners from the run of the column",
            ("", *runs),
            [[first, *(cells[first, rest] for rest in runs)] for first in runs],
            f"Percent of the {maximum}. Teams of one run (the diagonal) less teams of two, paired by problem: "
            f"{difference} percentage points.",
        )

    @property
    def _returns(self) -> list[str]:
        """The return and, where it is not comparable between all rows, the parts that all rewards share."""
        return ["return"] if all(result.comparable for result in self.rows) else ["return", "common"]

    @property
    def _solved(self) -> list[str]:
        """Return ``pass_at_1`` as a quantity to show if the problems of any row can be solved."""
        return ["pass_at_1"] if any("pass_at_1" in result.means[HEADLINE] for result in self.rows) else []

    @property
    def _common_note(self) -> str:
        return f" Common: {', '.join(self.rows[0].common)} together." if len(self._returns) > 1 else ""

    def _quality_table(self, key: str) -> ReportTable:
        """Tabulate every quantity of a split and mode except costs."""
        results = [result for result in self.rows if key in result.means]
        parts = dict.fromkeys(part for result in self.rows for part in result.row.reward.maxima)
        most = max((result.row.reward.maxima for result in self.rows), key=len)
        measured = {name for result in results for name in result.means[key]}
        penalty = [PENALTY] if PENALTY in measured and PENALTY not in parts else []
        pass_at = figures.sort_pass_at(measured)
        names = [*most, *(part for part in parts if part not in most), *penalty, *self._returns, *pass_at]
        lines = [[result.row.title, *(self._format_value(result, key, name) for name in names)] for result in results]
        note = f"Percent of the maximum.{self._common_note}"
        return ReportTable(figures.summary_title(key), ("", *map(figures.quantity_title, names)), lines, note)

    def _settings_table(self) -> ReportTable:
        lines = []
        for row in (result.row for result in self.rows):
            env = ", ".join(f"{key} {value}" for key, value in row.env.model_dump().items() if value is not None)
            agents = "; ".join(f"{agent.role}: {agent.start_from or 'before training'}" for agent in row.agents)
            votes = "" if row.votes == "none" else f"; one of several by {row.votes}"
            stop = _describe_oracle(row)
            tries = "" if row.max_tries == 1 else f", at most {row.max_tries} tries"
            lines.append((row.name, row.title, env, agents + votes + stop + tries, str(row.max_new_tokens)))
        columns = ("name", "row", "environment", "agents", "max. tokens of a completion")
        return ReportTable("How the rows are made", columns, lines, text=True)

    def _interval(self, result: BaselineResult, key: str, quantity: str) -> Interval | None:
        return interval_over_seeds(result.list_means(key, quantity), self.config.eval.seed)

    def _subtract_reference(self, result: BaselineResult, key: str, quantity: str) -> Interval | None:
        """Subtract the reference; None for the reference itself, or if one of the two values is missing."""
        reference = next((other for other in self.rows if other.row.name == REFERENCE), result)
        return None if reference is result else self._subtract(result, reference, key, quantity)

    def _subtract(self, result: BaselineResult, other: BaselineResult, key: str, quantity: str) -> Interval | None:
        """Subtract another row, paired by problem; None if one of the two values is missing."""
        pairs = zip(result.list_means(key, quantity), other.list_means(key, quantity), strict=False)
        return interval_over_seeds([subtract_means(ours, theirs) for ours, theirs in pairs], self.config.eval.seed)

    def _format_value(self, result: BaselineResult, key: str, quantity: str) -> str:
        return figures.format_interval(quantity, self._interval(result, key, quantity))

    def _format_difference(self, result: BaselineResult, quantity: str) -> str:
        """Format the difference to the reference on held-out problems, sampled."""
        return figures.format_tested_difference(self._subtract_reference(result, HEADLINE, quantity))


def _may_be_ranked(row: BaselineRow) -> bool:
    """Whether a row answers on its own: without an oracle, and with agents of a single run."""
    return row.stop_above is None and row.votes != "best" and not row.is_mixed_team


def _describe_oracle(row: BaselineRow) -> str:
    """Say where the oracle of a row stops, if it has one: by default just below the maximum, so as to stop there."""
    if row.stop_above is None:
        return ""
    is_default = 1 - 1e-5 < row.reward.fraction(row.stop_above) < 1
    return f"; oracle: stops {'at the maximum' if is_default else f'above a reward of {row.stop_above:g}'}"


def _name_maximum(quantity: str) -> str:
    return "maximum of the parts that all rewards have" if quantity == "common" else "maximum"


def write_tables(context: StageContext) -> Metrics:
    """Write the tables of a run of baselines, its last stage."""
    BaselineTable(context.config, read_baselines(context.store, context.config)).write_files(context.folder)
    return {}
