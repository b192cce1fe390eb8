"""``magrpo config``: keys explained, values printed, a file of one's own, and the schema for editors."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from magrpo.config.run import RunConfig, load_config
from magrpo.plugins import TABLES, import_plugin
from pipelines import cli
from pipelines.arguments import CONFIGS, list_shipped
from pipelines.commands.config_help import format_value
from tests.schema import build_schema

SCHEMA = CONFIGS / "schema.json"
VALIDATOR = jsonschema.Draft7Validator(build_schema())


def test_no_section_has_the_name_of_a_shipped_configuration() -> None:
    assert set(list_shipped()).isdisjoint({"all", *RunConfig.model_fields})


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("topic", [[], ["all"]], ids=str)
def test_what_is_shown_fits_the_terminal(
    topic: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["config", "show", *topic]) == 0
    shown = capsys.readouterr().out
    assert "``" not in shown
    longest = max(shown.splitlines(), key=len)
    assert len(longest) <= width or " " not in longest.strip()


def test_a_key_is_shown_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", "train.seed"]) == 0
    assert capsys.readouterr().out == "[train]\n  seed: int = 0\n      Seed for everything random in the run.\n"
    assert cli.main(["config", "show", "root"]) == 0
    assert capsys.readouterr().out.startswith("(top level)\n  root: folder = runs\n      ")
    for topic in ("agents.model", "agents.0.model", "agents.helper.model"):
        assert cli.main(["config", "show", topic]) == 0
        assert capsys.readouterr().out.startswith("[[agents]]\n  model: str, required\n"), (
            "as errors name keys of agents"
        )
    for words, message in (
        ("train.sed", "did you mean 'seed'?"),
        ("rolout", "did you mean 'rollout'?"),
        ("agents.0.modle", "agents.0.modle: unknown key; did you mean 'model'?"),
        ("place.count", "place.count: unknown key; choices: address, colocate, jails, ranks, samplers\n"),
        ("place.3", "place.3: unknown key; choices: "),
        ("place.toml", "place.toml: no such file"),
        ("samplers.counts", "samplers.counts: unknown key; did you mean 'count'?"),
        ("root.foo", "root.foo: unknown key; root has no keys of its own\n"),
        (
            "train train.seed=1",
            "train.seed=1: only a configuration has values to change, as in magrpo config show embed",
        ),
        ("all a=1", "a=1: only a configuration has values to change"),
    ):
        assert cli.main(["config", "show", *words.split()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("section", TABLES)
def test_a_kind_is_shown_with_its_choices(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", f"{section}.kind"]) == 0
    title, *text = capsys.readouterr().out.splitlines()
    assert title == f"[{section}]"
    shown = " ".join(" ".join(text).split())
    assert shown.startswith(f"kind: {' | '.join(TABLES[section])} | package.module:Class, required")


def test_keys_of_a_place_are_shown_like_those_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    def show(topic: str) -> str:
        assert cli.main(["config", "show", topic]) == 0
        return capsys.readouterr().out

    assert show("samplers.count") == show("place.samplers.count")
    assert show("samplers.count").startswith("[samplers]\n  count: int = 0\n      Number of samplers.")
    assert show("place.samplers") == show("samplers")
    assert "  gpus: int | none\n" in show("samplers")
    assert show("place.address").startswith("(top level)\n  address: str =\n")


@pytest.mark.parametrize("name", list_shipped())
def test_shown_values_are_the_configuration(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", name, "train.seed=7", "notify.urls=['json://secret.example']"]) == 0
    shown = capsys.readouterr().out
    assert "secret" not in shown
    assert "seed = 7  # default: 0" in shown
    file = tmp_path / "shown.toml"
    file.write_text(shown)
    assert load_config(file) == load_config(CONFIGS / f"{name}.toml", ["train.seed=7"])


def test_a_secret_is_shown_as_no_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that begins with what is shown would otherwise send its notices nowhere."""
    secrets = ['notify.urls=["mailto://me:secret@example.org"]', "tracking.uri=postgresql://me:secret@host/db"]
    assert cli.main(["config", "show", "embedded", *secrets]) == 0
    shown = capsys.readouterr().out
    assert "\n# urls: set, but not shown  #" in shown
    assert "\n# uri: set, but not shown  #" in shown
    assert "secret@" not in shown


def test_keys_that_are_no_bare_keys_are_shown_quoted() -> None:
    models = {"gpt-4.1": "helper", "openai/gpt-4o": "main", "plain": "main"}
    assert tomllib.loads(f"models = {format_value(models)}")["models"] == models


@pytest.mark.parametrize("columns", ["80", "100"])
def test_help_of_train_fits_a_screen(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["train", "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 24


# --------------------------------------------------------------------------------------------------------------- schema
def list_models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A section and those inside it; plug-ins are those of every kind."""
    yield model
    for name, field in model.model_fields.items():
        if name in TABLES:
            for kind in TABLES[name]:
                yield from list_models(import_plugin(TABLES[name], kind))
            continue
        for annotation in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from list_models(annotation)


def test_the_schema_is_printed_as_it_ships(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "schema"]) == 0
    assert capsys.readouterr().out == SCHEMA.read_text()


def test_the_schema_has_every_docstring() -> None:
    text = SCHEMA.read_text()
    for model in set(list_models(RunConfig)):
        for name, field in model.model_fields.items():
            if name != "kind" and field.description:
                assert " ".join(field.description.replace("``", "`").split()).replace('"', '\\"') in text, name


@pytest.mark.parametrize("name", list_shipped())
def test_shipped_configurations_name_the_schema_and_meet_it(name: str) -> None:
    path = CONFIGS / f"{name}.toml"
    first = path.read_text().splitlines()[0]
    assert (path.parent / first.removeprefix("#:schema ")).samefile(SCHEMA)
    VALIDATOR.validate(tomllib.loads(path.read_text()))


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("train", {"num_iteration": 3}),
        ("train", {"num_iterations": "many"}),
        ("algo", {"estimator": "margpo"}),
        ("env", {"kind": "codin"}),
        ("env", {"kind": "coding", "prompts": "bare"}),
        ("problems", {}),
    ],
)
def test_mistakes_do_not_meet_the_schema(section: str, values: dict[str, Any]) -> None:
    tree = tomllib.loads((CONFIGS / "embedded.toml").read_text())
    VALIDATOR.validate(tree | {"env": {"kind": "my_package.envs:Mine", "anything": 1}})
    assert not VALIDATOR.is_valid(tree | {section: values})


TAPLO = shutil.which("taplo", path=str(Path(sys.executable).parent)) or shutil.which("taplo")


@pytest.mark.skipif(TAPLO is None, reason="there is no taplo: make setup")
def test_an_editor_finds_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """taplo, which editors ask: of the files that ship, of copies beside the schema, and of a file of one's own."""
    assert TAPLO is not None
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(f"#:schema {SCHEMA.as_uri()}\n{(CONFIGS / 'embedded.toml').read_text()}")
    copies = shutil.copytree(CONFIGS, tmp_path / "a copy")
    right = [*CONFIGS.glob("*.toml"), *copies.glob("*.toml"), tmp_path / "own.toml"]
    subprocess.run([TAPLO, "lint", *right], check=True)
    for path in (copies / "embedded.toml", tmp_path / "own.toml"):
        path.write_text(path.read_text().replace("num_iterations", "num_iteration"))
        wrong = subprocess.run([TAPLO, "lint", path], capture_output=True, text=True, check=False)
        assert wrong.returncode != 0
        assert "'num_iteration' was unexpected" in wrong.stderr
