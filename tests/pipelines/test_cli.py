"""The command line: names of configurations, mistakes with their remedy, quiet and verbose runs, JSON, old names."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from magrpo.config.run import load_config
from magrpo.config.services import TrackingConfig
from magrpo.run.files import has_samples
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.tracking.mlflow_runs import MlflowTracker, delete_empty_run
from magrpo.tracking.outbox import find_folder_id
from magrpo.training.removal import remove_run
from pipelines import cli
from pipelines.arguments import CONFIGS, list_shipped, locate_config
from tests.pipelines.micro import STAGES, write_config

SHIPPED = "shipped configurations: arxiv, coophumaneval, embedded,"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "embeded"], f"embeded: no such file; did you mean 'embedded'? {SHIPPED}"),
        (["train", "nowhere/embedded.toml"], "nowhere/embedded.toml: no such file; did you mean 'embedded'?"),
        (["evaluate", "zzz.toml"], "zzz.toml: no such file"),
        (["study", "tinny"], "tinny: no such file; did you mean 'tiny'? shipped studies: coopcode, posts, tiny"),
        (["train", "run.tml"], "run.tml: no such file; did you mean run.toml?"),
        (["train", "embedded", "--seed", "1"], "--seed. Keys of the configuration are written train.seed=1 or eval."),
        (
            ["train", "embedded", "--seed=2"],
            "Unknown option: --seed. Keys of the configuration are written train.seed=2",
        ),
        (["train", "embedded", "--num-iterations", "3"], "are written train.num_iterations=3"),
        (["evaluate", "embedded", "--train.seed", "3"], "are written train.seed=3"),
        (["train", "embedded", "-q", "--verbose", "--local"], "give either --quiet or --verbose"),
        (["train", "embedded", "--bogus"], "(see magrpo train --help)"),
        (["train", "embedded", "num_iterations=3"], "unknown key; did you mean 'train.num_iterations'?"),
        (["runs", "--root", "run.toml"], "--root run.toml is not a folder"),
        (["trian", "embedded"], "Unknown command: trian; did you mean 'train'? choices: ask, bench, compare, config, "),
        (["bench", "sand"], "Unknown command: bench sand; did you mean 'sandbox'? choices: iteration, sandbox (see "),
        (
            ["resume", "a", "train.seed=1"],
            "resume takes no train.seed=1: a run keeps its values; magrpo train starts a",
        ),
        (["study", "tiny", "a=1", "b=2"], "study takes no a=1 b=2: write values into the study's file (see magrpo st"),
        (["ask", "a", "Add 1.", "a.b=1"], "ask takes no a.b=1: write --set before each value (see magrpo ask --help)"),
        (["runs", "a", "b"], "runs takes no a b: leave it out (see magrpo runs --help)"),
        (["config", "schema", "a"], "config schema takes no a: leave it out (see magrpo config schema --help)"),
        (["bench", "sandbox", "--workers", "0"], "(see magrpo bench sandbox --help)"),
        (["schedule", "embedded"], "schedule needs either --cron or --interval"),
        (["schedule", "embedded", "--cron", "every night"], "--cron 'every night': needs five fields"),
        (["schedule", "embedded", "--interval", "5"], "write it like 90s, 30m, 6h or 1d (see magrpo schedule --help)"),
    ],
)
def test_a_mistake_names_its_remedy(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").touch()
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.out, [path.name for path in tmp_path.iterdir()]) == ("", ["run.toml"])


def test_a_mistyped_command_is_refused_before_the_libraries_of_commands_are_loaded() -> None:
    code = "import sys; from pipelines.cli import main; print(main(['trian']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"


@pytest.mark.parametrize("words", [["schedule", "--interval", "1h"], ["evaluate", "--baselines", "all"]])
def test_a_file_whose_name_no_run_can_have_needs_another_name(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    spaced = config.rename(config.with_name("my run.toml"))
    assert cli.main([words[0], str(spaced), *words[1:]]) == 2
    said = capsys.readouterr().err
    assert "run name 'my run' cannot be used" in said
    assert said.rstrip().endswith("; give one with --name")


def test_a_shipped_configuration_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "embedded", "train.num_iterations=1", "--dry-run"]) == 0
    assert "train.num_iterations = 1 (default 100)" in capsys.readouterr().out
    (tmp_path / "embedded").mkdir()
    assert [locate_config(name) for name in list_shipped()] == sorted(CONFIGS.glob("*.toml"))
    (tmp_path / "team").touch()
    assert locate_config("team") == Path("team")


@pytest.fixture
def verbosity(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Restores what ``--quiet`` and ``--verbose`` set for the rest of a process."""
    monkeypatch.setenv("MAGRPO_VERBOSITY", "normal")
    for name in ("magrpo", "pipelines"):
        caplog.set_level(logging.NOTSET, name)


@pytest.mark.usefixtures("verbosity")
def test_a_tilde_in_a_flag_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "place.toml").touch()
    RunStore.create(load_config(write_config(tmp_path)), "seed-1")
    assert cli.main(["resume", "seed-1", "--root=~/runs", "--place=~/place.toml", "--dry-run"]) == 0
    assert cli.main(["train", "~/none.toml"]) == 2
    assert f"{tmp_path}/none.toml: no such file" in capsys.readouterr().err
    assert not (tmp_path / "~").exists()


