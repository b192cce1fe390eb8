"""``magrpo place`` and the forecast of ``magrpo train --dry-run --place``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines import cli

BOX = "[engine]\nservers = 2\ngpus = 0\n[update]\nranks = 2\n"


@pytest.fixture
def box(tmp_path: Path) -> str:
    path = tmp_path / "box.toml"
    path.write_text(BOX)
    return str(path)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_a_place_is_shown_within_the_terminal(
    box: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["place", box, "embedded"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > columns and "/" not in line] == []
    assert [line.split()[0] for line in lines if line[0] != " "][:6] == [
        "place",
        "driver",
        "servers",
        "ranks",
        "sandbox",
        "GPUs",
    ]
    assert lines[-1] == "nothing was started"


def test_a_place_as_json(box: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["place", box, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {start["what"]: start["count"] for start in shown["starts"]} == {
        "driver": 1,
        "server": 2,
        "rank": 2,
        "sandbox": 1,
    }
    assert shown["gpus"] == 0


def test_ranks_take_gpus_if_the_configuration_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ranks.toml"
    path.write_text("[update]\nranks = 2\n")
    needed = {}
    for config in ([], ["embedded"]):
        assert cli.main(["place", str(path), *config, "--json"]) == 0
        needed[len(config)] = json.loads(capsys.readouterr().out)["gpus"]
    assert needed == {0: 2, 1: 0}, "embedded trains on processors"


def test_keys_of_a_place_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["place"]) == 0
    shown = capsys.readouterr().out
    assert [title for title in ("[fleet]", "[engine]", "[update]", "[sandbox]") if title not in shown] == []


def test_a_place_that_does_not_fit_is_refused(box: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "embedded", "engine.kind=transformers", "--place", box]) == 2
    assert "engine.servers are vLLM servers" in capsys.readouterr().err
    assert cli.main(["train", "embedded", "--place", "nowhere.toml"]) == 2
    assert "nowhere.toml: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "evaluate", "sweep"])
def test_a_place_that_does_not_fit_leaves_no_folder(
    command: str, box: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [command, "embedded", "engine.kind=transformers", "--place", box, "--root", str(tmp_path / "runs")]
    assert cli.main([*given, "--local"]) == 2
    assert "engine.servers are vLLM servers" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_forecasts_a_place(
    box: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gpus = tmp_path / "gpus.toml"
    gpus.write_text(BOX.replace("gpus = 0", "gpus = 1"))
    assert cli.main(["train", "embedded", "model.device=cuda", "--dry-run", "--place", str(gpus)]) == 0
    shown = capsys.readouterr().out
    wanted = (
        "a model, not a measurement",
        "tokens/s",
        "bottleneck: ",
        "memory per GPU",
        "per million tokens",
        "ESTIMATE",
    )
    assert [words for words in wanted if words not in shown] == []
    assert not (tmp_path / "runs").exists()
    assert cli.main(["train", "embedded", "--dry-run", "--place", box]) == 0
    assert 'no forecast for model.device = "cpu"' in capsys.readouterr().out
    assert cli.main(["train", "embedded", "--dry-run"]) == 0
    assert "not a measurement" not in capsys.readouterr().out
