"""A run whose reward judges texts: nothing in it speaks of programs or tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from magrpo.experiments.derive import Source, create_baselines
from magrpo.reports.baselines import BaselineTable, read_baselines
from magrpo.rewards.writing import WritingReward
from magrpo.run.store import RunStore
from pipelines.cli import main
from tests.asking.runs import make_run

CONFIG = str(Path(__file__).parents[2] / "pipelines" / "configs" / "writing_embedded.toml")
EVALUATION = ("eval.max_problems=2", "eval.num_samples=1", "penalty.copied=0.5")
NOTES = ("problems.num_train=12", "problems.num_test=4")
TRAINING = (
    *NOTES,
    *EVALUATION,
    "train.num_iterations=1",
    "rollout.problems_per_iteration=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=48",
)
CODE = re.compile(r"pass@|isolation|tests|syntax|cooperation")


def test_authors_train_and_are_set_beside_baselines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(tmp_path), "--local"]
    assert main(["train", CONFIG, *TRAINING, "--name", "mine", *root]) == 0
    said = capsys.readouterr().out
    assert "length ratio" in said
    assert re.search(r"^ +penalty +-\d", said, re.MULTILINE)
    assert "programs run" not in said
    assert not CODE.search(said)

    everything = create_baselines(Source("mine", None, tmp_path), "all", "everything").config().baselines
    assert [row.name for row in everything.rows] == [
        *("single", "naive", "sequential", "discussion", "magrpo", "two_turns", "best_of", "swap"),
        *("solo_summary", "solo_elaboration", "untrained_partner_summary", "untrained_partner_elaboration"),
    ]

    names = "single,discussion,magrpo,voting,best_of"
    assert main(["evaluate", "mine", "--baselines", names, *root]) == 0
    said = capsys.readouterr().out
    for number, row in enumerate(("single", "naive", "discussion", "magrpo", "best_of"), start=1):
        assert f"\nrow {number} of 5, {row}: return " in said
    assert "skipped: voting: a majority is a set of programs that behave alike, and texts are not run\n" in said
    [columns] = [line.split() for line in said.splitlines() if "consistency" in line and "structure" in line]
    assert columns == ["tok/s", "s", "structure", "consistency", "coherence", "return"]
    assert not CODE.search(said)
    for store in (RunStore.open(tmp_path, name) for name in ("mine", "mine-baselines")):
        pages = list(store.path.glob("stages/*/report/*.html"))
        assert pages
        for page in pages:
            assert "pass@" not in page.read_text()
            assert "penalty" in page.read_text()


def test_the_rows_of_the_paper_for_introductions(tmp_path: Path) -> None:
    """Of a configuration: who writes in which order, and what the last texts are worth in the paper's columns."""
    source = tmp_path / "abstracts.jsonl"
    abstracts = (
        {"abstract": f"We grow {number} beans on a balcony. Pigeons eat half of them."} for number in range(20)
    )
    source.write_text("\n".join(map(json.dumps, abstracts)))
    problems = f"problems={{kind='arxiv', source='{source}'}}"
    task = ["env.task=arxiv", "reward.task=arxiv", "rollout.max_new_tokens=24", problems]
    roles = [f"agents.{i}.{key}={role}" for i, role in enumerate(("background", "methods")) for key in ("name", "role")]
    names = "single,naive,sequential,discussion"
    arguments = ["--baselines", names, "--root", str(tmp_path), "--local", "--name", "table"]
    assert main(["evaluate", CONFIG, *task, *roles, *EVALUATION, *arguments]) == 0
    store = RunStore.open(tmp_path, "table")
    rows = {result.row.name: result for result in read_baselines(store, store.config())}
    assert [(name, one.row.env.kind, one.row.env.num_turns, one.row.reward.kind) for name, one in rows.items()] == [
        ("single", "writing_solo", 1, "writing_solo"),
        ("naive", "writing", 1, "writing"),
        ("sequential", "writing_sequential", 2, "writing"),
        ("discussion", "writing", 2, "writing"),
    ]
    assert [agent.name for agent in rows["single"].row.agents] == ["methods"]
    assert rows["single"].row.max_new_tokens == 2 * rows["naive"].row.max_new_tokens
    for result in rows.values():
        sampled = [row for row in result.report.rows if (row.split, row.mode) == ("test", "sampled")]
        roles_by_name = {agent.name: agent.role for agent in result.row.agents}
        reward = result.row.reward
        assert isinstance(reward, WritingReward)
        measured = [
            reward.measure_texts({roles_by_name[name]: text for name, text in row.texts.items()}) for row in sampled
        ]
        for name in ("structure", "consistency", "coherence"):
            mean = fmean(result.means["test/sampled"][f"paper/{name}"].values())
            assert mean == pytest.approx(fmean(one[name] for one in measured))
    table = BaselineTable(store.config(), list(rows.values())).paper_table()
    assert table.columns[3:] == ("structure", "consistency", "coherence", "return")
    assert all("-" not in cells[1:] for cells in table.rows)


def test_a_trained_single_author_has_a_row(tmp_path: Path) -> None:
    alone = [
        "agents=[{name='author', role='solo', model='writing-base'}]",
        "env.kind=writing_solo",
        "reward.kind=writing_solo",
    ]
    make_run(Path(CONFIG), tmp_path, [*NOTES, *alone], "alone")
    table = create_baselines(Source(CONFIG, None, tmp_path, NOTES), "single_grpo", "table", single_run="alone")
    rows = {row.name: row for row in table.config().baselines.rows}
    assert list(rows) == ["single_grpo", "naive"]
    (agent,) = rows["single_grpo"].agents
    assert (agent.role, agent.start_from) == ("solo", tmp_path / "alone/stages/00001/update/weights/author")


def test_a_plan_needs_no_sandbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", CONFIG, f"root={tmp_path}", "--dry-run"]) == 0
    assert "sandbox  not needed: 96 joint actions per iteration are scored as texts\n" in capsys.readouterr().out