def test_a_run_is_quiet_verbose_and_listed_as_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config, root = str(write_config(tmp_path, iterations=1)), tmp_path / "runs"
    registry = ["registry.model=team", "registry.promote=true"]
    assert cli.main(["train", config, *registry, "--local", "-q", "--name", "quiet"]) == 0
    quiet = capfd.readouterr().out
    assert re.search("^team: +version 1 of team ", quiet, re.MULTILINE)
    assert not re.search("^(run |problems:|1/1|held-out problems before)", quiet, re.MULTILINE)
    assert "report.html" in quiet
    assert cli.main(["train", config, "--local", "-v", "--name", "loud"]) == 0
    said = capfd.readouterr().out
    assert re.search("^problems:", said, re.MULTILINE)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert [line.partition(": ")[0] for line in lines if record_of_step(line)] == STAGES
    assert any(line.startswith("00001/evaluate: ") and "held-out return" in line for line in lines)

    os.environ.pop("MLFLOW_TRACKING_URI", None)
    assert cli.main(["runs", "--json", "--root", str(root)]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert {run["run"] for run in listed} == {"quiet", "loud"}
    for run in listed:
        assert (run["state"], run["iterations"], run["num_iterations"], len(run["returns"])) == ("finished", 1, 1, 2)
        assert run["config"]["train.seed"] == 0


def record_of_step(line: str) -> bool:
    return line.endswith(" s") or " s, " in line


def test_a_refused_configuration_leaves_its_name_free(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, root = str(write_config(tmp_path, iterations=1)), tmp_path / "runs"
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    capfd.readouterr()
    for _ in range(2):
        assert cli.main(["train", config, "--local", "--name", "again", "rollout.max_new_tokens=64"]) == 2
        said = capfd.readouterr().err
        assert said.startswith("magrpo: problems: "), "the reason, and nothing before it"
        assert not (root / "again").exists()
    assert list(MlflowClient(f"sqlite:///{root}/mlflow.db").search_runs(["1"])) == []
    kept = RunStore.create(load_config(config))
    for stage, is_kept in (("prepare", False), ("start", False), ("evaluate", True)):
        kept.commit(Step(stage, 0).output, "key", lambda _: {})
        assert has_samples(kept) == is_kept


def test_a_refused_run_behind_a_link_leaves_the_link(tmp_path: Path) -> None:
    config, root, elsewhere = write_config(tmp_path, iterations=1), tmp_path / "runs", tmp_path / "other-disk"
    root.mkdir(exist_ok=True)
    elsewhere.mkdir()
    (root / "moved").symlink_to(elsewhere)
    for _ in range(2):
        store = RunStore.create(load_config(config), "moved")
        store.commit(Step("prepare", 0).output, "key", lambda _: {})
        remove_run(store)
        assert store.path.is_symlink()
        assert list(elsewhere.iterdir()) == []


def test_a_mistake_in_a_plugin_is_named_without_a_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, root = str(write_config(tmp_path, iterations=1)), tmp_path / "runs"
    for key, mistake, code, first in (
        ("reward", "Absent", 2, "price() returned None for problem '"),
        ("env", "Silent", 2, "observe() returned 'p0' for problem 'train/0'; it must return an Observation"),
        ("reward", "LateMistake", 1, "price() failed for problem '"),
    ):
        kind = f"tests.checks.plugins:{mistake}"
        assert cli.main(["train", config, "--local", "--name", mistake, f"{key}.kind={kind}"]) == code
        said = capfd.readouterr().err
        assert "Traceback" not in said
        block = [line for line in said.splitlines() if line.startswith("magrpo: ")]
        assert block[0].startswith(f"magrpo: {key} {kind}: {first}")
        assert (len(block) > 1) == (code == 1), "frames, of an exception of the plug-in only"
        assert (root / mistake).exists() == ("magrpo resume" in said) == (code == 1)
    assert "magrpo:     return price if price.total else 1 / 0" in block


def test_a_record_with_measurements_is_not_deleted(tmp_path: Path) -> None:
    write_config(tmp_path)
    root = tmp_path / "runs"
    uri = f"sqlite:///{root}/mlflow.db"
    tracker = MlflowTracker(TrackingConfig(uri=uri), root, "again", tmp_path / "again")
    tracker.metrics({"eval/return": 0.5}, 0)
    tracker.close("FINISHED")
    delete_empty_run(uri, "magrpo", find_folder_id(tmp_path / "again"))
    assert [run.info.run_name for run in MlflowClient(uri).search_runs(["1"])] == ["again"]


def test_help_lists_daily_commands_first_and_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    titles = re.findall(r"^╭─ (.*?) ─", said, re.MULTILINE)
    assert titles == ["Train", "Look at runs", "Use the agents", "Operate", "Options"]
    listed = re.findall(r"^\W{1,3}([a-z][a-z-]+)  ", said, re.MULTILINE)
    assert listed[:5] == ["train", "resume", "study", "evaluate", "schedule"]
    assert sorted(listed) == sorted(name for name in cli.app if not name.startswith("-"))


def test_help_of_train_begins_with_its_arguments_and_ends_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Usage: magrpo train CONFIG [KEY=VALUE...] [OPTIONS]")
    flags = re.findall(r"^\W*(--[a-z-]+)", said, re.MULTILINE)
    wanted = ("name", "dry-run", "root", "place", "local", "quiet", "verbose")
    assert flags == [f"--{name}" for name in wanted]
    examples = re.findall(r"^  magrpo (.*)", said.partition("Examples:")[2], re.MULTILINE)
    assert len(examples) == 2
    for example in examples:
        command, file, *rest = example.split()
        assert command == "train"
        load_config(locate_config(file), [word for word in rest if "=" in word])
