"""How the tests are shared among the workers of ``pytest -n``: in units, each on one worker, the longest first.

A unit is a module, so that fixtures of a module are made once; a few modules are split, a few belong together. A unit
that is missing from these lists costs time, nothing else.
"""

from __future__ import annotations

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

TOGETHER = {
    # Both look at the machine's System V objects; one of them makes some.
    "tests/sandbox/test_hostile.py": "hostile",
    "tests/sandbox/test_levels.py": "hostile",
    # Each is several servers and runs at once.
    "tests/infra/test_paths.py": "servers",
    "tests/infra/test_servers.py": "servers",
    "tests/pipelines/flows/test_outages.py": "servers",
    "tests/pipelines/flows/test_schedule.py": "servers",
    # Their commands are forked from one process, which takes ten seconds to load the libraries.
    "tests/pipelines/flows/test_train.py": "forked",
    "tests/process/test_signals.py": "forked",
    "tests/progress/test_notify.py": "forked",
    "tests/training/test_resume.py": "forked",
    "tests/training/test_resume_lag.py": "forked",
    # Two Ray clusters that start on one machine at once may not find their nodes.
    "tests/cluster/test_connection.py": "ray",
    "tests/cluster/test_dealing.py": "ray",
    "tests/cluster/test_jails.py": "ray",
    "tests/cluster/test_ranks.py": "ray",
    "tests/cluster/test_samplers.py": "ray",
    "tests/training/test_places.py": "ray",
}
"""Modules that one worker runs one after another, and the name of their unit. The comments say why."""

SPLIT = ("tests/stages/test_exact_game.py", "tests/training/test_embedded.py")
"""Modules whose tests have nothing expensive in common: each test is a unit."""

SLOW = (
    "tests/training/test_embedded.py::test_two_agents_learn",
    "tests/test_newcomer.py",
    "tests/experiments/test_study.py",
    "tests/test_wheel.py",
    "tests/pipelines/flows/test_kills.py",
    "ray",
    "servers",
    "tests/engines/test_families.py",
    "tests/test_published.py",
    "tests/test_notebook.py",
    "tests/infra/test_images.py",
    "forked",
    "tests/training/test_embedded.py::test_two_authors_learn",
    "tests/gateway/test_clients.py",
    "tests/gateway/test_environments.py",
    "tests/problems/test_reasoning_gym.py",
    "tests/training/test_embedded.py::test_vllm",
    "tests/engines/test_vllm.py",
    "tests/gateway/test_equal_results.py",
    "tests/gateway/test_vllm.py",
    "tests/contracts/test_engines.py",
    "tests/training/test_embedded.py::test_the_triton_kernel",
    "tests/sandbox/test_corpora.py",
    "tests/sandbox/test_pool.py",
    "tests/stages/test_exact_game.py",
)
"""How units of slow tests begin, the most valuable first: continuous integration may run out of time."""

LONG = (
    "forked",
    "ray",
    "hostile",
    "tests/contracts/test_engines.py",
    "tests/engines/test_vllm.py",
    "tests/sandbox/test_packages.py",
    "tests/sandbox/test_pool.py",
    "tests/sandbox/test_batches.py",
    "tests/sandbox/test_confinement.py",
    "tests/experiments/test_baselines.py",
    "tests/training/test_champion.py",
    "tests/training/test_writing.py",
    "tests/test_tutorial.py",
    "tests/stages/test_exact_game.py",
    "tests/stages/test_episode_credit.py",
    "tests/tracking/test_mlflow.py",
    "tests/export/test_agents_folder.py",
    "tests/reports/test_browser.py",
    "tests/kernels/test_offline_compile.py",
    "tests/kernels/test_triton.py",
)
"""Units of quick tests to begin with, the longest first, so that no worker is left with a long one at the end."""


def unit_of(nodeid: str) -> str:
    """The unit of a test."""
    module = nodeid.partition("::")[0]
    return nodeid if module in SPLIT else TOGETHER.get(module, module)


def sort_items(items: list[pytest.Item]) -> None:
    """Put slow tests into the order of their value, and the longest units of the others first."""

    def order(item: pytest.Item) -> int:
        unit = unit_of(item.nodeid)
        first = SLOW if item.get_closest_marker("slow") else LONG
        return next((i for i, start in enumerate(first) if unit.startswith(start)), len(first))

    items.sort(key=order)


class Units(LoadScopeScheduling):
    """Gives units to workers, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
