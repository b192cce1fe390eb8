"""A jail's memory cgroup, where this machine gives one: the kernel's limit holds where the tester looks too seldom."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from magrpo.sandboxes import cgroup, worker
from magrpo.sandboxes.cgroup import MemoryCgroup, list_parents, make_cgroup
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.sandboxes.worker import attribute_kills
from magrpo.types import Execution

from .conftest import LEVELS, the_worker

MIB = 1 << 20


@pytest.fixture
def found() -> Iterator[MemoryCgroup]:
    with make_cgroup() as made:
        if made is None:
            pytest.skip("this process may make no cgroup that limits memory")
        yield made


def test_a_timeout_in_a_batch_in_which_the_kernel_killed_is_nobodys_yet() -> None:
    passed, late = {"cases": [["pass", ""]]}, {"cases": [["pass", ""], ["timeout", "no answer within 2 s"]]}
    assert attribute_kills([passed, late, passed], 3) == [passed]
    assert attribute_kills([passed, passed], 3) == [passed, passed]
    assert attribute_kills([], 3) == []
    [report] = attribute_kills([late], 1)
    assert [status for status, _ in report["cases"]] == ["pass", "memory"]
    assert attribute_kills([passed], 1) == [passed]


def hold(mebibytes: int) -> list[str]:
    return [sys.executable, "-S", "-c", f"x = b'x' * ({mebibytes} << 20)"]


def test_what_exceeds_the_limit_is_killed(found: MemoryCgroup) -> None:
    found.limit_growth(64 * MIB)
    assert subprocess.run(found.build_command(hold(16)), check=False).returncode == 0
    assert subprocess.run(found.build_command(hold(200)), check=False).returncode == -signal.SIGKILL


@pytest.fixture
def _below_tester(found: MemoryCgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the cgroup below that of the tester, as if all had been taken between two looks."""
    monkeypatch.setattr(worker, "TESTER_BYTES", -300 * MIB)


@pytest.mark.usefixtures("_below_tester")
@pytest.mark.parametrize("level", LEVELS)
def test_a_program_killed_by_the_kernel_has_used_too_much_memory(level: str) -> None:
    pool = PoolSandbox(level=level, workers=1).open()
    try:
        greedy = Execution("def f(): return len(b'x' * (400 << 20))", "f", "assert f() == 1")
        honest = Execution("def f(): return 1", "f", "assert f() == 1")
        first = the_worker(pool)
        assert [report.status for report in pool.run([greedy, honest])] == ["memory", "pass"]
        assert the_worker(pool) is first
        folder = first.cgroup.folder if first.cgroup else Path()
        assert folder.name.startswith("magrpo-jail-")
    finally:
        pool.close()
    assert not folder.exists()


@pytest.mark.usefixtures("_below_tester")
def test_a_program_that_waits_for_what_the_kernel_has_killed_has_used_too_much_memory() -> None:
    """The kernel kills one child; what the others hold is less than the limit, whenever the tester looks."""
    pool = PoolSandbox(workers=1, test_s=2, total_s=4).open()  # waiting counts, for a CPU as well
    try:
        fork = "    for _ in range(2):\n        if os.fork() == 0:\n            x = b'x' * (150 << 20)\n"
        wait = "            time.sleep(60)\n    os.wait()\n    os.wait()\n"
        greedy = Execution(f"import os, time\ndef f():\n{fork}{wait}", "f", "assert f() == 1")
        endless = Execution("def f():\n    while True: pass", "f", "assert f() == 1")
        assert [report.status for report in pool.run([greedy, endless])] == ["memory", "timeout"]
    finally:
        pool.close()


def test_jails_start_where_none_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_find_parent", lambda: None)
    pool = PoolSandbox(level="landlock", workers=1).open()
    try:
        assert the_worker(pool).cgroup is None
        assert pool.run([Execution("def f(): return 1", "f", "assert f() == 1")])[0].status == "pass"
    finally:
        pool.close()


V1 = "4:memory:/docker/abc\n0::/\n", "30 25 0:26 /docker/abc /cg/memory rw - cgroup cgroup rw,memory\n"
NAMELESS = "300 25 0:60 / /mnt rw - tmpfs  rw\n"  # of ``mount -t tmpfs "" /mnt``
V2 = "0::/user.slice/run.service/trainer\n", f"{NAMELESS}30 25 0:26 / /cg rw - cgroup2 cgroup2 rw\n"
ELSEWHERE = "0::/../../elsewhere\n", "30 25 0:26 / /cg rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("files", "delegated", "parents"),
    [
        (V1, False, ["/cg/memory"]),
        (V2, False, ["/cg/user.slice/run.service/trainer"]),
        (V2, True, ["/cg/user.slice/run.service/trainer", "/cg/user.slice/run.service"]),
        (ELSEWHERE, False, []),
    ],
)
def test_places_for_cgroups(files: tuple[str, str], delegated: bool, parents: list[str]) -> None:
    found = list_parents(*files, lambda folder: delegated and folder.name == "run.service")
    assert list(map(str, found)) == parents
