"""The folder of trained agents: what its card says is what its snippets, commands and requests give."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir, redirect_stdout
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from magrpo.config.services import NotifyConfig, TrackingConfig
from magrpo.export import model_card, sample
from magrpo.export.agents_folder import ORIGIN, write_run_agents
from magrpo.export.model_card import render_agent_card, render_model_card
from magrpo.export.sample import choose_sample
from magrpo.export.team import TrainedTeam
from magrpo.model.lineup import open_prompt_tokenizer
from magrpo.process.ports import find_free_ports
from magrpo.run.files import TRAJECTORIES
from magrpo.run.store import RunStore, read_records
from magrpo.types import Trajectory
from pipelines.cli import main
from tests.pipelines.micro import blank_pictures
from tests.servers import answers

CONFIGS = Path(__file__).parents[2] / "pipelines" / "configs"
SHORT = (
    "problems.num_train=12",
    "problems.num_test=6",
    "train.num_iterations=1",
    "rollout.problems_per_iteration=2",
    "rollout.group_size=2",
    "eval.max_problems=4",
    "eval.num_samples=1",
)


def train(root: Path, config: str, *overrides: str) -> RunStore:
    with blank_pictures():
        arguments = [str(CONFIGS / config), *SHORT, *overrides, "--name", "mine", "--root", str(root), "--local"]
        assert main(["train", *arguments]) == 0
    return RunStore.open(root, "mine")


@pytest.fixture(scope="module")
def coders(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """A finished run of two programmers."""
    return train(tmp_path_factory.mktemp("coders"), "embedded.toml")


@pytest.fixture(scope="module")
def authors(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """A finished run of two authors."""
    return train(tmp_path_factory.mktemp("authors"), "writing_embedded.toml")


def read_blocks(card: str, language: str = "") -> list[str]:
    """The code blocks of a card in one language."""
    return [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", card, re.M | re.S) if kind == language]


def run_python(folder: Path, snippet: str) -> str:
    """What a snippet prints in ``folder``."""
    with chdir(folder), redirect_stdout(io.StringIO()) as printed:
        exec(snippet, {})
    return printed.getvalue()


def test_the_snippet_prints_the_answers_of_the_card_without_this_project(coders: RunStore) -> None:
    agents = coders.path / "agents"
    card = (agents / "README.md").read_text()
    [snippet] = read_blocks(card, "python")
    assert "magrpo" not in re.findall(r"^\s*(?:import|from) (\w+)", snippet, re.M)
    assert run_python(agents, snippet) == read_blocks(card)[0]
    assert re.search(r"The joined program passes \d+ of \d+ tests", card)


def test_a_card_counts_hidden_tests_too(coders: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def hide_tests(trajectory: Trajectory) -> Trajectory:
        """Let the tests be there once more, hidden."""
        [step] = trajectory.steps
        hidden = {f"{name}_hidden": report for name, report in step.turn.reports.items() if name == "program"}
        step = replace(step, turn=replace(step.turn, reports={**step.turn.reports, **hidden}))
        problem = replace(trajectory.problem, hidden_test=trajectory.problem.test)
        return replace(trajectory, problem=problem, steps=(step,))

    team = TrainedTeam.of(coders)
    shown = choose_sample(team)
    monkeypatch.setattr(sample, "read_records", lambda path, kind: map(hide_tests, read_records(path, kind)))
    both = choose_sample(team)
    assert shown is not None
    assert both is not None
    assert shown.tests is not None
    assert both.tests == (2 * shown.tests[0], 2 * shown.tests[1])


def test_a_card_speaks_of_programs_only_where_there_are_any(coders: RunStore, authors: RunStore) -> None:
    of_programs, of_texts = ((store.path / "agents" / "README.md").read_text() for store in (coders, authors))
    assert "it runs their program in a sandbox and scores it:" in of_programs
    assert "it scores their texts:" in of_texts
    assert "sandbox and" not in of_texts


def test_cards_say_which_agents_were_trained(coders: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def render_cards(num_agents: int, *, trains_helper: bool) -> tuple[str, str]:
        agents = (helper.model_copy(update={"trained": trains_helper}), main_agent)[-num_agents:]
        team = replace(whole, config=whole.config.model_copy(update={"agents": agents}))
        return render_model_card(team), render_agent_card(team, agents[0])

    monkeypatch.setattr(model_card, "choose_sample", lambda team: None)  # the run's sample has two answers
    whole = TrainedTeam.of(coders)
    helper, main_agent = whole.config.agents
    method = "MAGRPO ([arXiv 2508.04652](https://arxiv.org/abs/2508.04652))"
    advice = "They work as a team, so do not mix agents of different versions."
    base = "an adapter of `coopcode-base`"

    of_team, of_agent = render_cards(2, trains_helper=True)
    assert f"\n\n`helper` (role helper), `main` (role main), trained together with {method}. {advice}\n\n" in of_team
    assert f"One agent (role `helper`) of a team of 2: {base}. [" in of_agent
    of_team, of_agent = render_cards(2, trains_helper=False)
    assert f"\n\n`main` (role main), trained with {method}; `helper` kept its weights. {advice}\n\n" in of_team
    assert f"One agent (role `helper`) of a team of 2: {base}, which kept the weights it started from. [" in of_agent
    of_team, of_agent = render_cards(1, trains_helper=False)
    method = "GRPO ([arXiv 2402.03300](https://arxiv.org/abs/2402.03300))"
    assert f"\n\n`main` (role main), trained with {method}.\n\n" in of_team
    assert f"One agent (role `main`): {base}. [" in of_agent


def test_two_authors_print_two_texts(authors: RunStore) -> None:
    agents = authors.path / "agents"
    card = (agents / "README.md").read_text()
    [snippet] = read_blocks(card, "python")
    assert run_python(agents, snippet) == read_blocks(card)[0]
    assert "tests" not in card.partition("## Evaluation")[0]


def test_the_agents_of_the_folder_can_be_asked(coders: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    agents = coders.path / "agents"
    card = (agents / "README.md").read_text()
    [command] = [line for block in read_blocks(card, "sh") for line in block.splitlines() if line.startswith("magrpo ")]
    with chdir(agents):
        assert main(shlex.split(command)[1:]) == 0
    said = capsys.readouterr().out
    assert [line for line in read_blocks(card)[0].split() if line not in said] == []


def assert_readable(path: Path) -> None:
    """By everybody, however much the umask lets the owner's group do."""
    readable = 0o755 if path.is_dir() else 0o644
    assert path.stat().st_mode & readable == readable


