"""``magrpo runs`` and ``magrpo compare`` on runs that were made, with a tracking store, without, and elsewhere."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from magrpo.config.sections import PenaltyConfig
from magrpo.reports.budget import Budget
from magrpo.reports.comparison import compare_means, judge_difference, match_budgets
from magrpo.reports.comparison_tables import comparison_sections, list_run_costs, summary_table
from magrpo.reports.evaluations import EvaluatedRun
from magrpo.reports.figures import format_duration
from magrpo.reports.tables import ReportTable
from magrpo.rewards.coding import CodingReward
from magrpo.run.store import RunStore
from magrpo.stages.evaluate import summarise_rows
from magrpo.tracking.wall_time import WallTime, sum_attempts
from pipelines.cli import main
from pipelines.commands.show import tabulate_evaluations
from tests.browser import SCHEMES, WIDTHS, check_page, needs_chromium, open_browser
from tests.pipelines.micro import blank_pictures, write_config
from tests.reports.pages import Page


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs ``one`` and ``two`` on the same problems with different seeds."""
    folder = tmp_path_factory.mktemp("compare")
    config = str(write_config(folder, iterations=1))
    with blank_pictures():
        for name, override in (("one", "train.seed=0"), ("two", "train.seed=1")):
            assert main(["train", config, override, "--local", "--name", name]) == 0
    return folder / "runs"


class Compared(NamedTuple):
    """What ``magrpo compare`` printed, and the folder that it wrote."""

    said: str
    folder: Path


@pytest.fixture(scope="module")
def compared(root: Path) -> Compared:
    """Of ``one`` and ``two``, given as the shell completes folders."""
    folder, out = root.parent / "compared", io.StringIO()
    names = [str(root / "one"), f"{root / 'two'}/"]
    with redirect_stdout(out):
        assert main(["compare", *names, "--root", str(root), "--output", str(folder)]) == 0
    return Compared(out.getvalue(), folder)


def load(root: Path, name: str) -> EvaluatedRun:
    return EvaluatedRun.read(RunStore.open(root, name))


def listed(text: str) -> dict[str, str]:
    """The lines of the list that start with a run, by its name."""
    return {line.split()[0]: line for line in text.splitlines() if line.split()[:1] and line.startswith("  ")}


def test_runs_with_other_seeds_draw_other_samples_from_the_same_agents(root: Path) -> None:
    """Before training, adapters add nothing: only the draws differ, so seeds share no luck of an evaluation."""
    one, two = (load(root, name).reports[0].rows for name in ("one", "two"))
    for mode, alike in (("sampled", False), ("greedy", True)):
        texts = [[row.texts for row in rows if row.mode == mode] for rows in (one, two)]
        assert (texts[0] == texts[1]) is alike, mode


def test_runs_lists_the_folder_newest_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--root", str(root)]) == 0
    said = capsys.readouterr().out
    lines = listed(said)
    assert [name for name in lines if name in ("one", "two")] == ["two", "one"]
    first, last = (report.summary["test/sampled"]["return"].mean for report in load(root, "one").reports)
    assert lines["one"].split()[1:6] == ["finished", "1/1", f"{first:.1%}", "\u2192", f"{last:.1%}"]
    assert re.search(r"^  one .*\n +train\.seed=0 *$", said, re.MULTILINE)


def test_time_at_work_leaves_pauses_out() -> None:
    def status(value: str, time_ms: int) -> dict[str, object]:
        return {"kind": "status", "value": value, "time_ms": time_ms}

    metrics = {"kind": "metrics", "step": 1, "time_ms": 24_000, "values": {}}
    first = [status("RUNNING", 1_000), status("KILLED", 4_000)]
    killed: list[dict[str, object]] = [*first, status("RUNNING", 20_000), {"kind": "tags", "values": {}}, metrics]
    assert sum_attempts(first, None) == 3
    assert sum_attempts(killed, None) == 7
    assert sum_attempts(killed, 30_000) == 13
    assert sum_attempts([*killed, status("RUNNING", 50_000), status("FINISHED", 51_000)], None) == 8


