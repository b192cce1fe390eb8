"""The worked example of docs/roles.md does what the page says: a plan is written, then a program after it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.stages.backend import Backend, Team
from magrpo.stages.credit import CreditRules, credit
from magrpo.stages.rollout import Node, child_nodes, rollout, root_nodes
from magrpo.stages.score import score
from magrpo.types import PENDING, Problem, Request, RolloutGroup, ScoredTurn
from tests.fakes import ScriptedEngine, ScriptedSandbox, render
from tests.process_state import use_modules

PAGE = (Path(__file__).parents[1] / "docs" / "roles.md").read_text(encoding="utf-8")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The configuration of the page, with the classes of the page on the path."""
    own = PAGE[PAGE.index("## A role of your own") :]
    for name, language in (("my_roles.py", "python"), ("run.toml", "toml")):
        [block] = re.findall(rf"```{language}\n(.*?)```", own, re.DOTALL)
        (tmp_path / name).write_text(block)
    use_modules(monkeypatch, tmp_path, "my_roles")
    return load_config(tmp_path / "run.toml", ["rollout.group_size=2"])


def test_a_plan_is_worth_what_is_written_after_it(config: RunConfig) -> None:
    plans = iter(["add one", "think hard"])

    def write(request: Request) -> str:
        prompt = bytes(request.prompt_ids).decode()
        if request.agent == "ada":
            return next(plans)
        return "def f(x):\n    return x + 1" if "add one" in prompt else "I cannot."

    def play(nodes: Sequence[Node]) -> list[RolloutGroup[ScoredTurn]]:
        return score(rollout(nodes, team, backend, config.rollout, seed=0), team, backend.sandbox, cache={})[0]

    sandbox = ScriptedSandbox(lambda _: "pass")
    team, backend = Team.of(config), Backend(engine=ScriptedEngine(write), sandbox=sandbox, render=render)
    problem = Problem("t", 'def f(x):\n    """One more."""\n', "f", "def check(candidate): ...")
    first = play(root_nodes([problem], config.rollout))
    assert [turn.reward for turn in first[0].turns] == [PENDING, PENDING]
    second = play(child_nodes(first, config.rollout))
    assert [[turn.reward.total for turn in group.turns] for group in second] == [[2.5], [0.0]]
    assert config.reward.fraction(2.5) == 1.0
    samples, _ = credit([*first, *second], ["ada", "bob"], CreditRules.of(config))
    for agent in ("ada", "bob"):
        assert [sample.advantage for sample in samples[agent]] == pytest.approx([1.25, -1.25])