def test_the_folder_is_whole_and_names_no_folder_of_this_machine(coders: RunStore) -> None:
    agents = coders.path / "agents"
    assert sorted(path.name for path in agents.iterdir()) == [
        "README.md",
        "config.json",
        "coopcode-base",
        "helper",
        "main",
        "origin.json",
    ]
    for path in agents.rglob("*"):
        assert_readable(path)
        if path.suffix in (".md", ".json", ".jinja"):
            assert str(coders.path.parent) not in path.read_text()
            assert str(CONFIGS.parents[1]) not in path.read_text()
    for name in ("helper", "main"):
        assert json.loads((agents / name / "adapter_config.json").read_text())["base_model_name_or_path"] == (
            "coopcode-base"
        )
        theirs, ours = (
            folder / name / "adapter_model.safetensors"
            for folder in (agents, coders.path / "stages/00001/update/weights")
        )
        assert theirs.read_bytes() == ours.read_bytes()
        assert_readable(ours)
        assert "../README.md" in (agents / name / "README.md").read_text()


def test_the_folder_names_no_service_of_the_training_machine(coders: RunStore) -> None:
    services = {
        "tracking": TrackingConfig(uri="https://alice:hunter2@example.org"),
        "notify": NotifyConfig.model_validate({"urls": ["json://alice:hunter2@example.org"]}),
    }
    team = replace(TrainedTeam.of(coders), config=coders.config().model_copy(update=services))
    assert "example.org" not in team.portable_config().resolved(secrets=True)
    assert "example.org" not in render_model_card(team)


def test_chat_templates_render_prompts_as_they_were_trained(coders: RunStore, authors: RunStore) -> None:
    for store in (coders, authors):
        config = store.config()
        trajectories = read_records(store.path / "stages/00001/evaluate" / TRAJECTORIES, Trajectory)
        for agent in config.agents:
            tokenizer = open_prompt_tokenizer(agent, config.model.chat_template)
            prompt = trajectories[0].steps[0].prompts[agent.name]
            messages = [{"role": message.role, "content": message.content} for message in prompt.observation.messages]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert tuple(ids) == prompt.token_ids


def test_a_finished_run_keeps_its_folder_until_its_weights_change(coders: RunStore) -> None:
    written = (coders.path / "agents" / ORIGIN).stat()
    write_run_agents(coders)
    assert (coders.path / "agents" / ORIGIN).stat().st_ino == written.st_ino
    (coders.path / "agents" / ORIGIN).write_text("{}")
    write_run_agents(coders)
    assert (coders.path / "agents" / ORIGIN).stat().st_ino != written.st_ino


