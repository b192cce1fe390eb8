"""How the tests are shared among the workers of ``pytest -n``: in units, each on one worker, the longest first.

A unit is a module, so that fixtures of a module are made once; a few modules are split, a few belong together.
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
    # Two Ray clusters that start on one machine at once may not find their nodes.
    "tests/cluster/test_connection.py": "ray",
    "tests/cluster/test_dealing.py": "ray",
    "tests/cluster/test_jails.py": "ray",
    "tests/cluster/test_ranks.py": "ray",
    "tests/cluster/test_samplers.py": "ray",
    "tests/training/test_places.py": "ray",
}
"""Modules that must not run side by side, and the name of their unit."""

SPLIT = (
    "tests/algo/test_stats.py",
    "tests/pipelines/flows/test_kills.py",
    "tests/training/test_embedded.py",
    "tests/training/test_gate.py",
    "tests/stages/test_exact_game.py",
    "tests/tracking/test_mlflow.py",
)
"""Modules whose tests have nothing expensive in common: each test is a unit."""

SLOW = (
    "tests/training/test_embedded.py::test_two_agents_learn",
    "tests/test_newcomer.py",
    "tests/test_wheel.py",
    "tests/pipelines/flows/test_kills.py",
    "ray",
    "servers",
    "tests/engines/test_families.py",
    "tests/test_published.py",
    "tests/infra/test_images.py",
    "tests/training/test_resume_lag.py",
    "tests/training/test_embedded.py::test_two_authors_learn",
    "tests/gateway/test_clients.py",
    "tests/gateway/test_environments.py",
    "tests/problems/test_reasoning_gym.py",
    "tests/training/test_embedded.py::test_vllm",
    "tests/engines/test_vllm.py",
    "tests/contracts/test_engines.py",
    "tests/training/test_embedded.py::test_the_triton_kernel",
    "tests/sandbox/test_corpora.py",
    "tests/sandbox/test_pool.py",
    "tests/stages/test_exact_game.py",
)
"""How units of slow tests begin, the most valuable first: continuous integration may run out of time."""

SECONDS = {
    "ray": 120,
    "tests/pipelines/flows/test_train.py": 125,
    "tests/training/test_resume.py": 90,
    "tests/engines/test_vllm.py": 80,
    "tests/engines/test_families.py": 12,
    "hostile": 90,
    "tests/contracts/test_engines.py": 52,
    "tests/test_notebook.py": 42,
    "tests/problems/test_coopcode.py": 40,
    "tests/kernels/test_offline_compile.py": 25,
    "tests/training/test_from_stage.py": 28,
    "tests/progress/test_notify.py": 28,
    "tests/export/test_agents_folder.py": 45,
    "tests/export/test_forms.py": 25,
    "tests/pipelines/commands/test_dry_run.py": 26,
    "tests/pipelines/flows/test_proxies.py": 25,
    "tests/training/test_champion.py": 24,
    "tests/experiments/test_baselines.py": 24,
    "tests/test_tutorial.py": 24,
    "tests/pipelines/commands/test_compare.py": 30,
    "tests/pipelines/flows/test_kills.py": 20,
    "tests/training/test_resume_lag.py": 16,
    "tests/training/test_writing.py": 24,
    "tests/fuzz/test_run_directories.py": 16,
    "tests/pipelines/commands/test_ask.py": 14,
    "tests/pipelines/commands/test_show.py": 14,
    "tests/asking/test_answers.py": 14,
    "tests/kernels/test_triton.py": 16,
    "tests/rewards/test_coding.py": 16,
    "tests/reports/test_browser.py": 22,
    "tests/stages/test_exact_game.py": 15,
    "tests/training/test_variants.py": 15,
    "tests/training/test_roles.py": 15,
    "tests/benchmarks/test_credit.py": 15,
    "tests/stages/test_update.py": 14,
    "tests/sandbox/test_pool.py": 14,
    "tests/kernels/test_operations.py": 14,
    "tests/training/test_one_iteration.py": 14,
    "tests/contracts/test_sandboxes.py": 12,
    "tests/training/test_shift.py": 12,
    "tests/pipelines/commands/test_sync.py": 11,
    "tests/sandbox/test_honest.py": 11,
    "tests/experiments/test_sweep.py": 10,
}
"""About how long units take, or each test of a module that is split. A wrong figure costs time, nothing else."""


def unit_of(nodeid: str) -> str:
    """The unit of a test."""
    module = nodeid.partition("::")[0]
    return nodeid if module in SPLIT else TOGETHER.get(module, module)


def sort_items(items: list[pytest.Item]) -> None:
    """Put slow tests into the order of their value, and the longest units of the others first."""

    def order(item: pytest.Item) -> int:
        unit = unit_of(item.nodeid)
        if item.get_closest_marker("slow"):
            return next((i for i, start in enumerate(SLOW) if unit.startswith(start)), len(SLOW))
        return -SECONDS.get(unit.partition("::")[0], 0)

    items.sort(key=order)


class Units(LoadScopeScheduling):
    """Gives units to workers, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
