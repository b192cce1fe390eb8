"""What the example on one page refuses; ``tests/gateway/test_equal_results.py`` runs it."""

from __future__ import annotations

import pytest

from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.training.one_iteration import CONFIG, run_once


@pytest.mark.parametrize(
    ("change", "name"),
    [("algo.estimator=iac", "critics"), ("algo.loss=madpo", "MADPO"), ("rollout.probe_size=2", "probes")],
)
def test_what_the_page_leaves_out_is_refused(change: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"leaves out {name}: run `magrpo train`"):
        run_once(load_config(CONFIG, ["engine.kind=transformers", change]))
