"""``magrpo bench scale``: the measured iteration of a run, and the constants that make the model agree with it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from magrpo.config.place import Place
from magrpo.config.run import load_config
from magrpo.planning.throughput import Machines, Workload, load_rates, rollout_s, update_s
from pipelines.benchmarks.scale import Measured, describe_ratio, fit_rates, format_rates, measure_run
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
    assert measured.periods_s == pytest.approx((measured.period_s,))
    both = Measured.merge([measured, replace(measured, cpu_s=0.0)])
    assert both.cpu_s == pytest.approx(measured.cpu_s / 2)
    assert both.periods_s == measured.periods_s * 2

    rates = fit_rates(config, Place(), measured, load_rates(tmp_path))
    load = Workload.of(config)
    machines = Machines.of(Place(), load.num_bases)
    assert rollout_s(load, machines, rates) == pytest.approx(measured.seconds["rollout"])
    assert update_s(load, machines, rates) == pytest.approx(measured.seconds["update"])
    assert "measured by magrpo bench scale" in rates.source
    (tmp_path / "rates.toml").write_text(format_rates(rates))
    assert tomllib.loads(format_rates(rates))["source"] == rates.source
    assert load_rates(tmp_path) == rates


def test_iterations_are_compared_in_pairs() -> None:
    alone = Measured({}, 2.0, 1.0, 1.0, 0.0, (1.0, 2.0, 3.0))
    shown = describe_ratio(replace(alone, period_s=2.2, periods_s=(1.1, 2.2, 3.3)), alone)
    assert "2.200 s at the place, 2.000 s in one process; ratio 1.10 (95 % interval 1.10 to 1.10, 3 pairs" in shown
