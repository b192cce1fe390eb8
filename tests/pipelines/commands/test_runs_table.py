"""The table of ``magrpo runs``, also on narrow terminals."""

from __future__ import annotations

import io
import json
import re
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from magrpo.config.run import load_config
from magrpo.run.store import RunStore
from pipelines.cli import main
from pipelines.commands.runs import Summary, format_runs
from tests.pipelines.micro import write_config


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_gets_fewer_columns_instead_of_broken_words(width: int) -> None:
    config = {"train.num_iterations": "160"}
    runs = [Summary(name, "finished", 160, (0.5, 0.9), 0.0, 399.0, config) for name in ("small-steps", "as-it-ships")]
    out = io.StringIO()
    Console(file=out, width=width).print(format_runs(runs, width))
    [first, second] = [line.split() for line in out.getvalue().splitlines()[3:5]]
    day = f"{datetime.fromtimestamp(0.0):%Y-%m-%d}"
    whole = ["finished", "160/160", "50.0%", "\u2192", "90.0%", "6", "min", "39", "s", day]
    assert first[1:11] == whole[: {60: 5, 80: 9, 100: 10}[width]]
    assert (first[0], second[0]) == ("small-steps", "as-it-ships")


def test_runs_that_cannot_be_read_are_named_and_the_others_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "m[/old]k"
    config = load_config(write_config(tmp_path), [f"root={root}"])
    for name in ("whole", "records", "manifest", "foreign", "config", "swapped"):
        store = RunStore.create(config, name)
        store.commit("00001/update", "k", lambda _: {"update/lr": 1.0})
    (root / "records" / "tracking.jsonl").write_text("garbage\n{}\n")
    (root / "records" / "tracking.sent").write_text("abc")
    (root / "manifest" / "stages" / "00001" / "update" / "_SUCCESS").write_text("{}")
    (root / "foreign" / "stages" / "backup" / "update").mkdir(parents=True)
    (root / "foreign" / "stages" / "backup" / "update" / "_SUCCESS").write_text("{}")
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    (root / "config" / "config.json").write_text("{")
    (root / "swapped" / "config.json").write_text("[]")
    assert main(["runs", "--root", str(root), "--json"]) == 0
    out, told = capsys.readouterr()
    iterations = {run["run"]: run["iterations"] for run in json.loads(out)}
    assert iterations == {"whole": 1, "records": 1, "foreign": 1}
    values = json.loads(out)[0]["config"]
    assert values["train.num_iterations"] == config.train.num_iterations
    assert values["rollout.keep_support"] is False
    assert values["train.max_tokens"] is None
    assert values["lora.target_modules"] == list(config.lora.target_modules)
    lines = sorted(line for line in told.splitlines() if "skipped" in line)
    assert [line.partition(" skipped: ")[2].removeprefix(str(root)).split()[0] for line in lines] == [
        "/config/config.json",
        "/manifest/stages/00001/update:",
        "/model/config.json",
        "/swapped/config.json",
    ]
    assert main(["runs", "--root", str(root)]) == 0


def shown_configs(*configs: dict[str, str]) -> str:
    runs = [Summary(f"run-{n}", "finished", 1, (), 0.0, None, config) for n, config in enumerate(configs)]
    out = io.StringIO()
    Console(file=out, width=200).print(format_runs(runs, 200))
    return out.getvalue()


def test_a_folder_without_runs_is_told_from_a_missing_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for root, said in ((tmp_path, "no runs in {}\n"), (tmp_path / "nowhere", "no runs in {}: no such folder\n")):
        assert main(["runs", "--root", str(root)]) == 0
        assert capsys.readouterr().out == said.format(root)


def test_runs_are_told_apart_by_their_task_and_what_differs_within_it() -> None:
    coop = {"problems.kind": "coopcode", "agents.0.model": "coopcode-base", "agents.1.model": "coopcode-base"}
    texts = {"problems.kind": "tldr", "agents.0.model": "/models/Smol/", "agents.1.model": "Qwen/Qwen3-1.7B"}
    many = {f"optim.{key}": "1" for key in "abcde"}
    alone = shown_configs(coop)
    assert "task" in alone
    assert "coopcode, coopcode-base" in alone
    few = shown_configs(coop | {"train.seed": "0"}, coop | {"train.seed": "1"})
    assert re.search(r"run-1 .* coopcode, coopcode-base *\n *train.seed=1", few)
    mixed = shown_configs(coop | {"train.seed": "0"}, coop | {"train.seed": "1"}, texts | many)
    assert mixed.count("coopcode, coopcode-base") == 2
    assert re.search(r"run-1 .* coopcode, coopcode-base *\n *train.seed=1", mixed)
    assert "tldr, Smol, Qwen3-1.7B" in mixed


def test_names_and_values_of_runs_are_no_markup() -> None:
    runs = [Summary("a[/x]", "[/y]", 1, (), 0.0, None, {"key": f"[/{n}]"}) for n in range(2)]
    out = io.StringIO()
    Console(file=out, width=160).print(format_runs(runs, 160))
    assert "a[/x]" in out.getvalue()
    assert "[/y]" in out.getvalue()
    assert "key=[/1]" in out.getvalue()


@pytest.mark.parametrize("command", ["sync", "show", "export", "compare", "resume"])
def test_an_argument_that_is_no_name_of_a_run_is_refused(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which names these are is tested with the store."""
    root = tmp_path / "runs"
    for run, told in (("[x]", "run name '[x]' "), (f"{tmp_path}/other/x", f"{tmp_path}/other/x is not in {root}: ")):
        arguments = [run, "b"] if command == "compare" else [run]
        assert main([command, *arguments, "--root", str(root)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"magrpo: {told}")
    assert line.endswith(f"--root {tmp_path}/other")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "name"),
    [(["train", "embedded"], "[/x]"), (["study", "tiny"], "../x"), (["evaluate", "embedded"], "../x")],
)
def test_a_name_that_no_run_can_have_is_refused(
    tmp_path: Path, command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which names these are is tested with the store."""
    assert main([*command, "--name", name, "--root", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err.startswith(f"magrpo: run name '{name}' ")
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_mlflow_cannot_use_is_refused_before_a_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("train", "evaluate"):
        assert main([command, "embedded", "tracking.uri=file:///x", "--root", str(tmp_path / "runs")]) == 2
        assert capsys.readouterr().err.startswith("magrpo: tracking.uri 'file:///x' has a scheme")
    assert list(tmp_path.iterdir()) == []
