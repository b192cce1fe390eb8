"""``magrpo bench scale``: the measured iteration of a run, and the constants that make the model agree with it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from magrpo.config import load_config
from magrpo.place import Place
from magrpo.planning.throughput import Machines, Workload, load_rates, rollout_s, update_s
from pipelines.benchmarks.scale import fit_rates, format_rates, measure_run
from tests.pipelines.micro import run_locally, write_config


def test_measured_constants_make_the_model_agree(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, iterations=2))
    store, _, _ = run_locally(config)
    measured = measure_run(store, cpu_s=3.0)
    metrics = {stage: values for i, stage, values in store.stage_metrics() if i == 2}
    assert measured.seconds["rollout"] == metrics["rollout.0"]["time/rollout_s"]
    assert measured.seconds["update"] == metrics["update"]["time/update_s"]
    assert measured.tokens == metrics["rollout.0"]["rollout/tokens"]
    every = sum(
        values["rollout/tokens"] / values["rollout/response_tokens"]
        for _, stage, values in store.stage_metrics()
        if stage == "rollout.0"
    )
    assert measured.cpu_s == pytest.approx(3.0 / every)
    assert measured.period_s > 0

    rates = fit_rates(config, Place(), measured, load_rates(tmp_path))
    load = Workload.of(config)
    machines = Machines.of(Place(), load.num_bases)
    assert rollout_s(load, machines, rates) == pytest.approx(measured.seconds["rollout"])
    assert update_s(load, machines, rates) == pytest.approx(measured.seconds["update"])
    assert "measured by magrpo bench scale" in rates.source
    (tmp_path / "rates.toml").write_text(format_rates(rates))
    assert tomllib.loads(format_rates(rates))["source"] == rates.source
    assert load_rates(tmp_path) == rates
