"""``magrpo bench iteration``: sampling and update beside the same computed plainly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelines.cli import main
from tests.pipelines.micro import write_config


@pytest.mark.usefixtures("threads")
def test_ratios_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "iteration", str(write_config(tmp_path, iterations=1)), "--rounds", "2"]) == 0
    said = capsys.readouterr().out
    for name in ("sampling", "update"):
        assert re.search(
            rf"^{name}: median .* s, plain implementation .* s; [\d.]+ times as fast "
            r"\(95 %: .*, 2 pairs; the target is 1.6\)$",
            said,
            re.M,
        )
    assert not list((tmp_path / "runs").glob("*/stages"))


def test_an_engine_elsewhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, iterations=1))
    assert main(["bench", "iteration", config, "engine.kind=vllm"]) == 2
    assert "set engine.kind = 'transformers'" in capsys.readouterr().err
