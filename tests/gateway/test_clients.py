"""The embedded task by programs of four kinds of clients: each learns, and equal requests get equal completions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from magrpo.run.files import read_evaluation, read_groups
from magrpo.run.store import RunStore
from pipelines.cli import main
from tests.gateway.stand_in import EXAMPLES, make_environment

SHORT = (
    "train.num_iterations=5",
    "rollout.problems_per_iteration=8",
    "optim.lr=5e-3",
    "optim.warmup_iterations=0",
    "eval.every=100",
    "eval.num_samples=1",
    "eval.max_problems=16",
    "problems.num_ood=3",
    "env.concurrency=8",
    "env.time_limit_s=600",
)
"""Learns as much as can be seen on few problems, because a command starts a Python for each episode."""
Tokens = Mapping[tuple[str, str], list[tuple[int, ...]]]


def _train(root: Path, name: str, *options: str) -> RunStore:
    assert main(["train", "embedded_program", "--local", "--root", str(root), "--name", name, *SHORT, *options]) == 0
    return RunStore.open(root, name)


def _train_command(root: Path, python: str, name: str, *options: str) -> RunStore:
    return _train(root, name, f"env.run={shlex.quote(python)} {EXAMPLES}/{name}.py {{problem_file}}", *options)


def _list_completions(store: RunStore) -> Tokens:
    """The tokens of the first iteration, by problem and agent."""
    completions: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for group in read_groups(store.path / "stages/00001/rollout.0"):
        for episode in group.episodes:
            assert episode.status == "finished", episode.message
            for call in episode.calls:
                completions.setdefault((group.problem.task_id, call.agent), []).append(call.action.token_ids)
    return completions


def _has_learned(store: RunStore) -> bool:
    """Whether the held-out return is higher than that of the untrained agents."""
    before, after = (
        read_evaluation(store.path / f"stages/{i:05d}/evaluate").summary["test/sampled"]["return"].mean
        for i in (0, store.config().train.num_iterations)
    )
    return after > before


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """What ``coop.py``, with the client of this project, samples in its first iteration."""
    store = _train(tmp_path_factory.mktemp("plain"), "coop", "train.num_iterations=1")
    return _list_completions(store)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of the virtual environment that the examples ask for."""
    return make_environment(tmp_path_factory.mktemp("python") / "venv", "examples.txt")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_openai(tmp_path: Path, plain: Tokens) -> None:
    pytest.importorskip("openai")
    store = _train(tmp_path, "coop_openai", "env.run=pipelines.examples.coop_openai:solve")
    assert _list_completions(store) == plain
    assert _has_learned(store)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_agents_sdk_hands_off(tmp_path: Path, plain: Tokens, python: str) -> None:
    template = f"env.response_template={EXAMPLES}/hand_off.json"
    store = _train_command(tmp_path, python, "coop_agents_sdk", template)
    assert _list_completions(store) == plain
    assert _has_learned(store)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_langgraph(tmp_path: Path, plain: Tokens, python: str) -> None:
    store = _train_command(tmp_path, python, "coop_langgraph")
    assert _list_completions(store) == plain
    assert _has_learned(store)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_tool_that_runs_in_the_sandbox(tmp_path: Path, plain: Tokens) -> None:
    store = _train(tmp_path, "coop_tool", "env.run=pipelines.examples.coop_tool:solve")
    completions = _list_completions(store)
    for (problem, agent), first in plain.items():
        own = completions[problem, agent]
        if agent == "helper":
            assert own == first
        else:
            assert len(first) <= len(own) <= 2 * len(first)
    assert sum(map(len, completions.values())) > sum(map(len, plain.values())), "some draft failed and was written anew"
    assert _has_learned(store)
