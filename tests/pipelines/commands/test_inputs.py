"""What is refused before anything starts: broken files, missing models, a hub that does not answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.files import hub
from pipelines import cli
from pipelines.arguments import locate_config
from pipelines.commands.inputs import check_inputs
from tests.servers import answering

GOOD = {
    "task_id": "t/{}",
    "prompt": 'def f{}(x):\n    """Add one."""\n',
    "entry_point": "f{}",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    "canonical_solution": "    return x + 1\n",
}
HUB = ("agents.0.model=owner/base", "agents.1.model=owner/base")


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let this process ask the hub at ``url``."""
    for name, value in {"ENDPOINT": url, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that refuses connections, and an empty cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    use_hub(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_reason_offline", "HF_HUB_OFFLINE is set")


def write_problems(path: Path, count: int = 60) -> Path:
    rows = [{key: value.replace("{}", str(i)) for key, value in GOOD.items()} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


BROKEN = {
    "fields": ('{"foo": 1}\n', "problems.jsonl:1: has no field 'task_id'; its fields are foo"),
    "json": ('{"task_id": \n', "problems.jsonl:1: is not JSON"),
    "empty": ("", "problems.jsonl: contains no rows"),
    "few": (None, "rollout.problems_per_iteration = 48, but the train split has only 8"),
}


@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=["run", "plan"])
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_before_anything_starts(
    case: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message = BROKEN[case]
    path = write_problems(tmp_path / "problems.jsonl", 10)
    if text is not None:
        path.write_text(text)
    root = tmp_path / "runs"
    monkeypatch.setattr("pipelines.commands.train.launch_run", lambda *_, **__: pytest.fail("the run started"))
    arguments = ["embedded", "problems.kind=humaneval", f"problems.source={path}", f"root={root}", *flags]
    assert cli.main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not root.exists()


# The command line where the libraries that a mistake need not wait for cannot be imported.
WITHOUT_LIBRARIES = """
import sys
sys.modules |= dict.fromkeys(("torch", "transformers", "prefect"))
from pipelines.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("words", [["train"], ["train", "--dry-run"]], ids=" ".join)
def test_a_missing_folder_is_refused_without_heavy_libraries(words: list[str], tmp_path: Path) -> None:
    arguments = [words[0], "embedded", "agents.1.model=/nowhere/base", f"root={tmp_path / 'runs'}", *words[1:]]
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARIES, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "magrpo: agent 'main': model = '/nowhere/base': no such folder\n"
    assert not (tmp_path / "runs").exists()


def test_folders_that_hold_no_model_or_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent 'helper': model = '/.*': no model, it has no config.json"):
        check_inputs(load_config(locate_config("embedded"), [f"agents.0.model={tmp_path}"]))
    with pytest.raises(ConfigError, match="agent 'main': start_from = /nowhere: no such folder"):
        check_inputs(load_config(locate_config("embedded"), ["agents.main.start_from=/nowhere"]))


@pytest.mark.usefixtures("no_network")
def test_a_model_that_is_neither_cached_nor_to_be_had_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check_inputs(load_config(locate_config("embedded"), HUB))
    said = str(caught.value)
    assert said.startswith("agent 'helper': model = 'owner/base': no such folder, no such model in the cache of the ")
    assert "127.0.0.1 does not answer ([Errno 111] Connection refused); give the folder of a copy" in said
    with pytest.raises(ConfigError, match=r"model = 'coopcode-bas': did you mean 'coopcode-base'[?] no such folder"):
        check_inputs(load_config(locate_config("embedded"), ["agents.0.model=coopcode-bas"]))


@pytest.mark.usefixtures("no_network")
def test_cached_models_are_used_without_asking_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "cache" / "models--owner--base" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    check_inputs(load_config(locate_config("embedded"), HUB))
    assert constants.is_offline_mode()
    assert "does not answer" in hub.find_hub_obstacle()


def test_a_hub_that_answers_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(401, "text/html") as url:
        use_hub(monkeypatch, url)
        assert hub.find_hub_obstacle() == ""
        check_inputs(load_config(locate_config("embedded"), HUB))


@pytest.mark.usefixtures("no_network")
def test_data_of_the_hub_are_planned_without_and_needed_by_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    arguments = ["train", "writing_embedded", "problems.kind=tldr", f"root={tmp_path / 'runs'}"]
    assert cli.main(arguments) == 2
    missing = "the data set trl-lib/tldr is not in the cache of the Hugging Face hub, and 127.0.0.1 does not answer"
    assert f"problems: {missing}" in capsys.readouterr().err
    assert cli.main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"\nproblems could not be read: {missing}" in said
    assert ": the run would be refused\n" in said
