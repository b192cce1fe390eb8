"""The reward that a program returns."""

from __future__ import annotations

from pathlib import Path

from magrpo.config.run import load_config
from magrpo.rewards.returned import ReturnedReward

CONFIG = Path(__file__).parents[2] / "pipelines" / "configs" / "embedded_program.toml"


def test_a_number_needs_no_configuration() -> None:
    reward = load_config(CONFIG, ["reward={kind='returned'}", "env.writes=[]"]).reward
    assert isinstance(reward, ReturnedReward)
    assert reward.read_returned(0.25, ["helper", "main"]).total == 0.25
    assert reward.read_returned({"reward": 0.25, "local": {"main": 1}}, ["main"]).local == {"main": 1.0}
