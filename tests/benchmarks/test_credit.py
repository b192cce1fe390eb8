from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from magrpo.config.sections import AlgoConfig
from magrpo.errors import ConfigError
from magrpo.types import Action, JointReward, Observation, Problem, Prompt, RolloutGroup, ScoredTurn
from tests.benchmarks.credit import NodeGradients, bench_credit, list_pairings, multiply_gradients
from tests.pipelines.micro import write_config
from tests.stages.crediting import credit_with

SIZE = 3


def node(worth: np.ndarray) -> RolloutGroup[ScoredTurn]:
    """A node whose joint actions, of two agents with ``SIZE`` completions each, are worth ``worth[i, j]``."""
    actions = {name: tuple(Action(name, "", (), (), "stop", 0) for _ in range(SIZE)) for name in ("a", "b")}
    picks = itertools.product(range(SIZE), repeat=2)
    turns = tuple(ScoredTurn({"a": i, "b": j}, JointReward(float(worth[i, j]), {}), {}) for i, j in picks)
    prompts = {name: Prompt(Observation(()), ()) for name in ("a", "b")}
    return RolloutGroup(Problem("t", ""), (), (), prompts, actions, turns)


def advantages(groups: list[RolloutGroup[ScoredTurn]], estimator: str) -> np.ndarray:
    """Those of agent ``a``, ``(N, G)``."""
    groups = [replace(group, problem=Problem(str(i), "")) for i, group in enumerate(groups)]
    samples, _ = credit_with(groups, AlgoConfig(estimator=estimator), ["a", "b"])
    return np.array([sample.advantage for sample in samples["a"]]).reshape(len(groups), -1)


def drawn(number: int, estimator: str) -> tuple[NodeGradients, list[np.ndarray]]:
    """Random problems: what the benchmark finds, and their gradients under crossed credit and as they were paired."""
    generator = np.random.default_rng(3)
    nodes, completions = [], []
    for _ in range(number):
        mine, partner = generator.normal(size=(2, SIZE))  # what completions are like; their gradients go with it
        nodes.append(node(mine[:, None] + 2 * partner + mine[:, None] * partner))
        completions.append(np.stack([mine, generator.normal(size=SIZE)], axis=1).astype(np.float32))  # (G, 2)
    crossed = advantages(nodes, estimator)
    aligned = np.stack([advantages(list(one), estimator) for one in zip(*map(list_pairings, nodes), strict=True)])
    found = multiply_gradients(crossed, aligned, completions)
    each = [
        np.stack([row @ g / SIZE for row, g in zip(rows, completions, strict=True)]) for rows in (crossed, aligned[0])
    ]
    return found, each


def test_pairings_hold_every_joint_action_once_and_equal_indices_first() -> None:
    found = [[tuple(turn.picks.values()) for turn in one.turns] for one in list_pairings(node(np.zeros((SIZE, SIZE))))]
    assert found[0] == [(0, 0), (1, 1), (2, 2)]
    assert sorted(itertools.chain(*found)) == [*itertools.product(range(SIZE), repeat=2)]
    assert all(sorted(i for i, _ in one) == sorted(j for _, j in one) == [0, 1, 2] for one in found)


@pytest.mark.parametrize("estimator", ["magrpo", "marloo"])
def test_crossed_credit_is_the_mean_of_aligned_and_varies_less(estimator: str) -> None:
    """Rao-Blackwell: in every sample of problems, by however few, and not only in expectation."""
    for number in (2, 5, 40):
        found, _ = drawn(number, estimator)
        np.testing.assert_allclose(found.aligned, found.crossed, rtol=1e-4, atol=1e-5)
        ratio = found.variance_ratio()
        assert ratio.low <= ratio.mean <= 1 + 1e-5
        assert ratio.high <= 1 + 1e-5


@pytest.mark.slow
def test_the_estimates_are_the_variances_of_many_problems() -> None:
    found, (crossed, paired) = drawn(4000, "magrpo")
    for mode, gradients in (("crossed", crossed), ("aligned", paired)):
        measured = float(gradients.var(axis=0, ddof=1).sum())
        assert found.estimate_variance(mode)[0] == pytest.approx(measured, rel=0.05), mode
        signal = float((gradients.mean(0) ** 2).sum())
        assert found.relative_noise(mode, 24) == pytest.approx(measured / 24 / signal, rel=0.15), mode
    ratio = found.variance_ratio()
    assert ratio.low < ratio.mean < ratio.high < 0.8, "partners' luck is half of what a return varies by here"


def test_noise_and_ratio_by_hand() -> None:
    # Gradients (1, 0) and (3, 0): mean (2, 0), variance 2, squared length 4 less 2 / 2 is 3; pairings add 1 to 2.
    products = np.array([[1.0, 3.0], [3.0, 9.0]])
    found = NodeGradients(products, products, np.array([1.0, 1.0]))
    assert (found.estimate_variance("crossed")[0], found.estimate_variance("aligned")[0]) == (2.0, 3.0)
    assert found.relative_noise("crossed", 1) == pytest.approx(2 / 3)
    assert found.relative_noise("aligned", 2) == pytest.approx(1 / 2)
    assert found.variance_ratio().mean == pytest.approx(2 / 3)
    opposite = np.array([[1.0, -1.0], [-1.0, 1.0]])
    assert NodeGradients(opposite, opposite, np.zeros(2)).relative_noise("crossed", 1) == float("inf")
    still = NodeGradients(np.zeros((2, 2)), np.zeros((2, 2)), np.zeros(2))
    assert still.variance_ratio().mean == 1.0, "where nothing varies nothing is gained"


def test_it_compares_the_same_completions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    assert bench_credit(config, batches=2) == 0
    said = capsys.readouterr().out
    rows = {
        line.split()[0]: line.split() for line in said.splitlines() if line.strip().startswith(("aligned", "cross"))
    }
    assert (rows["aligned"][1], rows["crossed"][1]) == ("16", "64")  # 2 batches, 2 problems, 4 or 4 x 4
    assert said.count("times that of aligned credit, over 4 problems") == 2
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mlflow.db"], "it leaves nothing"
    with pytest.raises(ConfigError, match="num_turns = 1"):
        bench_credit(config, "env.num_turns=2")
