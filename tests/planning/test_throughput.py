"""The model of throughput: examples worked out by hand, its properties, and the page that shows its curve.

``python -m tests.planning.test_throughput`` writes the curve and the keys of places into docs/scale.md.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.config.place import Place
from magrpo.config.run import load_config
from magrpo.planning.starts import count_bases
from magrpo.planning.throughput import (
    Forecast,
    Machines,
    Rates,
    Workload,
    decode_step_s,
    forecast_run,
    load_rates,
    rank_memory,
    rollout_s,
    server_memory,
    serving_s,
    update_s,
)
from magrpo.plugins import ConfigError
from pipelines.arguments import locate_config
from pipelines.commands.config_help import format_place_help

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
ROUND = Rates(
    source="round numbers",
    update_flops=1e12,
    decode_flops=1e12,
    bandwidth=1e9,
    memory_bytes=1e10,
    step_s=0.5,
    handover_s=2.0,
    switch_s=1.0,
    programs_per_s=10.0,
    driver_s_per_token=0.001,
    prompt_tokens=100.0,
    length_frac=0.5,
    dollars_per_gpu_hour=3.6,
)
WORK = Workload(
    completions=64, max_tokens=200, group_size=4, parameters=1e9, dtype_bytes=2, cache_bytes=1e6, programs=20
)
BOX = Machines(servers=2, gpus_per_server=1, ranks=4, max_batch=16, shared=True)


def test_a_decoding_step_reads_weights_and_cache() -> None:
    # 0.5 s + (1e9 x 2 + 16 completions x 200 tokens x 1e6) bytes / 1e9
    assert decode_step_s(WORK, BOX, 16, ROUND) == pytest.approx(0.5 + 2.0 + 3.2)
    assert decode_step_s(WORK, replace(BOX, gpus_per_server=2), 16, ROUND) == pytest.approx(0.5 + (2.0 + 3.2) / 2)
    quick = ROUND.model_copy(update={"bandwidth": 1e15, "decode_flops": 1e10})
    assert decode_step_s(WORK, BOX, 16, quick) == pytest.approx(0.5 + 2e9 * 16 / 1e10)


def test_a_rollout_takes_as_long_as_its_longest_completion() -> None:
    # Two servers, 32 completions each, 16 at once: their mean lengths fill 32 x 0.5 / 16 = 1 wave of 200 steps.
    prefill = 2 * 1e9 * (64 / 4 * 100) / (2 * 1e12)
    assert rollout_s(WORK, BOX, ROUND) == pytest.approx(prefill + 200 * 5.7)
    twice = replace(WORK, completions=128)
    assert rollout_s(twice, BOX, ROUND) == pytest.approx(2 * prefill + 2 * 200 * 5.7)


def test_an_update_computes_four_or_six_operations_for_each_parameter_and_token() -> None:
    tokens = 64 * 200 * 0.5 + 64 / 4 * 100
    assert update_s(WORK, BOX, ROUND) == pytest.approx(4e9 * tokens / 4e12)
    assert update_s(replace(WORK, full_weights=True), BOX, ROUND) == pytest.approx(6e9 * tokens / 4e12)


def test_without_a_lag_the_parts_follow_each_other() -> None:
    forecast = forecast_run(WORK, BOX, ROUND)
    assert forecast.seconds["score"] == pytest.approx(2.0)
    assert forecast.seconds["driver"] == pytest.approx(6.4)
    assert forecast.seconds["handover"] == pytest.approx(3.0)
    assert forecast.period_s == pytest.approx(sum(forecast.seconds.values()))
    assert forecast.gpus == 4
    assert forecast.dollars_per_million == pytest.approx(4 * 0.001 / forecast.tokens_per_s * 1e6)


def test_the_driver_is_the_ceiling() -> None:
    slow = ROUND.model_copy(update={"driver_s_per_token": 10.0})
    forecast = forecast_run(WORK, replace(BOX, shared=False), slow, lag=2)
    assert forecast.bottleneck == "driver"
    assert forecast.tokens_per_s == pytest.approx(0.1)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 2))
def test_more_machines_are_never_slower(servers: int, ranks: int, lag: int) -> None:
    machines = Machines(servers, 1, ranks, 16, shared=False)
    one = forecast_run(WORK, machines, ROUND, lag)
    more = forecast_run(WORK, replace(machines, ranks=ranks + 1), ROUND, lag)
    assert more.tokens_per_s >= one.tokens_per_s
    assert one.period_s >= serving_s(WORK, machines, ROUND, lag) * (lag > 0)
    assert 0 < one.updating_frac <= 1


def test_machines_of_places() -> None:
    both = {"engine": {"servers": 8}, "update": {"ranks": 8}}
    assert Machines.of(Place(), 1).gpus == 1
    assert Machines.of(Place.model_validate(both), 1).gpus == 16
    assert Machines.of(Place.model_validate({**both, "update": {"ranks": 8, "colocate": True}}), 1).gpus == 8
    assert (
        Machines.of(Place.model_validate({"engine": {"servers": 2, "gpus": 2}, "update": {"ranks": 4}}), 2).gpus == 12
    )


def test_memory_of_servers_and_ranks() -> None:
    assert server_memory(WORK, BOX, ROUND) == pytest.approx(2e9 + 16 * 200 * 1e6)
    config = load_config(locate_config("embedded"))
    assert rank_memory(config, 4) > rank_memory(config, 2) > 0
    assert rank_memory(config, 4) > rank_memory(config, 4, num_shards=4) > rank_memory(config, 4) / 4
    assert count_bases(config) == 1


def test_measured_constants_replace_those_that_ship(tmp_path: Path) -> None:
    assert "ESTIMATE" in load_rates(tmp_path).source
    (tmp_path / "rates.toml").write_text("update_flops = 0\n")
    with pytest.raises(ConfigError, match=r"rates\.toml: update_flops"):
        load_rates(tmp_path)


MODELS = {
    "3B, 512 tokens": Workload(16384, 512, 8, 3.1e9, 2, 36_864, 16384),
    "7B, 3,000 tokens": Workload(16384, 3000, 8, 7.6e9, 2, 57_344, 16384),
}


def best_forecast(load: Workload, gpus: int, rates: Rates, lag: int, max_batch: int = 256) -> Forecast:
    """The fastest use of ``gpus`` GPUs: by turns at lag 0, else the best split into servers and ranks."""
    if lag == 0 or gpus == 1:
        return forecast_run(load, Machines(gpus, 1, gpus, max_batch, shared=True), rates)
    splits = {max(1, min(gpus - 1, round(gpus * share / 32))) for share in range(1, 32)}
    every = [
        forecast_run(load, Machines(servers, 1, gpus - servers, max_batch, shared=False), rates, lag)
        for servers in splits
    ]
    return max(every, key=lambda forecast: forecast.tokens_per_s)


def format_curve() -> str:
    """The table of docs/scale.md."""
    rates = load_rates(Path("/nonexistent"))
    heads = [f"{name}: {when}" for name in MODELS for when in ("by turns", "lag 1", "lag 2")]
    lines = [f"| GPUs | {' | '.join(heads)} | limit at lag 2 |", "|---" * (len(heads) + 2) + "|"]
    for gpus in (1, 8, 64, 256, 1024):
        forecasts = [best_forecast(load, gpus, rates, lag) for load in MODELS.values() for lag in (0, 1, 2)]
        cells = [f"{f.tokens_per_s / 1000:.0f}, ${f.dollars_per_million:.2f}" for f in forecasts]
        lines.append(f"| {gpus:,} | {' | '.join(cells)} | {forecasts[2].bottleneck}; {forecasts[5].bottleneck} |")
    return "\n".join(lines)


def current_page(text: str) -> str:
    """docs/scale.md with its generated parts renewed."""
    text = re.sub(r"(?<=\n\n)\| GPUs \|.*?(?=\n\n)", lambda _: format_curve(), text, flags=re.DOTALL)
    return re.sub(r"Keys of a place.*?(?=\n```)", lambda _: format_place_help(), text, flags=re.DOTALL)


def test_the_page_has_the_curve_and_the_keys() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert format_curve() in text, "run `python -m tests.planning.test_throughput`"
    assert format_place_help() in text, "run `python -m tests.planning.test_throughput`"


if __name__ == "__main__":
    PAGE.write_text(current_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
