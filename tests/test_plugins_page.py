"""The examples of docs/plugins.md work together: problems, an environment and a reward from outside the project."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.plugins import MEMBERS
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.stages.backend import Backend, Team
from magrpo.stages.rollout import child_nodes, rollout, root_nodes
from magrpo.stages.score import score
from magrpo.types import Problem, Request
from tests.fakes import ScriptedEngine, render
from tests.process_state import use_modules

PAGE = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [shlex.split(line)[3:] for line in re.findall(r"^magrpo train mine\.toml.*$", PAGE, re.MULTILINE)]


@pytest.fixture(params=COMMANDS, ids=" ".join)
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The configuration of each command of the page, with the modules of the page on the path."""
    assert set(FILES) == {"my_problems.py", "my_env.py", "my_reward.py", "mine.toml"}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    use_modules(monkeypatch, tmp_path, *(name.removesuffix(".py") for name in FILES))
    return load_config(tmp_path / "mine.toml", request.param)


def test_the_page_names_every_member_that_a_plug_in_must_have() -> None:
    assert {name for names in MEMBERS.values() for name in names} <= set(re.findall(r"`(\w+)`", PAGE))


def test_the_examples_make_a_rollout_with_rewards(config: RunConfig) -> None:
    splits = config.problems.load()
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 32, "test": 32}
    problem = splits["train"][1]
    assert problem.task_id == "times_plus/2/4"
    mains = ["return aux(n) + 4", "return aux(n)", "return 18", "no code", *["return n * 2 + 4"] * 4]

    def write(request: Request) -> str:
        if request.agent == "ada":
            return "def aux(n):\n    return n * 2"
        return f"def times_plus(n):\n    {mains.pop(0)}"

    engine, sandbox = ScriptedEngine(write), PoolSandbox(workers=1).open()
    team, backend = Team.of(config), Backend(engine=engine, sandbox=sandbox, render=render)
    levels, nodes = [], root_nodes([problem], config.rollout)
    try:
        for _ in range(config.env.num_turns):
            sampled = rollout(nodes, team, backend, config.rollout, seed=0)
            levels.append(score(sampled, team, sandbox, cache={})[0])
            nodes = child_nodes(levels[-1], config.rollout)[:1]
    finally:
        sandbox.close()
    reward: Any = config.reward
    bonus = 0.5 * (1 - 4 / reward.max_lines)
    assert [turn.reward.total for turn in levels[0][0].turns] == pytest.approx([1 + bonus, 0.0, 1 / 3, 0.0])
    assert reward.fraction(sum(reward.maxima.values())) == 1.0
    seen = [bytes(prompt.token_ids).decode() for prompt in levels[-1][0].prompts.values()]
    assert ["# feedback\n3 tests pass" in text for text in seen] == [config.env.num_turns == 2] * 2
    assert ["return aux(n) + 4" in text for text in seen] == [False, config.env.num_turns == 2]


def test_a_forged_test_earns_nothing(config: RunConfig) -> None:
    problem = Problem("t", "", "root", "def check(candidate):\n    assert abs(candidate(4) - 2) < 1e-6\n")
    forger = "class Root:\n    __sub__ = __abs__ = lambda self, *_: self\n    __lt__ = lambda self, _: True\n"
    texts = {"helper": forger, "main": "def root(n):\n    return Root()\n"}
    reward, sandbox = config.reward, PoolSandbox(workers=1).open()
    try:
        [report] = sandbox.run(list(reward.executions(problem, texts, {}).values()))
    finally:
        sandbox.close()
    assert (report.status, report.forgeable) == ("pass", True)
    assert reward.price(problem, texts, {"program": report}).parts == {"tests": 0.0, "brevity": 0.0}
    assert not reward.passed({"program": report})


def test_the_reference_solutions_pass(config: RunConfig) -> None:
    for problem in config.problems.load()["test"]:
        names: dict[str, object] = {}
        exec(problem.prompt + problem.canonical_solution + problem.test, names)
        names["check"](names[problem.entry_point])  # type: ignore[operator]
