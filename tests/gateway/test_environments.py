"""The examples that play the environments of others, each with the real library in a virtual environment of its own."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from magrpo.config.run import load_config
from magrpo.process.ports import find_free_ports
from magrpo.rewards.returned import ReturnedReward
from magrpo.run.files import read_scored
from magrpo.run.store import RunStore
from magrpo.types import Episode
from pipelines.cli import main
from pipelines.examples.numbered_tasks import NumberedTasks
from tests.gateway.stand_in import EXAMPLES, ROOT, make_environment, serve_replies
from tests.servers import answers

HERE = Path(__file__).parent
SHORT = (
    "problems.kind=pipelines.examples.numbered_tasks:NumberedTasks",
    "problems.num_train=4",
    "problems.num_test=2",
    "reward={kind='returned'}",
    "env.writes=[]",
    "train.num_iterations=1",
    "rollout.problems_per_iteration=2",
    "rollout.group_size=2",
    "eval.num_samples=1",
    "env.concurrency=4",
)


def _train(root: Path, *options: str) -> list[tuple[float, Episode]]:
    """Train for one iteration; returns the reward of each episode of it."""
    assert main(["train", "embedded_program", "--local", "--root", str(root), "--name", "run", *SHORT, *options]) == 0
    groups = read_scored(RunStore.open(root, "run").path / "stages/00001/score.0")
    played = [pair for group in groups for pair in zip(group.turns, group.episodes, strict=True)]
    return [(turn.reward.total, episode) for turn, episode in played]


def test_numbered_tasks_are_disjoint() -> None:
    splits = NumberedTasks(kind="numbers", num_train=3, num_test=2).load()
    assert [problem.prompt for problem in splits["train"]] == ["0", "1", "2"]
    assert [problem.prompt for problem in splits["test"]] == ["3", "4"]


def test_a_number_needs_no_configuration() -> None:
    reward = load_config(ROOT / "pipelines" / "configs" / "embedded_program.toml", list(SHORT)).reward
    assert isinstance(reward, ReturnedReward)
    assert reward.read_returned(0.25, ["helper", "main"]).total == 0.25


# ----------------------------------------------------------------------------------------------------------- OpenEnv
@pytest.fixture
def openenv(tmp_path: Path) -> Iterator[str]:
    """The address of a server of OpenEnv's own package; see ``openenv_server.py``."""
    python = make_environment(tmp_path / "venv", "examples-openenv.txt")
    [port] = find_free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([python, HERE / "openenv_server.py", str(port)]) as server:
        while not answers(f"{url}/schema"):
            assert server.poll() is None, "the server ended"
        yield url
        server.terminate()


@pytest.mark.slow
def test_an_openenv_server(tmp_path: Path, openenv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_URL", openenv)
    for reward, episode in _train(tmp_path, "env.run=pipelines.examples.openenv_program:solve"):
        assert episode.status == "finished", episode.message
        agents = [call.agent for call in episode.calls]
        assert agents == ["helper", "main", "helper"][: len(agents)]
        observed = [json.loads(call.messages[-1]["content"])["word"] for call in episode.calls]
        assert observed == ["def", "class", "def"][: len(agents)]
        fulfilled = [call.action.text.startswith(word) for call, word in zip(episode.calls, observed, strict=True)]
        assert reward == pytest.approx(sum(fulfilled) / len(fulfilled))


# --------------------------------------------------------------------------------------------------------- verifiers
@pytest.mark.slow
def test_an_environment_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = make_environment(tmp_path / "venv", "examples-verifiers.txt")
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # instead of installing the package of the environment
    command = f"{shlex.quote(python)} {EXAMPLES}/verifiers_program.py pairs_v1 {{problem_file}}"
    for reward, episode in _train(tmp_path, f"env.run={command}", "env.time_limit_s=600"):
        assert episode.status == "finished", episode.message
        assert [call.agent for call in episode.calls] == ["helper", "main"]
        begins = [call.action.text.startswith("def ") for call in episode.calls]
        assert reward == pytest.approx(sum(begins) / 2)


# --------------------------------------------------------------------------------------------------------- TextArena
def _find_pairs(seed: int) -> list[str]:
    """The moves that uncover the pairs on a board of four by four cards, which the game shuffles with its seed."""
    cards = [chr(65 + i) for i in range(8)] * 2
    random.Random(seed).shuffle(cards)
    places = [[f"{i // 4} {i % 4}" for i, other in enumerate(cards) if other == card] for card in sorted({*cards})]
    return [f"I remember [{first} {second}]" for first, second in places]


@pytest.mark.slow
def test_a_game_of_textarena(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv", "examples.txt")
    problem = tmp_path / "problem.json"
    problem.write_text(json.dumps({"task_id": "task/3", "prompt": "3"}))

    def play(reply: Callable[[str, str], str]) -> float:
        with serve_replies(reply) as variables:
            command = [python, EXAMPLES / "textarena_program.py", problem]
            done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
        return float(done.stdout.splitlines()[-1])

    pairs = _find_pairs(3)
    (first, second), moves = (move.split("[")[1][:3] for move in pairs[:2]), count()
    asked: set[str] = set()

    def remember(agent: str, _: str) -> str:
        """``first`` uncovers two cards that differ, and ``second`` all pairs."""
        asked.add(agent)
        return f"[{first} {second}]" if agent == "first" else pairs[next(moves)]

    assert play(remember) == 1.0
    assert asked == {"first", "second"}
    assert play(lambda agent, text: "no move at all") == 0.0