@pytest.mark.parametrize(("seconds", "text"), [(9.6, "10 s"), (273, "4 min 33 s"), (7_500, "2 h 05 min")])
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_compare_prints_and_writes(root: Path, compared: Compared) -> None:
    said, folder = compared
    text = (folder / "compare.html").read_text(encoding="utf-8")
    page = Page(text)
    differing = page.tables["Configuration, where it differs: 1 key"]
    assert differing[1:] == [["train.seed", "0", "1"]], "the only key that differs"
    assert said.startswith("no reliable change: two is neither reliably better nor worse than one: held-out return ")
    assert "two \u2212 one" in text
    assert "2 problems, paired" in text
    assert "train.seed: 0, 1" in said.splitlines()
    assert len(said.splitlines()) < 20, "the rest is in the page"
    assert page.headings[0] == "two against one", "the page begins with the verdict"
    tokens = sum(
        metrics["rollout/tokens"]
        for _, stage, metrics in RunStore.open(root, "one").stage_metrics()
        if stage == "rollout.0"
    )
    [row] = [row for row in page.tables["Cost"] if row[0] == "tokens generated, training"]
    assert row[1] == f"{tokens:,.0f}"
    assert "thousands of tokens generated in training" in text
    assert [address for address in page.loaded if not address.startswith("#")] == []
    assert text.count("<svg") == 4, "two splits over iterations and over tokens"
    assert {path.name for path in folder.iterdir()} == {"compare.html"}


@needs_chromium
def test_a_comparison_in_a_browser(compared: Compared) -> None:
    with open_browser() as browser:
        for width, scheme in zip(WIDTHS, reversed(SCHEMES), strict=True):  # the style sheet is that of reports
            assert check_page(browser, compared.folder / "compare.html", width, scheme) == 4


