"""``magrpo evaluate --baselines``: which rows there are, what plays in them, and what the tables say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from magrpo.config.run import BaselineRow, load_config
from magrpo.experiments.baselines import RunTeam, Teams, with_baselines
from magrpo.experiments.derive import Source, create_baselines
from magrpo.reports.baselines import BaselineResult, BaselineTable, read_baselines
from magrpo.reports.tables import print_tables
from magrpo.run.files import read_evaluation
from magrpo.run.store import RunStore, read_records, write_records
from magrpo.stages.rollout import Node
from magrpo.types import JointReward, PastTurn, Problem, SamplingParams
from pipelines.arguments import locate_config
from pipelines.cli import main
from tests.asking.runs import SMALL, make_run
from tests.pipelines.micro import run_locally, write_config
from tests.reports.pages import Page


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the runs ``a`` and ``b`` of one iteration each, and the table ``table`` of both; cut answers cost reward."""
    folder = tmp_path_factory.mktemp("baselines")
    path = write_config(folder, iterations=1)
    for name, seed in (("a", 0), ("b", 1)):
        run_locally(load_config(path, [f"train.seed={seed}", "penalty.cut_off=0.25"]), name)
    arguments = ["--baselines", "all", "--partner", "b", "--name", "table", "--root", str(folder / "runs")]
    assert main(["evaluate", "a", *arguments, "eval.num_samples=3", "--local"]) == 0
    return folder / "runs"


def rows_of(root: Path, run: str = "table") -> dict[str, BaselineRow]:
    return {row.name: row for row in RunStore.open(root, run).config().baselines.rows}


def seats(row: BaselineRow) -> list[tuple[str, str]]:
    """Role, and RUN/AGENT whose weights are in it."""
    return [
        (a.role, "untrained" if a.start_from is None else f"{a.start_from.parents[4].name}/{a.start_from.name}")
        for a in row.agents
    ]


def test_who_plays_in_every_row(root: Path) -> None:
    rows = rows_of(root)
    trained, untrained = {"helper": "a/helper", "main": "a/main"}, {"helper": "untrained", "main": "untrained"}
    expected = {
        "naive": untrained,
        "magrpo": trained,
        "two_turns": trained,
        "swap": {"helper": "a/main", "main": "a/helper"},
        "solo_helper": {"helper": "a/helper", "main": "a/helper"},
        "solo_main": {"helper": "a/main", "main": "a/main"},
        "untrained_partner_helper": {"helper": "a/helper", "main": "untrained"},
        "untrained_partner_main": {"helper": "untrained", "main": "a/main"},
        "partners_a_b": {"helper": "a/helper", "main": "b/main"},
        "partners_b_a": {"helper": "b/helper", "main": "a/main"},
        "partners_b_b": {"helper": "b/helper", "main": "b/main"},
    }
    two = {name: dict(seats(row)) for name, row in rows.items() if len(row.agents) == 2}
    assert two == expected
    assert {name: row.env.num_turns for name, row in rows.items() if row.env.num_turns != 1} == {"two_turns": 2}
    assert {len(row.agents) for row in rows.values()} == {2}
    left_out = RunStore.open(root, "table").config().baselines.left_out
    assert left_out["one_turn"] == "the same as magrpo"
    known = "coding, solo, team, relay, relay_solo, writing, writing_solo"
    assert left_out["single"] == f"it needs one of the rewards {known}, not tests.plugins:Reward"
    assert left_out["discussion"] == "env 'tests.plugins:Env' has no field 'feedback'"


def test_rows_find_what_the_runs_found(root: Path) -> None:
    """The weights in a row are those of the run: its own last evaluation comes out again, to the token."""

    def played(run: str, stage: str) -> list[tuple[object, ...]]:
        report = read_evaluation(RunStore.open(root, run).path / f"stages/{stage}")
        assert any(row.parts[-1]["penalty"] < 0 for row in report.rows)
        return [(r.task_id, r.mode, r.returns, list(r.texts.values())) for r in report.rows if r.index < 2]

    assert played("table", "00000/baseline.naive") == played("a", "00000/evaluate")
    assert played("table", "00000/baseline.magrpo") == played("a", "00001/evaluate")
    # The table draws with the seed of its own run, so of another one only what is greedy is the same.
    greedy = [
        [row for row in played(*of) if row[1] == "greedy"]
        for of in (("table", "00000/baseline.partners_b_b"), ("b", "00001/evaluate"))
    ]
    assert greedy[0] == greedy[1]
    assert played("table", "00000/baseline.swap") != played("a", "00001/evaluate")


