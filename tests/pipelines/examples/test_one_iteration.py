"""The example on one page runs, trains every agent, and repeats bit for bit."""

from __future__ import annotations

import pytest

from pipelines.examples.one_iteration import main

TINY = ["rollout.problems_per_iteration=2", "rollout.group_size=4", "rollout.max_new_tokens=24", "lora.rank=2"]


def test_one_iteration_changes_the_weights_of_both_agents(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = main(TINY)
    shown = capsys.readouterr().out
    assert f"mean joint reward {metrics['reward/joint']:.3f}" in shown
    for agent in ("helper", "main"):
        assert metrics[f"update/{agent}/grad_norm"] > 0
        assert f"{agent}: groups without signal" in shown
    assert main(TINY) == metrics
