"""``magrpo doctor``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from magrpo.planning.card import GIB
from pipelines.commands import doctor
from tests.fakes import FakeGpu


def _verdicts(text: str) -> dict[str, str]:
    lines = [line.split() for line in text.splitlines() if line and not line.startswith(" ")]
    return {words[0]: words[1] for words in lines if len(words) > 1}


def test_a_machine_that_is_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.check_machine(root=tmp_path) == 0
    text = capsys.readouterr().out
    assert _verdicts(text).keys() >= {"Python", "PyTorch", "GPU", "vLLM", "sandbox", "Prefect", "MLflow", "disk"}
    assert "missing" not in text
    assert not (tmp_path / "mlflow.db").exists(), "looking leaves nothing behind"
    assert f"train embedded --root {tmp_path}\n" in text


@pytest.mark.usefixtures("cuda_build")
def test_a_build_of_vllm_for_gpus_is_told_on_a_cpu(gpu: FakeGpu) -> None:
    gpu.is_usable = False
    [result] = doctor.check_vllm()
    assert (result.verdict, result.text) == ("note", "this vLLM build needs a GPU")
    assert result.remedy.endswith("to use it: make setup GPU=0 in a clone")


def test_a_gpu_is_reported_with_its_faults(gpu: FakeGpu) -> None:
    [result, *_] = doctor.check_gpus()
    assert (result.verdict, result.text) == ("ok", "0: NVIDIA H100, sm_90, 79 of 80 GiB free")
    gpu.free = 40 * GIB
    [result, *_] = doctor.check_gpus()
    assert (result.verdict, result.remedy) == ("note", "other processes use its memory; nvidia-smi lists them")
    gpu.capability = (7, 5)
    [result, *_] = doctor.check_gpus()
    assert result.verdict == "note"
    assert "use an Ampere card" in result.remedy


@pytest.mark.usefixtures("gpu")
def test_triton_needs_a_compiler_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    *_, compiler = doctor.check_gpus()
    assert (compiler.name, compiler.verdict) == ("compiler", "missing")
    (tmp_path / "gcc").touch(mode=0o755)
    assert [result.name for result in doctor.check_gpus()] == ["GPU"]


def test_a_gpu_that_pytorch_cannot_use_is_not_a_missing_one(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.is_usable = False
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


def test_a_database_that_is_none_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow.db").write_text("no database " * 100)
    *_, mlflow = doctor.check_servers(tmp_path)
    assert (mlflow.verdict, "move it away" in mlflow.remedy) == ("note", True)
    assert "unset" not in mlflow.remedy


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (result,) = doctor.check_disk(tmp_path / "runs")
    assert (result.verdict, result.remedy) == ("missing", "choose another folder with --root")


@pytest.mark.parametrize("name", ["file", "file/runs"])
def test_a_file_in_place_of_the_folder_is_missing(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (result,) = doctor.check_disk(tmp_path / name)
    assert (result.verdict, result.text) == ("missing", f"{tmp_path / 'file'} is not a folder")
    assert result.remedy == "choose another folder with --root"
