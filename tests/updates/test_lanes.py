"""Lanes: how work is dealt to ranks, and that the sum of their gradients depends on the number of lanes only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magrpo.config.sections import OptimConfig
from magrpo.types import Comparison
from magrpo.updates.lanes import LanePlan, add_in_pairs, deal_batches, put_gradient, take_gradient
from tests.updates.updating import assert_close, assert_equal, gradients_used, make, make_samples, weights_of


@pytest.mark.parametrize(("lanes", "agents"), [(1, 1), (1, 2), (4, 1), (4, 3), (8, 2)])
def test_every_lane_of_every_agent_has_one_rank_and_every_rank_as_many(lanes: int, agents: int) -> None:
    for ranks in (n for n in range(1, lanes * agents + 1) if lanes * agents % n == 0):
        plan = LanePlan.make(lanes, agents, ranks)
        units = [
            (agent, lane, rank)
            for rank in range(ranks)
            for agent in range(agents)
            for lane in plan.lanes_of(agent, rank)
        ]
        assert sorted(unit[:2] for unit in units) == [(agent, lane) for agent in range(agents) for lane in range(lanes)]
        assert {sum(unit[2] == rank for unit in units) for rank in range(ranks)} == {lanes * agents // ranks}
        for agent in range(agents):
            owners = plan.find_owners(agent)
            assert [lane for rank in owners for lane in plan.lanes_of(agent, rank)] == list(range(lanes))
            together = range(agent - agent % plan.agents_at_once, agent)
            assert not set(owners) & {rank for other in together for rank in plan.find_owners(other)}


def test_lanes_are_split_before_agents() -> None:
    assert LanePlan.make(4, 2, 4) == LanePlan(4, num_blocks=4, agents_at_once=1)
    assert LanePlan.make(1, 2, 2) == LanePlan(1, num_blocks=1, agents_at_once=2)
    assert LanePlan.make(2, 2, 4) == LanePlan(2, num_blocks=2, agents_at_once=2)


@pytest.mark.parametrize("value", [0, 3, 12])
def test_lanes_are_a_power_of_two(value: int) -> None:
    with pytest.raises(ValueError, match="lanes"):
        OptimConfig(lanes=value)


def test_batches_go_to_the_lane_with_the_least_work() -> None:
    assert deal_batches([5, 4, 3, 3, 1], 2) == [[0, 3], [1, 2, 4]]
    assert deal_batches([5, 4, 3], 1) == [[0, 1, 2]]
    assert deal_batches([5], 4) == [[0], [], [], []]


@pytest.mark.parametrize("branches", [1, 2, 4, 8])
def test_sums_of_branches_are_the_sum_of_all(branches: int) -> None:
    vectors = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    whole = add_in_pairs(iter(vectors.clone()))
    parts = [add_in_pairs(iter(part)) for part in vectors.clone().chunk(branches)]
    assert torch.equal(add_in_pairs(parts), whole)


def test_parameters_without_gradient_have_none_afterwards() -> None:
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))]
    parameters[0].grad = torch.arange(6.0).view(2, 3)
    vector = take_gradient(parameters)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 1, 0]
    assert parameters[0].grad is None
    put_gradient(vector, parameters)
    assert torch.equal(parameters[0].grad, torch.arange(6.0).view(2, 3))
    assert parameters[1].grad is None


@pytest.mark.parametrize("weights", ["lora", "full"])
@pytest.mark.parametrize("algo", [{}, {"update_epochs": 2, "beta": 0.1}])
def test_lanes_change_rounding_alone(base: Path, dump: Path, weights: str, algo: dict[str, Any]) -> None:
    one, four = (make(base, dump, weights, algo=algo, lanes=lanes, micro_batch_tokens=60) for lanes in (1, 4))
    for theirs, ours in zip(gradients_used(one, make_samples()), gradients_used(four, make_samples()), strict=True):
        assert_close(ours, theirs)
    few = make_samples(groups=1, size=2)  # fewer micro-batches than lanes
    for theirs, ours in zip(gradients_used(one, few), gradients_used(four, few), strict=True):
        assert_close(ours, theirs)


class ThreadRanks:
    """Ranks as threads that meet at barriers, for tests of one process."""

    def __init__(self, number: int, posts: list[Any], barrier: Barrier) -> None:
        self.number, self.count = number, len(posts)
        self._posts, self._barrier = posts, barrier

    def _exchange(self, value: Any) -> list[Any]:
        self._barrier.wait(300)
        self._posts[self.number] = value
        self._barrier.wait(300)
        return list(self._posts)

    def all_agree(self, flag: bool) -> bool:
        return all(self._exchange(flag))

    def wait_for_all(self) -> None:
        self._exchange(None)

    def fill_in(self, table: Tensor) -> Tensor:
        return torch.stack(self._exchange(table.clone())).sum(0)

    def add_branches(self, branch: Tensor | None, owners: Sequence[int], size: int) -> Tensor:
        branches = self._exchange(branch)
        assert all((branches[rank] is not None) == (rank in owners) for rank in range(self.count))
        assert all(len(branches[rank]) == size for rank in owners)
        return add_in_pairs([branches[rank].clone() for rank in owners])


@pytest.mark.parametrize(
    ("lanes", "count", "algo"),
    [
        (1, 2, {}),
        (2, 2, {}),
        (2, 4, {}),
        (2, 4, {"update_epochs": 2, "beta": 0.1}),
        (2, 4, {"update_epochs": 2, "ratio": "sequence", "loss_norm": "sequence_mean"}),
        (2, 2, {"update_epochs": 2, "loss": "madpo"}),
        (2, 4, {"update_epochs": 2, "loss": "madpo"}),
    ],
)
def test_ranks_take_the_steps_of_one_process(
    base: Path, dump: Path, lanes: int, count: int, algo: dict[str, Any]
) -> None:
    """Without options a rank runs out of memory: all of them halve their micro-batches.

    Of four ranks, two share the lanes of an agent while two compute the other agent; two ranks share the lanes of one
    agent after another, or have an agent each.
    """
    agents = ("helper", "main")
    options: dict[str, Any] = {"algo": algo, "agents": agents, "lanes": lanes}
    samples = [{agent: make_samples(2 * i + k) for k, agent in enumerate(agents)} for i in range(2)]
    groups = [range(start, start + 4) for start in (0, 4, 8)]
    comparisons = [Comparison((3.0, 1.0, 2.0, 1.0), dict.fromkeys(agents, tuple(group))) for group in groups]
    alone = make(base, dump, micro_batch_tokens=30, **options)
    expected = [alone.update(batch, None, comparisons) for batch in samples]
    runs_out = not algo
    metrics: list[list[dict[str, float]]] = [[] for _ in range(count)]
    reported: list[int] = []
    posts, barrier = [None] * count, Barrier(count)
    tokens = 60 if runs_out else 30
    updaters = [
        make(base, dump, micro_batch_tokens=tokens, ranks=ThreadRanks(number, posts, barrier), **options)
        for number in range(count)
    ]

    def work(number: int) -> None:
        try:
            for batch in samples:
                metrics[number].append(updaters[number].update(batch, reported.append, comparisons))
        except BaseException:
            barrier.abort()
            raise

    if runs_out:
        _run_out_of_memory_once(updaters[-1].gradients)
    threads = [Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics == [expected] * count
    for updater in updaters:
        for agent in agents:
            assert_equal(weights_of(updater, agent), weights_of(alone, agent))
    if not runs_out:
        assert sum(reported) == sum(len(of_agent) for batch in samples for of_agent in batch.values())


def _run_out_of_memory_once(gradients: Any) -> None:
    """Let the first call of ``gradients.compute_loss`` fail as on a full GPU, and all later ones work as before."""
    compute, calls = gradients.compute_loss, 0

    def fail_first(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return compute(*arguments)

    gradients.compute_loss = fail_first