@pytest.mark.parametrize("moment", ["copytree", "rmtree", "rename"])
def test_a_kill_while_the_folder_is_written_leaves_nothing(coders: RunStore, moment: str) -> None:
    (coders.path / "agents" / ORIGIN).write_text("{}")
    killed = get_context("fork").Process(target=_write_until, args=(coders, moment))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    write_run_agents(coders)
    assert (coders.path / "agents" / "README.md").is_file()
    assert not list(coders.path.glob(".*"))


def _write_until(store: RunStore, moment: str) -> None:
    """Write the folder; be killed before one is copied or deleted, or after the draft was renamed."""
    owner = Path if moment == "rename" else shutil
    real = getattr(owner, moment)

    def kill(path: Path, *arguments: object, **options: object) -> None:
        if moment == "rename":
            real(path, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, moment, kill)
    write_run_agents(store)


def export(store: RunStore, *arguments: str) -> int:
    return main(["export", store.run_id, "--root", str(store.path.parent), *arguments])


def test_merged_agents_answer_alike_without_peft_and_base(coders: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(coders, "--merge") == 0
    assert "agents-merged: the merged models helper, main after iteration 1" in capsys.readouterr().out
    merged = coders.path / "agents-merged"
    card = (merged / "README.md").read_text()
    [snippet] = read_blocks(card, "python")
    assert "peft" not in snippet
    assert not (merged / "coopcode-base").exists()
    assert run_python(merged, snippet) == read_blocks((coders.path / "agents" / "README.md").read_text())[0]
    assert [agent["weights"] for agent in json.loads((merged / "config.json").read_text())["agents"]] == ["full"] * 2


def test_an_old_run_gets_its_folder_where_it_is_wanted(
    coders: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "for-a-friend"
    assert export(coders, "--output", str(target)) == 0
    assert (target / "README.md").read_text() == (coders.path / "agents" / "README.md").read_text()
    assert export(coders, "--output", str(target)) == 0, "a folder of agents is replaced"
    with chdir(target):
        assert export(coders, "--output", ".") == 2
    assert "for-a-friend is the current folder, or holds it; choose a new folder" in capsys.readouterr().err
    assert (target / "README.md").is_file()
    (target / ORIGIN).unlink()
    assert export(coders, "--output", str(target)) == 2
    assert "for-a-friend contains other files; choose a new folder" in capsys.readouterr().err


def test_an_export_deletes_only_drafts_of_its_own(coders: RunStore, tmp_path: Path) -> None:
    hidden = [tmp_path / name for name in (".code-server", ".code-draft-insiders", ".code-12345678")]
    left_behind = tmp_path / ".code-draft-12345678"
    for folder in (*hidden, left_behind):
        folder.mkdir()
    assert export(coders, "--output", str(tmp_path / "code")) == 0
    assert all(folder.is_dir() for folder in hidden)
    assert not left_behind.exists()


def test_a_card_shows_no_server_for_adapters_that_vllm_refuses(
    coders: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--enable-lora" in render_model_card(TrainedTeam.of(coders))
    monkeypatch.setattr(model_card, "MAX_RANKS", (1, 2))
    assert "--enable-lora" not in render_model_card(TrainedTeam.of(coders))


def test_a_run_without_agents_says_so(tmp_path: Path, coders: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    store = RunStore.create(coders.config().model_copy(update={"root": tmp_path}), "new")
    assert main(["export", "new", "--root", str(tmp_path)]) == 2
    resume = store.format_command("resume")
    assert f"run new has no evaluated agents yet; resume it: {resume}" in capsys.readouterr().err


def read_answer(request: str, folder: Path) -> str:
    """The text of the answer to a request of the card."""
    done = subprocess.run(["bash", "-c", request], cwd=folder, capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout)["choices"][0]["message"]["content"])


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_serves_the_folder_and_answers_as_the_card_says(coders: RunStore, tmp_path: Path) -> None:
    agents = coders.path / "agents"
    card = (agents / "README.md").read_text().partition("### With vLLM")[2]
    [port] = find_free_ports(1)
    serve, request = (text.replace("8000", str(port)) for text in read_blocks(card, "sh"))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {serve}"], cwd=agents, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, (tmp_path / "server.log").read_text()[-3000:]
            time.sleep(0.5)
        answer = read_answer(request, agents)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    assert answer == read_blocks(card)[0].rstrip("\n")
