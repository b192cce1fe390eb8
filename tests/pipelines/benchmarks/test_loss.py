"""``magrpo bench loss``: the benchmark of the kernels, as a command with the same options."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from magrpo_kernels.bench import TITLES, make_parser
from pipelines.benchmarks.loss import bench_loss
from pipelines.cli import main

SMALL = ["--device", "cpu", "--dtype", "float32", "--hidden", "8", "--vocabulary", "40", "--no-compile"]


def test_the_loss_is_timed_and_compared_with_its_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    sizes = ["--tokens", "16", "--sequences", "8", "--rounds", "1"]
    assert main(["bench", "loss", *SMALL, *sizes, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{title} takes" in printed for title in TITLES)
    arguments = json.loads(file.read_text())["arguments"]
    assert (arguments["tokens"], arguments["sequences"], arguments["no_compile"]) == (16, 8, True)


def test_the_options_are_those_of_the_module() -> None:
    assert inspect.signature(bench_loss).parameters.keys() == vars(make_parser().parse_args([])).keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "10", "--sequences", "4"], "--tokens 10 must be a multiple of --sequences 4"),
        (["--json", "no/such/folder.json"], "--json no/such/folder.json: no such folder"),
        (["--tokens", "0"], "Must be >= 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "loss", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err
