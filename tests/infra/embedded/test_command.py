"""``python -m infra.embedded``, at a size of seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.embedded.command import main
from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.model.policy import Policy

TINY = ["num_problems=64", "num_revisions=2", "num_steps=3", "hidden_size=32", "intermediate_size=32", "num_layers=1"]


@pytest.mark.parametrize(("problems", "role", "text"), [("coopcode", "helper", "def aux"), ("notes", "summary", "I")])
def test_a_base_that_agents_can_be_opened_on(tmp_path: Path, problems: str, role: str, text: str) -> None:
    base = tmp_path / "bases" / "mine"
    assert main(["--output", str(base), f"problems={problems}", *TINY]) == 0
    recipe = json.loads((base / "recipe.json").read_text())
    assert (recipe["problems"], recipe["num_steps"], recipe["seed"]) == (problems, 3, 0)
    agent = AgentConfig(name=role, role=role, model=str(base))
    policy = Policy.open([agent], ModelConfig(device="cpu"), LoraConfig(rank=2), 0)
    assert len(policy.lineup.tokenizer(role).encode(text)) == len(text.split())
    assert [path.name for path in base.parent.iterdir()] == ["mine"], "nothing is left behind"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["num_step=3"], "num_step: unknown key; did you mean 'num_steps'"),
        (["num_steps=many"], "num_steps: Input should be a valid integer"),
        (["num_steps"], "'num_steps': an override is written key=value"),
        ([], "already exists; remove it, or choose another --output"),
    ],
)
def test_a_mistake_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["--output", str(tmp_path), *arguments]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert len(errors.splitlines()) == 1
