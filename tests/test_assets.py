from __future__ import annotations

from pathlib import Path

import pytest

from magrpo.assets import FOLDER, locate_model
from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.model.policy import Policy

BASES = ("coopcode-base", "writing-base")


@pytest.fixture(scope="module", params=BASES)
def policy(request: pytest.FixtureRequest) -> Policy:
    agent = AgentConfig(name="helper", role="helper", model=request.param)
    return Policy.open([agent], ModelConfig(device="cpu"), LoraConfig(), 0)


def test_a_shipped_model_is_found_by_name_and_no_other_name_is_touched() -> None:
    for base in BASES:
        assert Path(locate_model(base)) == FOLDER / base
    for other in ("Qwen/Qwen2.5-Coder-3B", "/tmp/coopcode-base", ".", "..", "coopcode", ""):
        assert locate_model(other) == other


def test_everything_shipped_is_at_most_7_mb() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.suffix != ".pyc") < 7_000_000


@pytest.mark.parametrize(
    "text",
    [
        "def aux(xs):\n    return [x for x in xs if x % 2 == 0]",
        "class A:\n\tdef __init__(self, a_b=1.5e-3):\n\t\tself.ü = '漢字\\n'  # 🙂\n\n\n",
        "  x\r\n \x00\x7f __ a  b ",
        "",
    ],
)
def test_the_shipped_tokenizer_gives_back_any_text(policy: Policy, text: str) -> None:
    tokenizer = policy.lineup.tokenizer("helper")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
