"""Runs with checkpoints that were not trained: the weights of the second are those of the first, moved at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from magrpo.config.run import RunConfig, load_config
from magrpo.interfaces import ProblemsPlugin
from magrpo.model.policy import Policy
from magrpo.run.files import split_file
from magrpo.run.steps import Step
from magrpo.run.store import RunStore, write_records
from magrpo.types import Problem, Split
from tests.tiny import perturb

CONFIGS = Path(__file__).parents[2] / "pipelines" / "configs"
SMALL = ("problems.num_train=24", "problems.num_test=6")


def make_run(path: Path, root: Path, overrides: Sequence[str] = (), name: str = "run", scale: float = 0.01) -> RunStore:
    """A run of the configuration in ``path`` with its problems and the checkpoints 0 and 1."""
    config = load_config(path, [*overrides, f"root={root}"])
    store = RunStore.create(config, name)
    prepared = load_once(config.problems)

    def write_problems(folder: Path) -> dict[str, float]:
        for split, problems in prepared.items():
            write_records(folder / split_file(split), problems)
        return {}

    store.commit(Step("prepare", 0).output, "key", write_problems)
    policy = open_policy(config)

    def write_weights(folder: Path) -> dict[str, float]:
        policy.save(folder / "weights")
        return {}

    for iteration in (0, 1):
        store.commit(Step("update", iteration).output, "key", write_weights)
        perturb(policy, seed=1, scale=scale)
    return store


@cache
def load_once(problems: ProblemsPlugin) -> Mapping[Split, Sequence[Problem]]:
    return problems.load()


def open_policy(config: RunConfig) -> Policy:
    return Policy.open(config.agents, config.model, config.lora, config.train.seed)
