"""``magrpo bench loss``: the benchmark of the kernels, as a command with the same options."""

from __future__ import annotations

import inspect
from argparse import Namespace
from pathlib import Path

import pytest

from magrpo_kernels.bench import make_parser
from pipelines.benchmarks.loss import bench_loss
from pipelines.cli import main

SMALL = ["--device", "cpu", "--dtype", "float32", "--hidden", "8", "--vocabulary", "40", "--no-compile"]


def test_the_command_measures_with_the_options_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*SMALL, "--tokens", "16", "--sequences", "8", "--rounds", "1", "--json", str(tmp_path / "report.json")]
    measured = list[Namespace]()
    monkeypatch.setattr("pipelines.benchmarks.loss.measure_loss", measured.append)
    for given in (words, ["--device", "cpu"]):
        assert main(["bench", "loss", *given]) == 0
        assert measured.pop() == make_parser().parse_args(given)


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
