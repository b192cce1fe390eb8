"""Recipes of the embedded base models, and their two steps: write demonstrations, train on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from statistics import fmean

from magrpo.embedded.conventions import Divisions
from magrpo.embedded.demonstrations import Example, Recipe, make_revisions
from magrpo.embedded.voices import Voices
from magrpo.embedded.warm_start import WarmStartConfig, train_base_model
from magrpo.envs import diagnosis, writing
from magrpo.envs.coding import CodingEnv
from magrpo.interfaces import Problems, Progress, SandboxPlugin
from magrpo.plugins import TABLES, build_plugin
from magrpo.rewards.coding import CodingReward
from magrpo.rewards.writing import WritingReward
from magrpo.sandboxes.none import NoSandbox
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.store import read_records, write_records
from magrpo.types import Problem

RECIPES: Mapping[str, tuple[Recipe, SandboxPlugin]] = {
    "coopcode": (
        Recipe(CodingEnv(prompt="bare", num_turns=2), CodingReward(), Divisions(), diagnosis.BARE_LINES),
        PoolSandbox(test_s=0.5, total_s=1.0),
    ),
    "notes": (
        Recipe(writing.WritingEnv(prompt="bare", num_turns=2), WritingReward(), Voices(), writing.BARE_LINES, 0.9),
        NoSandbox(),
    ),
}
"""The task to demonstrate, and the sandbox for its programs, by ``problems`` of the configuration."""
_SECOND_TURNS = "second_turns.jsonl.gz"
_NUM_RECENT_LOSSES = 100


def demonstrate_second_turns(folder: Path, config: WarmStartConfig) -> None:
    """Write examples of second turns to ``folder``. The sandbox runs the first turns: feedback depends on scores."""
    problems, number = _load_problems(config), config.num_revisions
    chosen = problems[:: max(1, len(problems) // number)][:number] if number else []
    recipe, plugin = RECIPES[config.problems]
    with closing(plugin.open()) as sandbox:
        examples = make_revisions(chosen, recipe, sandbox, config.seed)
    write_records(folder / _SECOND_TURNS, examples)


def train_on_demonstrations(folder: Path, config: WarmStartConfig, progress: Progress) -> float:
    """Train a base model on the examples in ``folder`` and save it, with its recipe, in ``folder/model``.

    Returns the mean loss of the last steps, in nats per completion token.
    """
    second_turns = read_records(folder / _SECOND_TURNS, Example)
    trained = train_base_model(_load_problems(config), second_turns, RECIPES[config.problems][0], config, progress)
    loss = fmean(trained.losses[-_NUM_RECENT_LOSSES:])
    trained.save(folder / "model")
    facts = {**config.model_dump(), "loss": round(loss, 4), "parameters": trained.model.num_parameters()}
    (folder / "model" / "recipe.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return loss


def _load_problems(config: WarmStartConfig) -> list[Problem]:
    problem_set: Problems = build_plugin(
        TABLES["problems"], {"kind": config.problems, "num_train": config.num_problems}
    )
    return list(problem_set.load()["train"])
