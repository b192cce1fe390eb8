"""The example on one page runs and trains every agent; ``tests/gateway/test_equal_results.py`` repeats it."""

from __future__ import annotations

import pytest

from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.training.one_iteration import CONFIG, run_once

TINY = [
    "engine.kind=transformers",
    "rollout.problems_per_iteration=2",
    "rollout.group_size=4",
    "rollout.max_new_tokens=24",
    "lora.rank=2",
]


def test_one_iteration_changes_the_weights_of_both_agents(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(CONFIG, TINY)
    metrics = run_once(config).metrics
    shown = capsys.readouterr().out
    assert f"mean joint reward {metrics['reward/joint']:.3f}" in shown
    for agent in ("helper", "main"):
        assert metrics[f"update/{agent}/grad_norm"] > 0
        assert f"{agent}: groups without signal" in shown


@pytest.mark.parametrize(
    ("change", "name"),
    [("algo.estimator=iac", "critics"), ("algo.loss=madpo", "MADPO"), ("rollout.probe_size=2", "probes")],
)
def test_what_the_page_leaves_out_is_refused(change: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"leaves out {name}: run `magrpo train`"):
        run_once(load_config(CONFIG, [*TINY, change]))
