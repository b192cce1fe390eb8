"""The fleet and the sandbox on a real Ray cluster of two nodes: places, logs, lost nodes, a driver that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from magrpo.fleets import Job, ProcessDied
from magrpo.fleets.ray import RayFleet
from magrpo.sandboxes import SandboxDied, SandboxError
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.sandboxes.ray import Jails, RaySandbox, open_ray_sandbox
from magrpo.types import Execution, ExecutionReport
from tests.contracts import test_sandboxes as contract
from tests.fleets.clusters import add_node
from tests.fleets.test_local import wait_for_end
from tests.processes import assert_all_end

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
FAMILY = """
import os, subprocess, sys, time
orphan = subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"], text=True)
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), child.pid, orphan, flush=True)
time.sleep(600)
"""
# A driver that starts two families and a sandbox on the cluster, says so, and ends without closing them when told to.
DRIVER = """
import sys, time
from pathlib import Path
from magrpo.fleets import Job
from magrpo.fleets.ray import RayFleet
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.sandboxes.ray import open_ray_sandbox
fleet = RayFleet(sys.argv[1])
copies = fleet.start(Job("family", (sys.executable, "-c", sys.argv[2]), count=2, logs=Path(sys.argv[3])))
sandbox = open_ray_sandbox(PoolSandbox(workers=1), 2, sys.argv[1])
print("ready", flush=True)
input()
"""
# A driver that closes what one of its threads is using, and then tells how that ended.
CLOSER = """
import logging, sys, threading, time
from pathlib import Path
import ray
import magrpo.sandboxes.ray
from magrpo.fleets import Job
from magrpo.fleets.ray import RayFleet
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.sandboxes.ray import open_ray_sandbox
from magrpo.types import Execution

address, logs, what = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
at_work = threading.Event()
magrpo.sandboxes.ray._CHUNK = (1, 1)

class Notice(logging.Handler):
    def emit(self, record):
        at_work.set()

def start():
    opened.start(Job("waits", ("true",), gpus=1, logs=logs))

def stop():
    settle, delays = copy._settle, [2.0]

    def settle_late():
        at_work.set()
        time.sleep(delays.pop() if delays else 0)
        settle()

    copy._settle = settle_late
    copy.stop()
    return "it has ended" if copy.exit_status() is not None else "it runs"

def run():
    sources = ("def f(): return 1", "def f():\\n    while True: pass")
    opened.run([Execution(source, "f", "assert f() == 1") for source in sources], lambda _: at_work.set())

def use():
    try:
        print({"start": start, "stop": stop, "run": run}[what]())
    except Exception as error:
        print(type(error).__name__, error)

if what == "run":
    opened = open_ray_sandbox(PoolSandbox(workers=2, test_s=60.0, total_s=60.0), 1, address)
else:
    opened = RayFleet(address)
if what == "start":
    logging.getLogger("magrpo").addHandler(Notice())
if what == "stop":
    [copy] = opened.start(Job("sleeper", ("sleep", "600"), logs=logs))