def test_compare_for_scripts(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with blank_pictures():
        assert main(["compare", "one", "two", "--json", "--root", str(root), "--output", str(tmp_path / "out")]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert [run["run"] for run in tree["runs"]] == ["one", "two"]
    assert tree["configuration"] == {"train.seed": [0, 1]}
    [comparison] = tree["comparisons"]
    assert (comparison["label"], comparison["reference"], comparison["quantity"]) == ("two", "one", "return")
    means = [run["evaluation"]["test/sampled"]["return"]["mean"] for run in tree["runs"]]
    assert comparison["difference"]["mean"] == pytest.approx(means[1] - means[0])
    assert Path(tree["page"]).exists()


def test_a_verdict_needs_equal_rewards(root: Path) -> None:
    class Other:
        kind = "other"
        maxima: Mapping[str, float] = {"beauty": 1.0}

    one, two = load(root, "one"), load(root, "two")
    assert two.means, "read with its own reward"
    two.config = two.config.model_copy(update={"reward": Other()})
    verdict = judge_difference(one, two)
    assert verdict.quantity == "pass_at_1"
    assert "held-out pass@1" in verdict.sentence
    for report in (one.last, two.last):
        del report.summary["test/sampled"]["pass_at_1"]
    verdict = judge_difference(one, two)
    assert (verdict.word, verdict.difference) == ("not comparable", None)
    assert "the rewards differ" in verdict.sentence.lower()


def test_a_verdict_needs_equal_penalties(root: Path) -> None:
    one, two = load(root, "one"), load(root, "two")
    assert judge_difference(one, two).quantity == "return"
    two.config = two.config.model_copy(update={"penalty": PenaltyConfig(copied=0.5)})
    assert judge_difference(one, two).quantity == "pass_at_1"


def test_a_verdict_needs_equal_oracles(root: Path) -> None:
    one, two = load(root, "one"), load(root, "two")
    two.config = two.config.model_copy(update={"eval": two.config.eval.model_copy(update={"stop_above": 0.1})})
    verdict = judge_difference(one, two)
    assert (verdict.word, verdict.difference) == ("not comparable", None)
    assert "eval.stop_above" in verdict.sentence
    assert "Differences of return" not in [section.block.title for section in comparison_sections([one, two])]


def test_pass_at_1_needs_equal_verdicts_on_forgeable_tests(root: Path) -> None:
    one, two = load(root, "one"), load(root, "two")
    for run, refuses in ((one, True), (two, False)):
        assert run.means, "read with its own reward"
        run.config = run.config.model_copy(update={"reward": CodingReward(refuse_forgeable=refuses)})
    assert judge_difference(one, two).word == "not comparable"


def test_runs_on_different_problems_are_not_comparable(root: Path) -> None:
    one, two = load(root, "one"), load(root, "two")
    two.problems = {task_id: replace(problem, prompt="another") for task_id, problem in two.problems.items()}
    verdict = judge_difference(one, two)
    assert (verdict.word, verdict.difference) == ("not comparable", None)
    assert verdict.sentence.startswith("two and one were evaluated on different problems (")
    titles = [section.block.title for section in comparison_sections([one, two])]
    assert "Differences of return" not in titles


def unequal(root: Path, tokens: Sequence[int]) -> tuple[EvaluatedRun, EvaluatedRun]:
    """A run of one iteration, and one whose evaluations cost ``tokens`` times as many tokens."""
    one, two = load(root, "one"), load(root, "two")
    spent = one.budgets[-1].tokens
    [before, after] = two.reports
    two.reports = [before, *(replace(after, policy_version=i) for i in range(1, len(tokens) + 1))]
    two.budgets = [Budget(), *(Budget(i, tokens=spent * n, updates=i) for i, n in enumerate(tokens, 1))]
    two.config = two.config.model_copy(update={"train": two.config.train.model_copy(update={"num_iterations": 2})})
    return one, two


def test_a_comparison_on_one_problem_has_no_interval(root: Path) -> None:
    runs = [load(root, name) for name in ("one", "two")]
    for run in runs:
        task_id = next(row.task_id for row in run.last.rows if row.split == "test")
        kept = [tuple(row for row in report.rows if row.task_id == task_id) for report in run.reports]
        run.reports = [
            replace(report, rows=rows, summary=summarise_rows(rows, run.config.reward, 0))
            for report, rows in zip(run.reports, kept, strict=True)
        ]
    assert judge_difference(*runs).sentence.endswith(" percentage points (1 problem, paired).")
    blocks = [section.block for section in comparison_sections(runs)]
    tables = [summary_table(runs), *(block for block in blocks if isinstance(block, ReportTable))]
    cells = [cell for table in tables if not table.text for row in table.rows for cell in row]
    shown = tabulate_evaluations(runs[0].reports, narrow=False)
    assert not any("[" in str(cell) for cell in [*cells, *(cell for column in shown.columns for cell in column.cells)])


def test_runs_of_unequal_budgets_are_judged_at_equal_tokens(root: Path) -> None:
    one, two = unequal(root, [1, 2])
    assert (match_budgets(one, two), match_budgets(two, one)) == ((-1, 1), (1, -1))
    verdict = judge_difference(one, two)
    assert verdict.word == "no reliable change"
    assert verdict.iterations == (1, 1)
    spent = one.budgets[-1].tokens
    budgets = f"(two: 2 against 1 iteration, {2 * spent:,} against {spent:,} tokens)"
    assert f" one at equal tokens, after 1 against 1 iterations {budgets}: held-out return " in verdict.sentence


def test_without_an_evaluation_at_equal_tokens_there_is_no_verdict(root: Path) -> None:
    one, two = unequal(root, [3, 6])
    assert match_budgets(one, two) is None
    verdict = judge_difference(one, two)
    assert verdict.word == "unequal budgets"
    assert verdict.sentence.startswith("two trained 2 against 1 iteration, ")
    assert "so neither is called better: at their ends held-out return " in verdict.sentence
    assert "eval.every" in verdict.advice


def test_training_after_the_last_evaluation_counts_for_nothing(root: Path) -> None:
    """As in a run that was interrupted before its next evaluation."""
    one, two = unequal(root, [1, 2])
    two.reports = two.reports[:1]
    assert match_budgets(one, two) == (0, -1)
    verdict = judge_difference(one, two)
    assert verdict.iterations == (0, 0)
    assert "two: 0 against 1 iteration, 0 against " in verdict.sentence


def test_a_run_that_only_evaluates_has_no_budget_to_equal(root: Path) -> None:
    one, two = load(root, "one"), load(root, "two")
    two.budgets = [Budget()]
    assert match_budgets(one, two) == (-1, -1)


def test_a_run_with_an_update_set_aside_is_to_be_resumed_first(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``magrpo resume --from-stage`` may leave an evaluation whose update is still to be computed again."""
    runs = shutil.copytree(root, tmp_path / "runs")
    shutil.rmtree(runs / "one" / "stages" / "00001" / "update")
    assert main(["compare", "one", "two", "--root", str(runs), "--output", str(tmp_path / "page")]) == 2
    resume = RunStore(runs, "one").format_command("resume")
    assert f"the update of iteration 1 is missing; compute it again: {resume}" in capsys.readouterr().err


def test_gpu_hours_are_those_of_a_run_on_a_gpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = load(root, "one")
    assert list_run_costs(one)["GPU-hours"] == "0.00"
    stages = [(0, "update", {"start/gpus": 1.0}), (1, "rollout.0", {"time/rollout_s": 1800.0})]
    monkeypatch.setattr(RunStore, "stage_metrics", lambda _: stages)
    hours = "magrpo.reports.comparison_tables.read_wall_time"
    monkeypatch.setattr(hours, lambda _: WallTime(seconds=900.0, num_attempts=1))
    assert list_run_costs(one)["GPU-hours"] == "0.25", "stages may take place at the same time"
    monkeypatch.setattr(hours, lambda _: None)
    assert list_run_costs(one)["GPU-hours"] == "-"


def test_tokens_of_evaluations_are_those_of_all_turns(root: Path) -> None:
    one = load(root, "one")
    name = "tokens generated, evaluation"
    before = int(list_run_costs(one)[name].replace(",", ""))
    [first, *others] = one.reports
    rows = len(first.rows)
    two_turns = [replace(row, generated_tokens=row.generated_tokens + 7) for row in first.rows]
    one.reports = [replace(first, rows=tuple(two_turns)), *others]
    assert list_run_costs(one)[name] == f"{before + 7 * rows:,}"


def test_the_same_problems_are_paired_others_are_not(root: Path) -> None:
    one, two = load(root, "one"), load(root, "two")
    paired = compare_means(one, two, "test/sampled", "return")
    means = [report.last.summary["test/sampled"]["return"].mean for report in (one, two)]
    assert paired.pairing == "2 problems, paired"
    assert [paired.first_mean, paired.second_mean] == pytest.approx(means)
    assert paired.value.mean == pytest.approx(means[1] - means[0])
    same = compare_means(one, load(root, "one"), "test/sampled", "return").value
    assert (same.low, same.mean, same.high) == (0, 0, 0), "which an unpaired interval would not be"

    task_id = one.last.rows[0].task_id
    assert isinstance(two.problems, dict)
    two.problems[task_id] = next(problem for key, problem in two.problems.items() if key != task_id)
    unpaired = compare_means(one, two, f"{one.last.rows[0].split}/sampled", "return")
    assert unpaired.pairing == "other problems, unpaired; 1 in both"
    assert unpaired.value.low <= unpaired.value.mean <= unpaired.value.high


def test_means_in_a_sentence_are_those_of_the_problems_that_are_compared(root: Path) -> None:
    one, two = load(root, "one"), load(root, "two")
    quantity = "generated_tokens"
    assert one.means, "read with all problems"
    values = two.means[-1]["test/sampled"][quantity]
    assert isinstance(values, dict)
    kept, left_out = values
    del values[left_out]
    compared = compare_means(one, two, "test/sampled", quantity)
    assert compared.pairing == "1 problem, paired"
    assert compared.first_mean == one.means[-1]["test/sampled"][quantity][kept]
    assert compared.second_mean - compared.first_mean == pytest.approx(compared.value.mean)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["one", "tow"], "no run 'tow' in {root}; did you mean two?"),
        (["one", "zzzz"], "no run 'zzzz' in {root}; the newest runs there: one, two"),
        (["one"], "compare takes 2 to 6 runs, got 1"),
        (["one", "two", "one"], "compare: run one is named twice"),
        (["one", "{root}/one"], "compare: run one is named twice"),
    ],
)
def test_a_mistake_is_one_line(root: Path, names: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *(name.format(root=root) for name in names), "--root", str(root)]) == 2
    assert capsys.readouterr().err == f"magrpo: {message.format(root=root)}\n"
