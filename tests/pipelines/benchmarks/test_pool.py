"""The benchmark asks a server for the same completions on both ways; what it measures is not asserted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from magrpo.config.place import EnginePlace
from magrpo.engines.pool import PoolEngine
from pipelines.benchmarks import pool
from tests.engines.fake_vllm import KEY, FakeServer, write_weights
from tests.engines.test_pool import WEIGHTS, Lineup


def test_both_ways_ask_for_the_same_completions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake, lineup = FakeServer(), Lineup()
    place = EnginePlace(servers=(fake.url,))
    host: Any = SimpleNamespace(lineup=lineup, place=place, fleet=None, shares_gpus=False)
    engine = PoolEngine(host, {}, KEY)
    try:
        served = engine.serve(1, {agent: write_weights(tmp_path, agent, text) for agent, text in WEIGHTS.items()})
        requests: Any = pool.make_requests(lineup, 20, 3)  # type: ignore[arg-type]
        bodies = pool.encode_bodies(lineup, served, requests)  # type: ignore[arg-type]
        pairs = pool.time_by_turns(
            lambda: served.generate(requests), lambda: asyncio.run(pool.post_batch(fake.url, KEY, bodies)), 3
        )
        asked = [fake.served[start : start + 20] for start in range(0, len(fake.served), 20)]
    finally:
        engine.close()
        fake.close()
    assert len(pairs) == 3
    assert len(asked) == 8
    assert {tuple(sorted(batch)) for batch in asked} == {tuple(sorted(asked[0]))}
    pool.print_ratio(pairs, "20 completions of 3 tokens")
    assert "the target is at most 1.05" in capsys.readouterr().out