def test_cross_play_table(root: Path) -> None:
    """The mean of the diagonal less that of the rest, by hand from the evaluations of the rows."""
    store = RunStore.open(root, "table")
    [table] = BaselineTable(store.config(), read_baselines(store, store.config())).cross_play_tables()
    assert table.title.startswith("Cross-play: helper from the run of the row")
    assert table.columns == ("", "a", "b")

    def mean_return(row: str) -> float:
        report = read_evaluation(store.path / f"stages/00000/baseline.{row}")
        by_task: dict[str, list[float]] = {}
        for one in report.rows:
            if (one.split, one.mode) == ("test", "sampled"):
                by_task.setdefault(one.task_id, []).append(50 * one.returns[-1])
        return fmean(map(fmean, by_task.values()))

    names = [["magrpo", "partners_a_b"], ["partners_b_a", "partners_b_b"]]
    means = [[mean_return(name) for name in line] for line in names]
    for line, (first, *cells) in zip(means, table.rows, strict=True):
        assert first in ("a", "b")
        assert [cell.partition(" ")[0] for cell in cells] == [f"{mean:.1f}" for mean in line]
    difference = (means[0][0] + means[1][1] - means[0][1] - means[1][0]) / 2
    assert f"paired by problem: {difference:+.1f} percentage points" in table.note.replace("\u2212", "-")
    by_name = {result.row.name: result for result in read_baselines(store, store.config())}
    incomplete = BaselineTable(store.config(), [by_name["naive"], by_name["magrpo"], by_name["partners_a_b"]])
    assert not list(incomplete.cross_play_tables())


def test_tables(root: Path) -> None:
    report = root / "table" / "stages" / "00000" / "report"
    tree = json.loads((report / "baselines.json").read_text())
    figures = {(f["row"], f["of"], f["quantity"]): f for f in tree["figures"]}
    row = read_evaluation(RunStore.open(root, "table").path / "stages/00000/baseline.magrpo")
    sampled = [r for r in row.rows if (r.split, r.mode) == ("test", "sampled")]
    tasks = sorted({r.task_id for r in sampled})
    by_hand = fmean(fmean(r.returns[-1] / 2 for r in sampled if r.task_id == task) for task in tasks)
    found = figures["magrpo", "test/sampled", "return"]
    assert found["value"]["mean"] == pytest.approx(by_hand)
    reference = figures["naive", "test/sampled", "return"]
    assert found["less_naive"]["mean"] == pytest.approx(by_hand - reference["value"]["mean"])
    assert reference["less_naive"] is None
    page = Page((report / "baselines.html").read_text())
    short = next(cells for rows in page.tables.values() for cells in rows if cells[0] == "MAGRPO")
    assert short[1].partition(" [")[0] == f"{100 * by_hand:.1f}"
    assert "comparison with the paper" not in page.text.lower()
    assert page.headings[0] == "Verdict"
    assert "MAGRPO reaches " in page.text
    assert 'aria-label="Joint return, percent of the maximum"' in (report / "baselines.html").read_text()
    for name in rows_of(root):
        assert figures[name, "test/sampled", "seconds"]["value"]["low"] > 0
    assert (
        figures["two_turns", "test/sampled", "generated_tokens"]["value"]["mean"]
        > (figures["magrpo", "test/sampled", "generated_tokens"]["value"]["mean"])
    )


def test_a_table_goes_on_where_it_stopped(root: Path) -> None:
    stages = root / "table" / "stages" / "00000"
    before = {path.name: path.stat().st_mtime_ns for path in stages.glob("*/_SUCCESS")}
    shutil.rmtree(RunStore.open(root, "table").path / "stages/00000/report")
    shutil.rmtree(RunStore.open(root, "table").path / "stages/00000/baseline.swap")
    assert main(["resume", "table", "--root", str(root), "--local"]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in stages.glob("*/_SUCCESS")}.keys() == before.keys()
    assert (stages / "report" / "baselines.html").exists()


