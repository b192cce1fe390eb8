"""The sandbox over nodes of a cluster: the reports of a pool on this machine, whatever happens to a node."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from magrpo.checks.runners import open_sandbox
from magrpo.cluster.connection import Cluster
from magrpo.cluster.dealing import NotOpen
from magrpo.cluster.jails import ClusterSandbox, Jails
from magrpo.errors import ConfigError
from magrpo.sandboxes import SandboxDied
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.types import Execution
from tests.processes import assert_all_end, find_actors, wait_until

PLUGIN = PoolSandbox(workers=2)


def make_execution(number: int, source: str = "def f(n):\n    return n + {}\n") -> Execution:
    return Execution(source.format(number), "f", f"assert f(1) == {1 + number // 2 * 2}")


@pytest.fixture(scope="module")
def sandbox(cluster: Cluster) -> Iterator[ClusterSandbox]:
    sandbox = ClusterSandbox(cluster, PLUGIN, 1)
    yield sandbox
    sandbox.close()
    sandbox.close()
    wait_until(lambda: not find_actors("Jails"))  # nor those of a sandbox that was refused


def test_the_reports_are_those_of_this_machine(sandbox: ClusterSandbox) -> None:
    executions = [make_execution(number) for number in (*range(20), 3, 3)]
    reported = list[int]()
    here = open_sandbox(PLUGIN)
    try:
        expected = here.run(executions)
        assert sandbox.level == here.level
    finally:
        here.close()
    reports = sandbox.run(executions, reported.append)
    assert [report.status for report in reports] == [report.status for report in expected]
    assert {report.status for report in reports} == {"pass", "wrong"}
    assert sum(reported) == len(executions)


def test_a_node_that_dies_changes_no_report_and_leaves_no_process(sandbox: ClusterSandbox) -> None:
    family = [process for actor in find_actors("Jails") for process in (actor, *actor.children(recursive=True))]
    assert len(family) > 1, "the actor and its jails"
    killed = list[int]()

    def kill_node(_: int) -> None:
        if not killed:
            killed.append(find_actors("Jails")[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    slow = "import time\ndef f(n):\n    time.sleep(0.05)\n    return n + {}\n"
    reports = sandbox.run([make_execution(number, slow) for number in range(64)], kill_node)
    assert killed
    assert_all_end(family)
    assert [report.status for report in reports] == ["pass", "wrong"] * 32


def test_jails_that_died_are_replaced_when_they_are_opened_again() -> None:
    jails = Jails(PLUGIN)
    jails.open()
    assert jails._pool is not None
    jails._pool.close()
    with pytest.raises(SandboxDied):
        jails.work([make_execution(0)])
    with pytest.raises(NotOpen):
        jails.work([make_execution(0)])
    jails.open()
    assert jails.work([make_execution(0)])[0].status == "pass"
    jails._pool.close()


def test_an_unusable_sandbox_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"sandbox.packages"):
        ClusterSandbox(cluster, PoolSandbox(packages=("no-such-package",)), 1)
