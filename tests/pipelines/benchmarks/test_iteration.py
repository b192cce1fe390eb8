"""``magrpo bench iteration``: sampling and update beside the same computed plainly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelines.cli import main
from tests.pipelines.micro import write_config


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_ratios_and_the_shares_of_operations_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "iteration", str(write_config(tmp_path, iterations=1)), "--rounds", "2"]) == 0
    said = capsys.readouterr().out
    for name in ("sampling", "update"):
        assert re.search(
            rf"^{name}: median .* s, plain implementation .* s; [\d.]+ times as fast "
            r"\(95 %: .*, 2 pairs; the target is 1.6\)$",
            said,
            re.M,
        )
    for name, target in (("prefill", 75), ("decoding", 60), ("update", 75)):
        [shares] = re.findall(rf"^ {name}, -?[\d.]+ s +{target}% +(.*%) *$", said, re.M)
        assert sum(int(share) for share in re.findall(r"(-?\d+)%", shares)) == pytest.approx(100, abs=2)
    assert re.search(
        r"^truncated sampling: median of a step of \d+ rows and [\d,]+ tokens [\d.]+ s with top-p 0.95, "
        r"[\d.]+ s without; [\d.]+ times as long \(95 %: .*, 2 pairs; the target is 1.1\)$",
        said,
        re.M,
    )
    assert not list((tmp_path / "runs").glob("*/stages"))


def test_a_program_without_prompts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "iteration", "embedded_program"]) == 2
    assert "bench iteration needs prompts, which a program writes itself" in capsys.readouterr().err


@pytest.mark.usefixtures("threads")
def test_engines_are_compared_on_the_same_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.benchmarks.engines.find_vllm_obstacle", lambda *_: "it takes half a minute to start")
    config = str(write_config(tmp_path, iterations=1))
    assert main(["bench", "iteration", config, "--rounds", "2", "--engines"]) == 0
    said = capsys.readouterr().out
    assert "no row for vllm: it takes half a minute to start" in said
    assert re.search(r"^ transformers \(this project\) +[\d,]+ *$", said, re.M)
    assert re.search(r"^ generate of transformers +[\d,]+ +[\d.]+, [\d.-]+ to [\d.]+ *$", said, re.M)


def test_an_engine_elsewhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, iterations=1))
    assert main(["bench", "iteration", config, "engine.kind=vllm"]) == 2
    assert "set engine.kind = 'transformers'" in capsys.readouterr().err