def test_tables_of_several_seeds_become_one(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--baselines", "magrpo,swap", "--name", "table-b", "--root", str(root), "eval.num_samples=3"]
    assert main(["evaluate", "b", *arguments, "--local"]) == 0
    capsys.readouterr()
    assert main(["compare", "table", "table-b", "--root", str(root), "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "left out: solo_helper: not in all of the runs" in said
    tree = json.loads((tmp_path / "baselines.json").read_text())
    figures = {(f["row"], f["of"], f["quantity"]): f for f in tree["figures"]}
    assert {row for row, _, _ in figures} == {"naive", "magrpo", "swap"}
    reports = [
        json.loads((root / run / "stages/00000/report/baselines.json").read_text()) for run in ("table", "table-b")
    ]
    for name in ("value", "less_naive"):
        of_each = [
            f[name]["mean"]
            for report in reports
            for f in report["figures"]
            if (f["row"], f["of"], f["quantity"]) == ("magrpo", "test/sampled", "return")
        ]
        assert figures["magrpo", "test/sampled", "return"][name]["mean"] == pytest.approx(fmean(of_each))
    text = (tmp_path / "baselines.html").read_text()
    assert "means of 2 runs: too few seeds for an interval, which takes 3" in text
    assert "too few seeds for an interval)." in " ".join(said.split())
    assert "[" not in said
    assert main(["compare", "table", "a", "--root", str(root)]) == 2
    assert "run table compares baselines, but the others do not" in capsys.readouterr().err
    (root / "table-b/stages/00000/baseline.magrpo/_SUCCESS").unlink()
    assert main(["compare", "table", "table-b", "--root", str(root)]) == 2
    assert "run table-b is not finished" in capsys.readouterr().err


@pytest.fixture
def copies(root: Path, tmp_path: Path) -> Path:
    """With the table ``table`` and a copy of it, ``copy``, in which the agents of run ``a`` are those of run ``c``."""
    for name in ("table", "copy"):
        shutil.copytree(root / "table", tmp_path / name)
    change_rows(tmp_path, lambda row: json.loads(json.dumps(row).replace(f"{root}/a/", f"{root}/c/")))
    return tmp_path


def change_rows(root: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change every row in the configuration of the run ``copy``."""
    path = root / "copy" / "config.json"
    tree = json.loads(path.read_text())
    tree["baselines"]["rows"] = list(map(change, tree["baselines"]["rows"]))
    path.write_text(json.dumps(tree))


def test_a_row_with_the_same_agents_in_two_tables_is_left_out(copies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "table", "copy", "--root", str(copies), "--output", str(copies / "page")]) == 0
    said = capsys.readouterr().out
    assert "left out: partners_b_b: two of the runs load the same weights, so they are no two seeds" in said
    assert said.count("left out: ") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"penalty": {"cut_off": 0.5}}, "row 'naive' has another reward or penalty than in run table"),
        ({"reward": {"kind": "returned"}}, "row 'naive' has another reward or penalty than in run table"),
        ({"stop_above": 0.5, "max_tries": 2}, "row 'naive' has another stop_above, max_tries than in run table"),
    ],
)
def test_tables_that_were_measured_differently_are_not_pooled(
    copies: Path, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_rows(copies, lambda row: row | change)
    assert main(["compare", "table", "copy", "--root", str(copies)]) == 2
    said = capsys.readouterr().err
    assert f"run copy: {message}" in said
    assert "make both tables with the same configuration" in said


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("rollout.temperature", "1.0", "0.5"),
        ("eval.num_samples", "3", "4"),
        ("model.head_dtype", '"auto"', '"float32"'),
        ("agents.0.model", '"[^"]+/[^"]+"', '"other"'),
    ],
)
def test_tables_that_were_sampled_differently_are_not_pooled(
    copies: Path, key: str, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copies / "copy" / "config.json"
    name = key.rpartition(".")[2]
    path.write_text(re.sub(f'"{name}": {old}', f'"{name}": {new}', path.read_text()))
    assert main(["compare", "table", "copy", "--root", str(copies)]) == 2
    before, after = (value.strip('"') for value in (old, new))
    message = (
        f"run copy has {key} = {after}, but run table has {before}, so the two cannot be pooled; make both tables "
    )
    assert re.search(message, capsys.readouterr().err)


def test_tables_may_differ_in_the_seeds_of_their_samples(copies: Path) -> None:
    path = copies / "copy" / "config.json"
    tree = json.loads(path.read_text())
    tree["eval"]["seed"] += 1
    tree["eval"]["every"] += 1
    path.write_text(json.dumps(tree))
    assert main(["compare", "table", "copy", "--root", str(copies), "--output", str(copies / "page")]) == 0


def test_tables_of_other_problems_with_equal_names_are_not_pooled(
    copies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [path] = (copies / "copy/stages/00000/prepare").glob("*test*")
    write_records(path, [replace(problem, test="other") for problem in read_records(path, Problem)])
    assert main(["compare", "table", "copy", "--root", str(copies)]) == 2
    assert "run copy was evaluated on other problems than table" in capsys.readouterr().err


def test_two_tables_of_one_run_are_not_two_seeds(copies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(copies / "table/config.json", copies / "copy/config.json")
    assert main(["compare", "table", "copy", "--root", str(copies)]) == 2
    assert "runs table and copy show agents of the same run, so they are not two seeds" in capsys.readouterr().err


def test_the_verdict_ranks_rows_and_leaves_oracles_out(root: Path) -> None:
    config = RunStore.open(root, "table").config()
    rows = read_baselines(RunStore.open(root, "table"), config)
    by_name = {result.row.name: result for result in rows}
    table = BaselineTable(config, [replace_return(by_name["naive"], 0.2), replace_return(by_name["magrpo"], 0.9)])
    banner = table.judge_rows()
    assert banner.word == "clear winner"
    two = [replace_return(result, value, 2) for result, value in zip(table.rows, (0.2, 0.9), strict=True)]
    banner_of_two = BaselineTable(config, two).judge_rows()
    assert banner_of_two.word == "no clear winner"
    assert "over 2 problems, and a verdict needs 6" in banner_of_two.sentence
    one = BaselineTable(
        config, [replace_return(result, value, 1) for result, value in zip(two, (0.2, 0.9), strict=True)]
    )
    assert one.summary_table().rows[1][:3] == ["MAGRPO", "90.0", "+70.0"]
    assert "a single problem has no interval" in one.summary_table().note
    assert banner.sentence == (
        "MAGRPO reaches 90.0 % of the maximum; naive concatenation reaches 20.0 (difference +70.0 percentage points)."
    )
    cells = table.summary_table().rows[1]
    assert cells[:3] == ["MAGRPO", "90.0", "+70.0"]
    oracle = by_name["swap"].row.model_copy(update={"stop_above": 1.0})
    helped = replace_return(replace(by_name["swap"], row=oracle), 1.0)
    banner = BaselineTable(config, [*table.rows, helped, replace_return(by_name["solo_main"], 0.95)]).judge_rows()
    assert banner.sentence.startswith(
        "cross-play: main in every role reaches 95.0 % of the maximum; MAGRPO reaches 90.0"
    )


def replace_return(result: BaselineResult, value: float, num_problems: int = 6) -> BaselineResult:
    """The row with the same return on every one of so many problems."""
    changed = replace(result)
    for key, means in changed.means.items():
        changed.means[key] = {**means, "return": {f"problem/{index}": value for index in range(num_problems)}}
    return changed


ALONE = "def f(n):\\n    return n"
CODING = [
    "env.kind=coding",
    "env.prompt=bare",
    "reward.kind=coding",
    f'engine={{kind="tests.plugins:Engine", text="{ALONE}"}}',
]


def test_rows_of_one_agent_are_compared_on_what_is_common(root: Path) -> None:
    """Of a configuration: an agent that writes the whole program every time, alone and beside one that should help."""
    config = str(root.parent / "run.toml")
    names = "voting,best_of,magrpo,discussion,sequential,single_grpo"
    name = "of-a-configuration"
    arguments = ["--baselines", names, "--root", str(root), "--local", "--name", name]
    assert main(["evaluate", config, *CODING, *arguments]) == 0
    rows = rows_of(root, name)
    assert list(rows) == ["single", "naive", "sequential", "discussion", "voting", "best_of"]
    assert [(rows[name].agents[0].name, seats(rows[name])) for name in ("single", "voting")] == [
        ("main", [("solo", "untrained")])
    ] * 2
    assert (rows["single"].max_new_tokens, rows["naive"].max_new_tokens) == (2 * 6, 6)
    discussion: Any = rows["discussion"].env
    assert (discussion.num_turns, discussion.feedback) == (2, "discussion")
    left_out = RunStore.open(root, name).config().baselines.left_out
    assert "not trained" in left_out["magrpo"]
    assert "--single-run" in left_out["single_grpo"]
    stages = root / name / "stages" / "00000"
    votes = json.loads((stages / "baseline.voting" / "_SUCCESS").read_text())["metrics"]["baseline/voting/votes"]
    assert votes == 4, "two turns of two agents, all texts of one length"
    assert rows["sequential"].env.kind == "sequential"
    tree = json.loads((stages / "report" / "baselines.json").read_text())
    mean = {(f["row"], f["quantity"]): f["value"]["mean"] for f in tree["figures"] if f["of"] == "test/sampled"}
    assert ("single", "return") not in mean
    assert ("single", "cooperation") not in mean
    parts = {"structure": 1.0, "syntax": 0.5, "tests": 1.0}
    for name in rows:
        common = sum(mean[name, part] * maximum for part, maximum in parts.items()) / sum(parts.values())
        assert mean[name, "common"] == pytest.approx(common)
    assert mean["single", "structure"] == 1.0
    assert mean["naive", "structure"] == pytest.approx(0.6), "no helper function"
    store = RunStore.open(root, "of-a-configuration")
    table = BaselineTable(store.config(), read_baselines(store, store.config())).paper_table()
    assert table.columns[1:] == (
        *("speed,\ntok/s", "time,\ns"),
        *("structure", "syntax", "tests", "cooperation", "return"),
    )
    cells = {title: figures for title, *figures in table.rows}
    assert list(cells) == ["single agent", "naive concatenation", "sequential pipeline", "one-round discussion"]
    assert cells["single agent"][2] == "100.0"
    assert cells["single agent"][5:] == ["-", "-"]
    assert "-" not in cells["naive concatenation"]
    for width in (80, 120):
        console = Console(width=width, file=StringIO())
        print_tables([table], console)
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert {"concatenation", "discussion", "cooperation"} <= set(said.split()), "no word is broken"
        assert max(map(len, said.splitlines())) <= width


def test_a_single_agent_needs_no_feedback(root: Path) -> None:
    """Of agents who discuss: whoever writes alone has nobody to discuss with, and writes only once."""
    overrides = ["env={kind='coding', prompt='bare', num_turns=2, feedback='discussion'}", "reward.kind=coding"]
    store = create_baselines(Source(str(root.parent / "run.toml"), None, root, overrides), "single,voting", None)
    rows = rows_of(root, store.run_id)
    assert list(rows) == ["single", "naive", "voting"]
    single: Any = rows["single"].env
    assert (single.num_turns, single.feedback) == (1, "plain")


def test_beside_a_single_agent_stands_the_reference_that_rows_are_compared_with(root: Path) -> None:
    """An untrained single agent writes as the agents of such a run do: two names of one row."""
    source = Source(str(locate_config("embedded_grpo")), None, root, [])
    assert list(rows_of(root, create_baselines(source, "single", None).run_id)) == ["single", "naive"]


def test_rows_of_trained_agents_are_named_after_their_method(root: Path) -> None:
    embedded = locate_config("embedded_grpo")
    runs = (("IAC", root.parent / "run.toml", ("algo.estimator=iac",)), ("GRPO", embedded, SMALL))
    for method, config, overrides in runs:
        make_run(config, root, overrides, method)
        store = create_baselines(Source(method, None, root, []), "magrpo,two_turns", None)
        titles = [row.title for row in rows_of(root, store.run_id).values()]
        assert titles == ["naive concatenation", method, f"{method}, two turns"]


def test_runs_with_dots_in_their_names_are_partners(root: Path) -> None:
    for name in ("qwen2.5-s0", "qwen2.5-s1"):
        make_run(root.parent / "run.toml", root, (), name)
    source = Source("qwen2.5-s0", None, root, [])
    rows = rows_of(root, create_baselines(source, "partners", None, partners=["qwen2.5-s1"]).run_id)
    assert "partners_qwen2.5-s0_qwen2.5-s1" in rows


def test_beside_agents_that_take_turns_the_naive_ones_write_at_once(root: Path) -> None:
    overrides = ["env={kind='sequential', prompt='bare'}", "reward.kind=coding", "agents.0.start_from=somewhere"]
    source = Source(str(root.parent / "run.toml"), None, root, overrides)
    store = create_baselines(source, "all", None)
    rows = rows_of(root, store.run_id)
    assert {
        name: (rows[name].env.kind, rows[name].env.num_turns) for name in ("naive", "sequential", "discussion")
    } == {
        "naive": ("coding", 1),
        "sequential": ("sequential", 2),
        "discussion": ("coding", 2),
    }
    envs: list[Any] = [row.env for row in rows.values()]
    assert {env.prompt for env in envs} == {"bare"}
    authors = [
        f"agents.{i}.{key}={role}" for i, role in enumerate(("summary", "elaboration")) for key in ("name", "role")
    ]
    overrides = ["env={kind='writing_sequential', prompt='bare'}", "reward.kind=writing", *authors]
    store_of_authors = create_baselines(Source(str(root.parent / "run.toml"), None, root, overrides), "all", None)
    kinds = {name: (row.env.kind, row.env.num_turns) for name, row in rows_of(root, store_of_authors.run_id).items()}
    assert kinds == {
        "single": ("writing_solo", 1),
        "naive": ("writing", 1),
        "sequential": ("writing_sequential", 2),
        "discussion": ("writing", 2),
        "best_of": ("writing_solo", 1),
    }
    assert rows["naive"].agents[0].start_from == Path("somewhere"), "what the run's agents were before training"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "--baselines", "nave"], "did you mean 'naive'"),
        (["a", "--partner", "b"], "need --baselines"),
        (["table", "--baselines", "all"], "run table does not train"),
        (["a", "--baselines", "all", "--partner", "c"], "no run 'c'"),
        (["a", "--baselines", "single_grpo", "--single-run", "d"], "no run 'd'"),
        (
            ["a", "--baselines", "single_grpo", "--single-run", "b"],
            "--single-run b: it trained 2 agents (helper, main); name a run that trained one, such as one of embedded",
        ),
        (["a", "--baselines", "all", "lora.rank=4", "--partner", "b"], "section lora differs"),
    ],
)
def test_a_mistake_is_one_clear_line(
    root: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *arguments, "--root", str(root), "--local"]) == 2
    assert said in capsys.readouterr().err


def test_a_table_is_named_after_the_whole_name_of_its_run(root: Path) -> None:
    make_run(root.parent / "run.toml", root, name="lr-0.1")
    assert create_baselines(Source("lr-0.1", None, root), "magrpo", None).run_id == "lr-0.1-baselines"


def test_agents_that_shared_an_adapter_play_apart(root: Path) -> None:
    shared = ["agents.0.weights=shared", "agents.1.weights=shared"]
    config = root.parent / "run.toml"
    make_run(config, root, shared, "shared")
    apart = create_baselines(Source("shared", None, root, []), "magrpo,untrained_partner", None)
    rows = rows_of(root, apart.run_id)
    first, second = load_config(config).agents
    assert seats(rows[f"untrained_partner_{first.name}"]) == [
        (first.role, f"shared/{first.name}"),
        (second.role, "untrained"),
    ]
    assert {agent.weights for agent in apart.config().agents} == {"lora"}


def test_beside_agents_with_two_turns_stand_an_oracle_and_another_try(root: Path) -> None:
    turns = ["env.num_turns=2", "rollout.termination_threshold=-1", "eval.num_samples=6"]
    make_run(root.parent / "run.toml", root, turns, "turns")
    names = "magrpo,one_turn,two_turns,oracle_stop,retry"
    assert main(["evaluate", "turns", "--baselines", names, "--root", str(root), "--local", "--name", "stops"]) == 0
    rows = rows_of(root, "stops")
    assert list(rows) == ["naive", "magrpo", "one_turn", "oracle_stop", "retry"]
    largest = pytest.approx(2.0, abs=1e-5)
    assert {name: (row.env.num_turns, row.stop_above, row.max_tries) for name, row in rows.items()} == {
        "naive": (1, None, 1),
        "magrpo": (2, None, 1),
        "one_turn": (1, None, 1),
        "oracle_stop": (2, largest, 1),
        "retry": (1, largest, 2),
    }
    assert all(seats(rows[name]) == seats(rows["magrpo"]) for name in ("oracle_stop", "retry"))
    played = {
        name: {
            (r.task_id, r.index): r
            for r in read_evaluation(RunStore.open(root, "stops").path / f"stages/00000/baseline.{name}").rows
            if r.mode == "sampled"
        }
        for name in rows
    }
    for key, first in played["one_turn"].items():
        stopped, again = played["oracle_stop"][key], played["retry"][key]
        assert stopped.returns[0] == again.returns[0] == played["magrpo"][key].returns[0] == first.returns[0]
        assert len(stopped.returns) == len(again.returns) == (1 if first.returns[0] == 2.0 else 2)
        assert again.generated_tokens >= sum(stats.tokens for stats in again.answers.values())
    assert {len(row.returns) for row in played["retry"].values()} == {1, 2}
    page = Page((root / "stops/stages/00000/report/baselines.html").read_text())
    titles = {cells[0] for rows in page.tables.values() for cells in rows}
    assert {"MAGRPO, oracle stop", "MAGRPO, one turn, retry (oracle)"} <= titles
    assert "oracle: stops at the maximum, at most 2 tries" in page.text
    low = create_baselines(Source("turns", None, root, ["eval.stop_above=0.5"]), names, None)
    assert {row.stop_above for row in rows_of(root, low.run_id).values()} == {None, 0.5}
    left_out = RunStore.open(root, "table").config().baselines.left_out
    assert left_out["retry"] == left_out["oracle_stop"]
    assert "the run has a single turn" in left_out["retry"]


@pytest.mark.parametrize(
    ("name", "overrides", "left_out"),
    [
        ("embedded_two_turns", (), {"shuffled_message"}),
        ("embedded_two_turns", ("env.feedback=passed",), {"shuffled_message"}),
        ("embedded_two_turns", ("env.feedback=discussion",), set()),
        ("sequential", (), {"oracle_stop"}),
        ("sequential", ("env.num_turns=4",), set()),
        ("relay_two_turns", (), {"oracle_stop"}),
        ("relay_two_turns", ("env.message=none",), {"oracle_stop", "shuffled_message"}),
        ("writing_embedded", ("env.num_turns=2",), {"shuffled_message"}),
        ("writing_embedded", ("env.num_turns=2", "env.feedback=discussion"), set()),
        ("writing_embedded", ("env.kind=writing_sequential",), {"oracle_stop"}),
        ("embedded_grpo", ("env.num_turns=2",), {"shuffled_message"}),
        ("embedded", ("env={kind='tests.plugins:Env', num_turns=2}", "reward.kind=tests.plugins:Reward"), set()),
    ],
)
def test_a_row_that_must_equal_that_of_the_run_is_left_out(
    name: str, overrides: tuple[str, ...], left_out: set[str]
) -> None:
    """Nothing is shuffled where no prompt quotes a partner, and no oracle stops before the only price."""
    few = [f"problems.num_{split}=6" for split in ("train", "test", "ood")]  # one of them is read
    config = load_config(locate_config(name), [*overrides, *([] if name.startswith("writing") else few)])
    trained = [agent.model_copy(update={"start_from": Path("run", agent.name)}) for agent in config.agents]
    teams = Teams("run", RunTeam("the run", config.agents), RunTeam("run", tuple(trained)), None, ())
    rows = ["magrpo", "shuffled_message", "oracle_stop"]
    table = with_baselines(config, rows, teams).baselines
    assert table.left_out.keys() == left_out
    assert {row.name for row in table.rows} == {*rows} - left_out
    if config.env.kind.startswith("tests"):
        return
    problem = config.problems.load()["test"][0]
    price = JointReward(0.0, dict.fromkeys(config.reward.maxima, 0.0))
    own, other = (
        tuple(
            PastTurn(dict.fromkeys(config.env.acting(turn), f"def aux(x):\n    return {text}"), price, {})
            for turn in range(config.env.num_turns - 1)
        )
        for text in ("x", "-x")
    )
    node = Node(problem, (0,), own, SamplingParams(), 1, shown=other)
    quotes = any(
        config.env.observe(problem, role, own, role) != config.env.observe(problem, role, node.seen_by(role), role)
        for role in config.env.acting(len(own))
    )
    assert quotes == ("shuffled_message" not in left_out)
