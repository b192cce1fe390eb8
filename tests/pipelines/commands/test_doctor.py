"""``magrpo doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from magrpo.planning.card import GIB
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
    [finding] = doctor.check_vllm()
    assert (finding.verdict, finding.text) == ("note", "this vLLM build needs a GPU")
    assert finding.remedy.endswith("to use it: make setup GPU=0 in a clone")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A card as PyTorch describes it."""
    described: dict[str, Any] = {"capability": (9, 0), "memory": (79 * GIB, 80 * GIB)}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: described["capability"])
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: described["memory"])
    return described


def test_a_card_is_reported_with_what_is_wrong_with_it(card: dict[str, Any]) -> None:
    [gpu, *_] = doctor.check_gpus()
    assert (gpu.verdict, gpu.text) == ("ok", "0: NVIDIA H100, sm_90, 79 of 80 GiB free")
    card["memory"] = (40 * GIB, 80 * GIB)
    [gpu, *_] = doctor.check_gpus()
    assert (gpu.verdict, gpu.remedy) == ("note", "other processes use its memory; nvidia-smi lists them")
    card["capability"] = (7, 5)
    [gpu, *_] = doctor.check_gpus()
    assert gpu.verdict == "note"
    assert "use an Ampere card" in gpu.remedy


def test_triton_needs_a_compiler_beside_a_card(
    card: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    *_, compiler = doctor.check_gpus()
    assert (compiler.name, compiler.verdict) == ("compiler", "missing")
    (tmp_path / "gcc").touch(mode=0o755)
    assert [finding.name for finding in doctor.check_gpus()] == ["GPU"]


def test_a_card_that_pytorch_cannot_use_is_not_a_missing_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "NVIDIA_DEVICE", tmp_path / "nvidiactl")
    [missing] = doctor.check_gpus()
    assert missing.text.startswith("none that PyTorch can use")
    (tmp_path / "nvidiactl").touch()
    [unusable] = doctor.check_gpus()
    assert "install driver 580 or newer" in unusable.remedy


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
