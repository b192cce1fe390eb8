"""Mutated configurations, overrides and resolved configurations: each is accepted whole, or refused in short lines."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.config.validate import find_keys, validate_config
from magrpo.planning.sizes import estimate_work
from magrpo.run.config_diff import flatten_config
from magrpo.run.steps import steps
from magrpo.run.store import CONFIG, RunStore
from tests.fuzz.mutations import ODD_VALUES, count_outcomes, mutate_bytes, mutate_tree, with_counts

CONFIGS = sorted((Path(__file__).parents[2] / "pipelines" / "configs").glob("*.toml"))
TEXTS = [path.read_bytes() for path in CONFIGS]
TREES = [tomllib.loads(text.decode()) for text in TEXTS]
KEYS = [
    *("optim.lr", "train.num_iterations", "train.seed", "train.lag", "rollout.group_size", "rollout.tree"),
    *("env.num_turns", "rollout.crossed_pairs", "algo.importance_cap"),
    *("agents.0.name", "agents.1", "agents", "problems", "problems.kind", "reward.kind", "env.kind"),
    *("sandbox.kind", "sandbox.workers", "engine", "tracking.experiment", "root", "baselines.rows", "notify.urls"),
    *("registry.model", "eval.num_samples", "model.device", "lora.target_modules", "x", "", "."),
]


def inspect_config(config: RunConfig) -> None:
    """What commands do with a configuration before they load anything."""
    assert validate_config(RunConfig, json.loads(config.resolved(secrets=True)), (), "resolved") == config
    flatten_config(config)
    estimate_work(config)
    if config.train.num_iterations <= 1000 and config.env.num_turns <= 100:
        assert steps(config)


@with_counts
def test_files(tmp_path: Path, count: int) -> None:
    path = tmp_path / "run.toml"

    def use(rng: random.Random) -> None:
        path.write_bytes(mutate_bytes(rng.choice(TEXTS), rng))
        inspect_config(load_config(path))

    assert count_outcomes("configuration files", use, count).total() == count


@with_counts
def test_trees(count: int) -> None:
    def use(rng: random.Random) -> None:
        tree = mutate_tree(rng.choice(TREES), rng)
        inspect_config(validate_config(RunConfig, tree if isinstance(tree, dict) else {"x": tree}, (), "tree"))

    assert count_outcomes("configuration trees", use, count).total() == count


@with_counts
def test_overrides(count: int) -> None:
    def write_override(rng: random.Random) -> str:
        value = rng.choice(ODD_VALUES)
        text = value if isinstance(value, str) else json.dumps(value)
        key = rng.choice(KEYS) if rng.random() < 0.9 else str(rng.choice(ODD_VALUES))
        return f"{key}={text}" if rng.random() < 0.95 else text

    def use(rng: random.Random) -> None:
        inspect_config(load_config(rng.choice(CONFIGS), [write_override(rng) for _ in range(rng.randint(1, 3))]))

    assert count_outcomes("overrides", use, count).total() == count


@with_counts
def test_resolved_configurations(tmp_path: Path, count: int) -> None:
    resolved = [load_config(path).resolved(secrets=True) for path in CONFIGS]

    def use(rng: random.Random) -> None:
        data = rng.choice(resolved).encode()
        if rng.random() < 0.3:
            data = mutate_bytes(data, rng)
        else:
            data = json.dumps(mutate_tree(json.loads(data), rng)).encode()
        (tmp_path / CONFIG).write_bytes(data)
        inspect_config(RunStore(tmp_path, ".").config())

    assert count_outcomes("resolved configurations", use, count).total() == count


@pytest.mark.parametrize("name", [*map(str, ODD_VALUES)])
def test_a_key_is_looked_for_by_any_name(name: Any) -> None:
    assert isinstance(find_keys(name, RunConfig, {}), list)