thread = threading.Thread(target=use)
thread.start()
at_work.wait()
opened.close()
thread.join()
print("connected", ray.is_initialized())
"""
# A rank: sums the numbers of all over gloo, and prints the sum.
RANK = """
import os, torch
torch.distributed.init_process_group("gloo")
total = torch.tensor(float(os.environ["RANK"]) + 1)
torch.distributed.all_reduce(total)
print("total", total.item(), os.environ["WORLD_SIZE"])
torch.distributed.destroy_process_group()  # else gloo's thread may still run at the exit, which aborts
"""


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_family(log: Path) -> list[psutil.Process]:
    wait_until(lambda: len(log.read_text().split()) == 3)
    return [psutil.Process(int(pid)) for pid in log.read_text().split()]


@pytest.fixture(scope="module")
def fleet(cluster: Any) -> Iterator[RayFleet]:
    fleet = RayFleet(cluster.address)
    yield fleet
    fleet.close()
    fleet.close()


@pytest.fixture(scope="module")
def sandbox(cluster: Any) -> Iterator[RaySandbox]:
    sandbox = open_ray_sandbox(PoolSandbox(workers=1, test_s=0.5, total_s=1.0), 2, cluster.address)
    yield sandbox
    sandbox.close()
    sandbox.close()


def make_job(folder: Path, code: str, *arguments: str, **changes: Any) -> Job:
    return Job("job", (sys.executable, "-c", code, *arguments), logs=folder, **changes)


def test_copies_are_told_their_addresses_and_have_the_environment_of_their_node(
    fleet: RayFleet, tmp_path: Path
) -> None:
    # Ray sets these for its own processes.
    names = sorted({"LD_PRELOAD", "OMP_NUM_THREADS", "RAY_JOB_ID"} - {*os.environ})
    code = f"import os, sys; print(sys.argv[1:], os.environ['ADDED'], {{*{names}}} & {{*os.environ}})"
    added = {"ADDED": "no. {number}"}
    copies = fleet.start(make_job(tmp_path, code, "{number}", "{first_host}:{first_port}", count=2, environment=added))
    first = f"{copies[0].host}:{copies[0].port}"
    for number, copy in enumerate(copies):
        assert wait_for_end(copy) == 0
        assert copy.log == tmp_path / f"job-{number}.0.log"
        assert copy.log.read_text() == f"['{number}', '{first}'] no. {number} set()\n"


def test_a_failure_has_its_status_and_last_words(fleet: RayFleet, tmp_path: Path) -> None:
    [copy] = fleet.start(make_job(tmp_path, "import sys; print('x'); sys.exit('ValueError: too small')"))
    assert wait_for_end(copy) == 1
    assert copy.last_words() == "ValueError: too small"
    copy.stop()


def test_the_log_of_a_node_that_does_not_share_the_folder_is_fetched(
    fleet: RayFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("magrpo.fleets.ray.Path.resolve", lambda path: Path("/nowhere", path.name))
        [copy] = fleet.start(make_job(tmp_path, "raise KeyError('far away')"))
    assert wait_for_end(copy) == 1
    assert copy.last_words() == "KeyError: 'far away'"
    assert "Traceback" in copy.log.read_text()


def test_a_group_of_ranks_meets_at_the_first_copy(fleet: RayFleet, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank {number} --master-addr {first_host}"
    words = [*command.split(), "--master-port", "{first_port}", str(tmp_path / "rank.py")]
    copies = fleet.start(Job("ranks", (sys.executable, *words), count=2, logs=tmp_path))
    for copy in copies:
        assert wait_for_end(copy) == 0, copy.log.read_text()
        assert "total 3.0 2" in copy.log.read_text()


def test_stopping_ends_the_family(fleet: RayFleet, tmp_path: Path) -> None:
    [copy] = fleet.start(make_job(tmp_path, FAMILY))
    family = read_family(copy.log)
    assert copy.exit_status() is None
    copy.stop()
    assert not any(process.is_running() for process in family)
    assert copy.exit_status() == 143
    copy.stop()


def test_a_killed_actor_ends_the_family_and_is_the_reason(fleet: RayFleet, tmp_path: Path) -> None:
    [copy] = fleet.start(make_job(tmp_path, FAMILY))
    family = read_family(copy.log)
    family[0].parents()[2].kill()  # above the two keepers
    assert_all_end(family)
    assert wait_for_end(copy) == 137
    assert "died" in copy.last_words()
    copy.stop()


def test_what_has_no_place_says_so(cluster: Any, tmp_path: Path) -> None:
    fleet = RayFleet(cluster.address, placement_s=1.0)
    words = r"no room after 1 s for 1 processes with 4 GPUs each; the cluster has 0 GPUs"
    with closing(fleet), pytest.raises(ProcessDied, match=words):
        fleet.start(make_job(tmp_path, "", gpus=4))


# The contract of sandboxes, over the fixture of this module.
globals().update({name: value for name, value in vars(contract).items() if name.startswith("test_")})


def test_a_node_that_offers_too_little_isolation_is_refused(cluster: Any) -> None:
    with pytest.raises(SandboxError, match="a node of the cluster cannot open a sandbox"):
        open_ray_sandbox(PoolSandbox(level="landlock", min_level="namespaces"), 1, cluster.address)


class FragileJails(Jails):
    """Its actor dies of programs that say so."""

    def run_chunk(self, executions: Sequence[Execution]) -> list[ExecutionReport]:
        if any("deadly" in execution.source for execution in executions):
            os._exit(1)
        return super().run_chunk(executions)


@pytest.fixture
def fragile(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RaySandbox]:
    monkeypatch.setattr("magrpo.sandboxes.ray.Jails", FragileJails)
    monkeypatch.setattr("magrpo.sandboxes.ray._CHUNK", (1, 1))
    sandbox = open_ray_sandbox(PoolSandbox(workers=1), 1, cluster.address)
    yield sandbox
    sandbox.close()


def test_a_chunk_that_is_lost_with_three_actors_is_an_infra_error(fragile: RaySandbox) -> None:
    executions = [Execution(source, "f", "assert f() == 1") for source in ("# deadly", "def f(): return 1")]
    [deadly, harmless] = fragile.run(executions)
    assert deadly.status == "infra_error"
    assert "a sandbox node was lost" in deadly.cases[0].message
    assert harmless.status in ("pass", "infra_error")  # it may have waited at each of the actors
    assert fragile.run(executions[1:])[0].status == "pass"


def test_a_sandbox_without_nodes_has_died(fragile: RaySandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magrpo.sandboxes.ray._JOIN_S", 0.0)
    with pytest.raises(SandboxDied, match="no sandbox node is left"):
        fragile.run([Execution("# deadly", "f", "assert f() == 1")])


def test_lost_nodes(cluster: Any, tmp_path: Path) -> None:
    """Programs go elsewhere, commands end with the reason; without nodes the sandbox says that it died."""
    nodes = [add_node(cluster, num_cpus=1, resources={"extra": 1}) for _ in range(2)]
    sandbox = open_ray_sandbox(PoolSandbox(workers=1, test_s=0.5), 4, cluster.address)
    removed: list[Any] = []

    def remove(_: int) -> None:
        if not removed:
            removed.append(nodes.pop())
            cluster.remove_node(removed[0], allow_graceful=False)

    executions = [Execution(f"def f(n):\n    return n + {k}\n", "f", "assert candidate(0) == 7") for k in range(200)]
    try:
        reports = sandbox.run(executions, remove)
        assert [report.status for report in reports] == ["pass" if k == 7 else "wrong" for k in range(200)]
        assert removed
    finally:
        sandbox.close()
        for node in nodes:
            cluster.remove_node(node)


def test_a_job_that_is_placed_on_a_lost_node_gets_another_place(cluster: Any, fleet: RayFleet, tmp_path: Path) -> None:
    """Ray gives places on a node until it knows that the node has ended."""
    cluster.remove_node(add_node(cluster), allow_graceful=False)
    copies = fleet.start(make_job(tmp_path, "print('here')", count=6))
    for copy in copies:
        assert wait_for_end(copy) == 0
        assert copy.log.read_text() == "here\n"


def test_jails_leave_nodes_with_gpus_to_others_and_say_for_what_they_wait(
    cluster: Any, fleet: RayFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray = fleet._ray
    cluster.wait_for_nodes(120)  # Ray counts the lost node of another test for a while
    with_gpus = add_node(cluster, num_cpus=64, num_gpus=1)
    try:
        wait_until(lambda: ray.cluster_resources().get("GPU"))
        sandbox = open_ray_sandbox(PoolSandbox(workers=1), 2, cluster.address)
        places = ray.util.placement_group_table(sandbox._group)["bundles_to_node_id"].values()
        sandbox.close()
        assert len(set(places)) == 2
        assert with_gpus.node_id not in places
        open_ray_sandbox(PoolSandbox(workers=1), 3, cluster.address).close()
        monkeypatch.setattr("magrpo.sandboxes.ray._WARNING_S", 0.1)
        monkeypatch.setattr("magrpo.sandboxes.ray._PLACEMENT_S", 0.1)
        with pytest.raises(SandboxError, match=r"sandbox.nodes = 4: too few nodes had a free CPU within 0.1 s"):
            open_ray_sandbox(PoolSandbox(workers=1), 4, cluster.address)
        assert "that many nodes with a free CPU; the cluster has 3 nodes with 72 CPUs" in caplog.text
    finally:
        cluster.remove_node(with_gpus)
        cluster.wait_for_nodes(120)


@pytest.mark.parametrize("end", ["is killed", "just ends"])
def test_nothing_is_left_of_a_driver_that(cluster: Any, tmp_path: Path, end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, cluster.address, FAMILY, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as driver:  # fmt: skip
        assert driver.stdin is not None
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        families = [read_family(tmp_path / f"family-{number}.0.log") for number in range(2)]
        # With the two keepers and the actor above each.
        started = [process for family in families for process in (*family, *family[0].parents()[:3])]
        if end == "is killed":
            driver.kill()
        else:
            driver.stdin.write("\n")
            driver.stdin.flush()
        assert_all_end(started)


@pytest.mark.parametrize(
    ("what", "end"),
    [
        ("start", "ProcessDied waits: the fleet is closed"),
        ("stop", "it has ended"),
        ("run", "SandboxDied the sandbox was closed"),
    ],
)
def test_a_thread_may_be_at_work_when_the_last_user_leaves_the_cluster(
    cluster: Any, tmp_path: Path, what: str, end: str
) -> None:
    """Ray would end the process, without a word, or connect it again."""
    words = [sys.executable, "-c", CLOSER, cluster.address, str(tmp_path), what]
    driver = subprocess.run(words, capture_output=True, text=True)
    assert (driver.returncode, driver.stdout) == (0, f"{end}\nconnected False\n"), driver.stderr
