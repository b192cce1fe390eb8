"""What is refused before anything starts: broken files, missing models, a hub that does not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.run.steps import steps
from pipelines import cli
from pipelines.arguments import locate_config
from pipelines.commands.inputs import check_inputs, check_repeated_inputs
from tests.servers import answering

GOOD = {
    "task_id": "t/{}",
    "prompt": 'def f{}(x):\n    """Add one."""\n',
    "entry_point": "f{}",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    "canonical_solution": "    return x + 1\n",
}
HUB = ("agents.0.model=owner/base", "agents.1.model=owner/base")
NOBODY = "http://127.0.0.1:9"
"""The address of a hub that refuses connections."""
# Checks the inputs of the embedded run; says what is wrong, or how the hub's libraries are left.
CHECK = """
import sys
from huggingface_hub import constants
from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.files.hub import find_hub_obstacle
from pipelines.arguments import locate_config
from pipelines.commands.inputs import check_inputs
try:
    check_inputs(load_config(locate_config("embedded"), sys.argv[1:]))
    print("offline:" if constants.is_offline_mode() else "online:", find_hub_obstacle())
except ConfigError as error:
    print(error)
"""
# Starts a run, then plans it.
RUN_AND_PLAN = """
import sys
from pipelines.cli import main
refused, planned = main(sys.argv[1:]), main([*sys.argv[1:], "--dry-run"])
print(f"exit codes {refused} and {planned}")
"""


def run_with_hub(script: str, arguments: Sequence[str], url: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a script that asks the hub at ``url`` and has its caches in ``cache``."""
    hub = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(cache), "HF_DATASETS_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], env=os.environ | hub, capture_output=True, text=True
    )


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
    case: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = BROKEN[case]
    path = write_problems(tmp_path / "problems.jsonl", 10)
    if text is not None:
        path.write_text(text)
    root = tmp_path / "runs"
    arguments = ["embedded", "problems.kind=humaneval", f"problems.source={path}", f"root={root}", *flags]
    assert cli.main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not root.exists()


@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=["run", "plan"])
@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("no_such_module:play", "module no_such_module is not found from "),
        ("pipelines.examples.coop:plai", "pipelines.examples.coop defines no 'plai'"),
        ("python no_such_script.py {problem_file}", "no_such_script.py is not found from "),
        ("./no_such_program", "there is no program './no_such_program', neither on PATH nor from "),
    ],
)
def test_a_program_that_is_not_found_is_refused_before_anything_starts(
    run: str, message: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    assert cli.main(["train", "embedded_program", f"env.run={run}", f"root={root}", *flags]) == 2
    assert f"env.run = {run!r}: {message}" in capsys.readouterr().err
    assert not root.exists()


@pytest.mark.parametrize(
    ("name", "change", "message", "needed_by"),
    [
        (
            "embedded",
            "agents.main.model=/nowhere",
            "model = '/nowhere': no such folder",
            {"rollout", "update", "evaluate"},
        ),
        ("embedded_program", "env.run=no_such_module:play", "no_such_module is not found", {"rollout", "evaluate"}),
    ],
)
def test_a_stage_that_is_repeated_needs_its_models_and_its_program(
    name: str, change: str, message: str, needed_by: set[str]
) -> None:
    config = load_config(locate_config(name), [change])
    last = {step.stage: [step] for step in steps(config)}
    for stage in ("rollout", "credit", "update", "evaluate", "report"):
        with pytest.raises(ConfigError, match=message) if stage in needed_by else nullcontext():
            check_repeated_inputs(last[stage], config)


def test_inputs_that_are_gone_are_missed_only_by_the_stages_that_read_them() -> None:
    config = load_config(locate_config("embedded"), ["agents.main.start_from=/nowhere"])
    every = steps(config)
    first = next(number for number, step in enumerate(every) if step.stage == "start")
    check_repeated_inputs(every[first + 1 :], config)
    for repeated in (every, every[first:]):
        with pytest.raises(ConfigError, match="agent 'main': start_from = /nowhere: no such folder"):
            check_repeated_inputs(repeated, config)


def test_an_unusable_response_template_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "template.json"
    path.write_text('{"fields": ')
    with pytest.raises(
        ConfigError, match=r"template\.json': JSONDecodeError.*; correct the file, or leave the key out"
    ):
        check_inputs(load_config(locate_config("embedded_program"), [f"env.response_template={path}"]))


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
    with pytest.raises(ConfigError, match=r"'coopcode-bas': did you mean 'coopcode-base'\? no such folder, no such mo"):
        check_inputs(load_config(locate_config("embedded"), ["agents.0.model=coopcode-bas"]))


def test_start_weights_that_are_of_another_kind(tmp_path: Path) -> None:
    def check(*changes: str) -> None:
        check_inputs(load_config(locate_config("embedded"), [f"agents.main.start_from={tmp_path}", *changes]))

    with pytest.raises(ConfigError, match=r"of 'main': no config.json; give the folder of a whole model"):
        check("agents.main.weights=full")
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"of 'main': no config.json; use /.*/main"):
        check("agents.main.weights=full")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
    with pytest.raises(ConfigError, match="contains an adapter, but agent 'main' has weights = \"full\""):
        check("agents.main.weights=full")
    with pytest.raises(ConfigError, match=r"no adapter_model\.safetensors; save the adapter again"):
        check("lora.rank=8", "lora.alpha=16")


def test_a_model_that_is_neither_cached_nor_to_be_had_is_refused(tmp_path: Path) -> None:
    said = run_with_hub(CHECK, HUB, NOBODY, tmp_path).stdout
    assert said.startswith("agent 'helper': model = 'owner/base': no such folder, no such model in the cache of the ")
    assert "127.0.0.1 does not answer ([Errno 111] Connection refused); give the folder of a copy" in said


def test_cached_models_are_used_without_asking_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--base" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    said = run_with_hub(CHECK, HUB, NOBODY, tmp_path).stdout
    assert said.startswith("offline: 127.0.0.1 does not answer")


def test_a_hub_that_answers_is_left_to_the_run(tmp_path: Path) -> None:
    with answering(401, "text/html") as url:
        assert run_with_hub(CHECK, HUB, url, tmp_path).stdout == "online: \n"


def test_data_of_the_hub_are_planned_without_and_needed_by_a_run(tmp_path: Path) -> None:
    arguments = ["train", "writing_embedded", "problems.kind=tldr", f"root={tmp_path / 'runs'}"]
    done = run_with_hub(RUN_AND_PLAN, arguments, NOBODY, tmp_path / "cache")
    missing = "the data set trl-lib/tldr is not in the cache of the Hugging Face hub, and 127.0.0.1 does not answer"
    assert f"problems: {missing}" in done.stderr
    assert f"\nproblems could not be read: {missing}" in done.stdout
    assert ": the run would be refused\n" in done.stdout
    assert done.stdout.endswith("exit codes 2 and 0\n")
