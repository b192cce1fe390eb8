"""``magrpo doctor``."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.commands import doctor


def _verdicts(text: str) -> dict[str, str]:
    lines = [line.split() for line in text.splitlines() if line and not line.startswith(" ")]
    return {words[0]: words[1] for words in lines if len(words) > 1}


def test_a_machine_that_is_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.check_machine(root=tmp_path) == 0
    text = capsys.readouterr().out
    assert _verdicts(text).keys() >= {"Python", "PyTorch", "GPU", "vLLM", "sandbox", "Prefect", "MLflow", "disk"}
    assert "missing" not in text
    assert not (tmp_path / "mlflow.db").exists(), "looking leaves nothing behind"


def test_a_build_of_vllm_for_gpus_is_told_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    [finding] = [finding for finding in doctor.check_libraries() if finding.name == "vLLM"]
    assert (finding.verdict, finding.text) == ("note", "this vLLM build needs a GPU")
    assert finding.remedy.endswith("to use it: make setup GPU=0 in a clone")


def test_servers_that_do_not_answer_are_named_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    assert doctor.check_machine(root=tmp_path) == 1
    text = capsys.readouterr().out
    verdicts = _verdicts(text)
    assert (verdicts["Prefect"], verdicts["MLflow"]) == ("missing", "note")
    assert "unset PREFECT_API_URL" in " ".join(text.split())
    assert "magrpo sync RUN" in " ".join(text.split())
    assert "secret" not in text


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    (finding,) = doctor.check_disk(tmp_path / "runs")
    assert (finding.verdict, finding.remedy) == ("missing", "choose another folder with --root")
