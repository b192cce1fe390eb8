"""What cannot run here is held against the schemas of its own makers: Compose, systemd, shell.

And a few rules of this project: versions are those of requirements/, nothing listens beyond the loopback interface, no
secret is in the repository.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE))


def _env_names() -> set[str]:
    return set(re.findall(r"^(\w+)=", (INFRA / "env.example").read_text(), re.MULTILINE))


def test_compose_file_meets_the_compose_specification() -> None:
    schema = json.loads(
        resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    )
    jsonschema.validate(COMPOSE, schema)
    with pytest.raises(jsonschema.ValidationError):  # the schema does refuse things
        jsonschema.validate({"services": {"worker": {"imagee": "x"}}}, schema)


def test_compose_publishes_on_the_loopback_interface_only() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:4200:4200", "127.0.0.1:5000:5000"]
    assert COMPOSE["networks"]["databases"] == {"internal": True}
    assert COMPOSE["services"]["postgres"]["networks"] == ["databases"]


def test_compose_names_things_that_exist() -> None:
    text = (INFRA / "compose.yaml").read_text()
    chosen = {"MAGRPO_MEMORY", "MAGRPO_POOL", "TORCH_INDEX"}
    assert set(re.findall(r"\$\{(\w+)", text)) - chosen <= _env_names()
    for service in COMPOSE["services"].values():
        assert set(service.get("depends_on", {})) <= set(COMPOSE["services"])
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (INFRA / source).exists()
        if "build" in service:
            assert (INFRA / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_deployments_keep_runs_on_the_volume_of_runs() -> None:
    deployments = yaml.safe_load((INFRA / "prefect.yaml").read_text())["deployments"]
    [root] = {deployment["parameters"]["root"] for deployment in deployments}
    mounts = {volume for name in ("worker", "worker-gpu") for volume in COMPOSE["services"][name]["volumes"]}
    assert mounts == {f"runs:{root}"}
    for path in (INFRA / "images").glob("worker*.Dockerfile"):
        assert f"install -d -o magrpo -g magrpo {root}" in path.read_text()


def _images() -> Iterator[str]:
    yield from (service["image"] for service in COMPOSE["services"].values())
    for dockerfile in (INFRA / "images").glob("*.Dockerfile"):
        yield from re.findall(r"^FROM (\S+)", dockerfile.read_text(), re.MULTILINE)


def test_images_are_named_by_exact_version_those_of_the_pins() -> None:
    images = set(_images())
    assert [image for image in images if not re.fullmatch(r"[\w./-]+:\d+\.\d+(\.\d+)?(-[\w.-]+)?", image)] == []
    assert {image.split(":")[1].split("-")[0] for image in images if "prefecthq" in image} == {PINS["prefect"]}
    assert len({image for image in images if image.startswith("postgres:")}) == 1
    assert len({image for image in images if image.startswith("python:")}) == 1


@pytest.mark.parametrize("path", sorted((INFRA / "images").glob("*.Dockerfile")), ids=lambda path: path.stem)
def test_dockerfiles_copy_what_exists_and_end_as_an_ordinary_user(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    sources = [source for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for source in line.split()[:-1]]
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in ignore, f"{source} is not sent to the builder"
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1] == "1000"


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in (INFRA / "systemd").glob("magrpo-*"):
        name = unit.name.replace("@.", "@nightly.")
        (tmp_path / name).write_text(re.sub(r"/opt/magrpo/\S+", "/bin/true", unit.read_text()))
    result = subprocess.run(
        ["systemd-analyze", "verify", *sorted(path.name for path in tmp_path.iterdir())],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")


def test_units_bind_to_the_loopback_interface() -> None:
    for name in ("prefect", "mlflow"):
        assert " --host 127.0.0.1 " in (INFRA / "systemd" / f"magrpo-{name}.service").read_text()


@pytest.mark.parametrize(
    "path", sorted([*INFRA.glob("**/*.sh"), *INFRA.glob("**/*.sbatch")]), ids=lambda path: path.name
)
def test_shell_scripts_parse_and_shellcheck_has_no_warning(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert shellcheck is not None, "shellcheck is pinned in requirements/dev.txt: run make setup"
    if path.name != "stores.sh":  # followed from the scripts that source it
        subprocess.run([shellcheck, "-S", "warning", "-x", "-P", "SCRIPTDIR", path], check=True)


def test_make_env_writes_secrets_once_and_for_its_owner_only(tmp_path: Path) -> None:
    first, second = tmp_path / "first.env", tmp_path / "second.env"
    for file in (first, second):
        subprocess.run([INFRA / "make-env.sh", file], check=True)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    values = dict(line.split("=", 1) for line in first.read_text().splitlines() if line and not line.startswith("#"))
    assert set(values) == _env_names()
    assert values["PREFECT_API_AUTH_STRING"] == values["PREFECT_SERVER_API_AUTH_STRING"]
    assert values["MLFLOW_TRACKING_PASSWORD"] == values["MLFLOW_AUTH_ADMIN_PASSWORD"]
    secrets = set(re.findall(r"[0-9a-f]{32}", first.read_text()))
    assert len(secrets) == len(set(re.findall(r"=\S*(@[a-z-]+@)", (INFRA / "env.example").read_text())))
    assert secrets.isdisjoint(re.findall(r"[0-9a-f]{32}", second.read_text()))
    again = subprocess.run([INFRA / "make-env.sh", first], capture_output=True, text=True)
    assert again.returncode == 1
    assert "exists" in again.stderr


def test_env_files_are_ignored_by_git() -> None:
    names = ["infra/.env", "infra/magrpo.env"]
    listed = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True)
    assert listed.stdout.splitlines() == names
