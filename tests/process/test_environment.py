"""What the project sets in the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from magrpo.errors import ConfigError
from magrpo.process.environment import prefect_target, prepare_environment
from pipelines.commands.doctor import check_servers


def test_a_user_without_a_home_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setenv("HOME", "/nonexistent")
    prepare_environment()
    assert os.environ["HOME"] == "/nonexistent", "it is left alone"
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(RuntimeError, match="home"):
        Path.home()
    prepare_environment()
    assert Path.home() == Path("/")
    assert prefect_target() is None


def test_pictures_are_drawn_without_a_word_about_the_home() -> None:
    code = "from magrpo.process.environment import prepare_environment as p; p(); import magrpo.reports.charts"
    environment = os.environ | {"HOME": "/proc/1/nothing"}
    environment.pop("MPLCONFIGDIR", None)
    drawn = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert drawn.stderr == ""


@pytest.mark.parametrize("profiles", [b"active = ", b"\xff"])
def test_profiles_of_prefect_that_cannot_be_read_are_named(
    profiles: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profiles.toml"
    path.write_bytes(profiles)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(path))
    with pytest.raises(ConfigError, match=rf"{path}, Prefect's profiles: .*; correct it, or use --local"):
        prefect_target()
    assert [check.verdict for check in check_servers(tmp_path) if check.name == "Prefect"] == ["missing"]
