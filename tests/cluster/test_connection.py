"""The connection to Ray: addresses that answer nothing, and processes after their driver was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray

from magrpo.cluster.connection import Cluster, start_actor
from magrpo.config.place import Place
from magrpo.errors import ConfigError
from magrpo.process.ports import find_free_ports
from tests.cluster.clusters import add_node, open_cluster
from tests.processes import assert_all_end, find_actors
from tests.test_imports import list_loaded

# A driver that starts an actor with a child of its own, prints that it has, and waits.
DRIVER = """
import subprocess, sys, time
from magrpo.cluster.connection import Cluster, start_actor

class Parent:
    def start(self):
        return subprocess.Popen(
            [sys.executable, "-c", "import os, sys, time; from magrpo.process.parent import exit_with_parent\\n"
             "exit_with_parent(os.getppid()); time.sleep(600)"]
        ).pid

cluster = Cluster("")
import ray
ray.get(start_actor(Parent, {"max_restarts": -1}).start.remote())
print("started", flush=True)
time.sleep(600)
"""

# A cluster that asks for a token, and a driver that is given its address and nothing else.
TOKEN_CLUSTER = """
import os, subprocess, sys
from tests.cluster.clusters import open_cluster

os.environ["RAY_AUTH_MODE"] = "token"
with open_cluster() as cluster:
    del os.environ["RAY_AUTH_MODE"]
    connect = f"from magrpo.cluster.connection import Cluster; Cluster('{cluster.address}').close()"
    sys.exit(subprocess.run([sys.executable, "-c", connect]).returncode)
"""


@pytest.mark.slow
def test_a_cluster_that_asks_for_the_token_of_this_user_gets_it(tmp_path: Path) -> None:
    """Ray writes the token when it first starts on a machine; ``ray start`` then makes clusters that ask for it."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", TOKEN_CLUSTER], env=environment, check=True)


def test_a_cluster_that_does_not_answer_is_named_with_the_remedy() -> None:
    [port] = find_free_ports(1)
    with pytest.raises(ConfigError, match=rf"address = '127.0.0.1:{port}': no Ray cluster answers .*ray start"):
        Cluster(f"127.0.0.1:{port}")


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'magrpo\[ray\]'"):
        Cluster("")


class Echo:
    """An actor that returns what it is given, and its niceness."""

    def repeat(self, word: str) -> str:
        return word

    def read_niceness(self) -> int:
        return os.nice(0)


def test_ray_outlives_the_thread_that_has_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would kill it at the end of that thread. The handlers of signals stay, too."""
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with ThreadPoolExecutor(1) as pool:
        cluster = pool.submit(Cluster, "").result()
    try:
        echo = start_actor(Echo, {})
        assert ray.get(echo.repeat.remote("here")) == "here"
        assert ray.get(echo.read_niceness.remote()) == os.nice(0), "as if it were in the run's process"
    finally:
        cluster.close()
        cluster.close()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


class Holder:
    """An actor that holds its share of the GPUs."""

    def list_gpus(self) -> list[int]:
        return list(ray.get_gpu_ids())


def test_a_sampler_and_a_rank_share_each_gpu_if_they_are_colocated() -> None:
    """On two GPUs that a node only claims to have."""
    place = Place.model_validate({"colocate": True, "samplers": {"count": 2}, "ranks": {"count": 2}})
    with open_cluster() as nodes:
        add_node(nodes, num_cpus=2, num_gpus=2)
        cluster = Cluster(nodes.address)
        try:
            samplers, ranks = (
                [start_actor(Holder, options) for options in cluster.choose_options(place, 2, 1)] for _ in range(2)
            )
            of_samplers = ray.get([actor.list_gpus.remote() for actor in samplers])
            assert sorted(of_samplers) == [[0], [1]]
            assert ray.get([actor.list_gpus.remote() for actor in ranks]) == of_samplers
        finally:
            cluster.close()


@pytest.mark.slow
def test_nothing_survives_kill_9_of_the_driver() -> None:
    """Its actors end within seconds, the agents of Ray within a minute."""
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "started\n"
            family = psutil.Process(driver.pid).children(recursive=True)
            assert find_actors("Parent", driver.pid)
            driver.kill()
            driver.wait()
            assert_all_end(family)
        finally:
            driver.kill()


def test_a_run_in_one_process_does_not_load_ray() -> None:
    assert "ray" not in list_loaded("import pipelines.cli, magrpo.training.execute, magrpo.training.resources")
