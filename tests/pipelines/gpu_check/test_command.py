"""``magrpo doctor --gpu`` around its steps: what it prints and writes, when it stops, how a step may die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelines import cli
from pipelines.arguments import locate_config
from pipelines.gpu_check import command, steps
from pipelines.gpu_check.results import Result, StepReport

GOOD = Result("speed | of light", "3", "3 or more", value=3.0)
SLOW = Result("time", "9 ms", "at most 1 ms", "missed")
BAD = Result("memory", "none", "some", "failed", "buy some")


@pytest.fixture
def run_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Runs the command in an empty folder with scripted steps; returns its exit code and the steps that ran."""
    monkeypatch.chdir(tmp_path)

    def run(results: dict[str, Result], *words: str, gpu: bool = True) -> tuple[int, list[str]]:
        ran: list[str] = []

        def run_step(step: steps.CheckStep, folder: Path, config: Sequence[str], show: Any) -> StepReport:
            assert folder.is_dir()
            ran.append(step.name)
            result = results.get(step.name, GOOD)
            show(result)
            return StepReport(step.name, step.title, 1.0, (result,))

        monkeypatch.setattr(command, "run_step", run_step)
        monkeypatch.setattr(command, "has_gpu", lambda: gpu)
        monkeypatch.setattr(command.torch.cuda, "get_device_name", lambda: "NVIDIA H100")
        return cli.main(["doctor", "--gpu", *words]), ran

    return run


NAMES = [step.name for step in steps.STEPS]


def test_a_fit_gpu_leaves_a_report_and_nothing_else(
    run_doctor: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_doctor({"loss": SLOW}) == (0, NAMES)
    said = capsys.readouterr().out
    assert "the GPU is ready for training" in said
    assert "missed time: 9 ms (expected: at most 1 ms)" in said
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert [step["name"] for step in report["steps"]] == NAMES
    assert report["steps"][0]["results"][0]["value"] == 3.0
    assert (report["failure"], report["about"]["device"]) == (None, "NVIDIA H100")
    markdown = (tmp_path / "gpu-report.md").read_text()
    assert "## NVIDIA H100" in markdown
    assert "| speed \\| of light | 3 | 3 or more | ok |" in markdown
    assert [path.name for path in (tmp_path / "runs").iterdir()] == []


def test_the_first_failure_and_its_remedy_are_the_last_words(
    run_doctor: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_doctor({"engine": BAD, "memory": BAD}) == (1, NAMES)
    assert "failed: memory: none\n-> buy some\nfiles of the steps: runs/gpu-check-" in capsys.readouterr().out
    assert json.loads((tmp_path / "gpu-report.json").read_text())["failure"]["remedy"] == "buy some"


def test_a_machine_that_is_not_fit_is_told_early(run_doctor: Any) -> None:
    assert run_doctor({"machine": BAD}) == (1, ["machine"])
    assert run_doctor({"machine": BAD}, gpu=False) == (1, NAMES), "the steps run small"


def test_steps_can_be_chosen(run_doctor: Any) -> None:
    assert run_doctor({}, "--only", "loss", "--only", "kernels") == (0, ["kernels", "loss"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "--only", "kernel"], "--only kernel: no such step; did you mean 'kernels'?"),
        (["--gpu", "embedded", "optim.lrr=1"], "optim.lrr: unknown key; did you mean 'lr'?"),
        (["--gpu", "embeded"], "embeded: no such file; did you mean 'embedded'?"),
        (
            ["--gpu", "humaneval"],
            "needs a GPU, but PyTorch sees none; magrpo doctor --gpu without CONFIG reports the reason",
        ),
        (["embedded"], "CONFIG, overrides and --only need --gpu"),
        (["--only", "loss"], "CONFIG, overrides and --only need --gpu"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    assert cli.main(["doctor", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.out, list(tmp_path.iterdir())) == ("", [])


def test_a_step_that_crashes_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    shown: list[Result] = []
    step = steps.CheckStep("nonsense", "Nonsense", "nowhere:nothing")
    report = steps.run_step(step, tmp_path, [str(locate_config("embedded"))], shown.append)
    assert report.failure == shown[-1]
    assert "ended with status 1 (RuntimeError: generator raised StopIteration)" in shown[-1].found
    assert shown[-1].remedy == f"read {tmp_path / 'nonsense.log'}"


def test_the_steps_are_measured_for_the_configuration(tmp_path: Path) -> None:
    results = list(steps.list_results("machine", tmp_path, [str(locate_config("embedded")), "lora.rank=2"]))
    assert any(result.name == "memory of the host" for result in results)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_command(tmp_path: Path) -> None:
    """As a user starts it; without a GPU every step runs small, and the lack of one is all that fails."""
    program = "import sys; from pipelines.cli import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(cli.__file__).parents[1]), *sys.path])}
    words = [sys.executable, "-c", program, "doctor", "--gpu"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    failed = [result["name"] for step in report["steps"] for result in step["results"] if result["verdict"] == "failed"]
    assert (done.returncode, failed) in ((1, ["GPU"]), (0, [])), done.stdout + done.stderr
    assert [step["name"] for step in report["steps"]] == NAMES
