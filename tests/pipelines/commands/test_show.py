"""``magrpo show``: a run on one screen, and its report."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import webbrowser
from pathlib import Path

import pytest
from rich.console import Console

from magrpo.config.place import Place
from magrpo.reports.evaluations import EvaluatedRun
from magrpo.reports.origin import describe_origin
from magrpo.reports.verdict import judge_run
from magrpo.run.files import keep_place
from magrpo.run.store import RunStore
from magrpo.training.closing import print_entry
from magrpo.training.recorder import NOTE, describe_run
from magrpo.types import EvalReport, Interval
from pipelines.cli import main
from pipelines.commands.show import tabulate_evaluations
from tests.pipelines.micro import write_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """A run of two iterations, of which the second has no name yet."""
    folder = tmp_path_factory.mktemp("shown")
    assert main(["train", str(write_config(folder, iterations=2)), "--local", "--name", "done"]) == 0
    return RunStore.open(folder / "runs", "done")


@pytest.fixture
def unfinished(finished: RunStore, tmp_path: Path) -> RunStore:
    """The same run, stopped before its last evaluation."""
    copy = RunStore(tmp_path / "runs", "stopped")
    shutil.copytree(finished.path, copy.path)
    shutil.rmtree(copy.path / "stages/00002/report")
    shutil.rmtree(copy.path / "stages/00002/evaluate")
    (copy.path / "report.html").unlink()
    records = copy.path / "tracking.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(line for line in lines if '"FINISHED"' not in line))
    return copy


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_a_split_that_an_evaluation_lacks_has_a_dash_in_its_own_column() -> None:
    def measure(*keys: str) -> dict[str, dict[str, Interval]]:
        return {key: {"return": Interval(0.5, 0.4, 0.6), "pass_at_1": Interval(0.25, 0.2, 0.3)} for key in keys}

    incomplete = EvalReport(0, (), measure("test/sampled"))
    del incomplete.summary["test/sampled"]["pass_at_1"]
    complete = EvalReport(1, (), measure("test/sampled", "ood/sampled"))
    table = tabulate_evaluations([incomplete, complete], narrow=True)
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["0", "1"], ["50.0", "50.0"], ["-", "50.0"], ["-", "25.0%"]]


def test_a_run_ends_with_its_files_and_the_next_commands(
    finished: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    root = finished.path.parent
    lines = run(["resume", "done", "--local", "--root", str(root)], capsys).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("next: "))
    commands = [re.split(r"\s{2,}", line.removeprefix("next:").strip())[0] for line in lines[start:]]
    flags = f"--root {root}"
    assert [command.partition("magrpo ")[2] for command in commands] == [
        f"show done {flags} --open",
        f"evaluate done {flags} --baselines all",
        f"ask done {flags}",
    ]
    [report] = [line.split()[1] for line in lines if line.startswith("report: ")]
    assert Path(report) == finished.path / "report.html"
    [time] = [line for line in lines if line.startswith("time: ")]
    assert re.search(r"in 2 attempts.*; this attempt \d+ s; ", time)


def test_the_place_of_a_run_is_told(unfinished: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(unfinished.path.parent)]
    assert json.loads(run(["show", "stopped", "--json", *root], capsys))["place"] == "one process"
    assert "place:" not in run(["show", "stopped", *root], capsys)
    keep_place(unfinished, Place.model_validate({"ranks": {"count": 2}}))
    assert "\nplace:   2 ranks, on this machine\n" in run(["show", "stopped", *root], capsys)
    assert json.loads(run(["show", "stopped", "--json", *root], capsys))["place"] == "2 ranks, on this machine"
    assert ", place: 2 ranks, on this machine\n" in describe_run(unfinished, "RUNNING")[NOTE]
    assert ("place", "one process") in describe_origin(unfinished, unfinished.config()), "of the last attempt"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_terminal_breaks_no_word(width: int, finished: RunStore) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, no_color=True, width=width, highlight=False)
    verdict = judge_run(EvaluatedRun.read(finished))
    print_entry(console, "result:", verdict.sentence)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    assert all(len(line) <= width for line in lines)
    assert " ".join(lines).split() == ["result:", *verdict.sentence.split()]


def test_show_tells_a_finished_run(finished: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = judge_run(EvaluatedRun.read(finished))
    shown = run(["show", "done", "--root", str(finished.path.parent)], capsys)
    assert shown.startswith("run:     done, finished, 2 of 2 iterations, seed 0\n")
    assert f"result:  {verdict.sentence}\n" in shown
    assert f"report:  {finished.path}/report.html" in shown
    assert f"agents:  {finished.path}/" in shown
    assert [line.split()[0] for line in shown.splitlines() if re.match(r" +\d+ +\d+\.\d", line)] == ["0", "2"]


def test_show_as_json_has_every_figure(finished: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    tree = json.loads(run(["show", str(finished.path), "--json"], capsys))
    verdict = judge_run(EvaluatedRun.read(finished))
    assert (tree["run"], tree["state"], tree["iterations"]) == ("done", "finished", 2)
    assert tree["verdict"]["word"] == verdict.word
    assert verdict.gain is not None
    assert tree["verdict"]["gain"]["mean"] == verdict.gain.mean
    assert [one["iteration"] for one in tree["evaluations"]] == [0, 2]
    assert tree["wall_time"]["seconds"] > 0
    assert Path(tree["report"]).is_file()


def test_an_unfinished_run_is_shown_with_the_command_that_goes_on(
    unfinished: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    root = unfinished.path.parent
    shown = run(["show", "stopped", "--root", str(root)], capsys)
    assert shown.startswith("run:     stopped, killed, 2 of 2 iterations")
    assert "result:  measured once: " in shown
    assert f"resume stopped --root {root}" in shown.splitlines()[-1]
    assert "report:" not in shown

    shown = run(["show", "stopped", "--open", "--root", str(root)], capsys)
    assert f"report:  {unfinished.path}/report.html" in shown
    assert "Run stopped" in (unfinished.path / "report.html").read_text()


def test_report_is_rebuilt_when_asked_to_and_opened_where_there_is_a_display(
    finished: RunStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    page = finished.path / "report.html"
    before = page.read_text()
    old = before.replace("<h1>", "<h1>Old: ")  # the link to MLflow's page is taken over
    assert old != before
    page.write_text(old)
    run(["show", str(finished.path), "--open"], capsys)
    assert page.read_text() == old
    assert opened == [page.as_uri()]
    run(["show", str(finished.path), "--rebuild"], capsys)
    assert page.read_text() == before
    assert len(opened) == 1
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    run(["show", str(finished.path), "--open"], capsys)
    assert len(opened) == 1, "there is no display"

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["show", str(finished.path)]) == 0
    assert f";{page.as_uri()}\x1b\\" in terminal.getvalue(), "a link of the terminal"


def test_a_run_without_an_evaluation_has_no_report(finished: RunStore, tmp_path: Path) -> None:
    RunStore.create(finished.config().model_copy(update={"root": tmp_path}), "empty")
    assert main(["show", "empty", "--open", "--root", str(tmp_path)]) == 2
    assert main(["show", "empty", "--root", str(tmp_path)]) == 0
    assert main(["show", "nothing", "--root", str(tmp_path)]) == 2
