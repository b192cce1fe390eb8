"""The connection to Ray: addresses that answer nothing, and processes after their driver was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from magrpo.cluster.connection import Cluster
from magrpo.errors import ConfigError
from magrpo.process.ports import find_free_ports
from tests.processes import assert_all_end, find_actors

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

# A cluster, and a driver that is given its address and nothing else.
CLUSTER = """
import os, subprocess, sys
from tests.cluster.clusters import open_cluster

with open_cluster(1, auth_mode=sys.argv[1]) as cluster:
    del os.environ["RAY_AUTH_MODE"]
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[2], cluster.address]).returncode)
"""
# A driver that waits for an actor.
USE = """
import sys
from magrpo.cluster.connection import Cluster, StartedActor, start_actor

cluster = Cluster(sys.argv[1])
cluster.wait_for_places([start_actor(StartedActor, {})], "actors", lambda: None)
cluster.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("auth_mode", "refusal"), [("token", ""), ("disabled", "set the environment variable RAY_AUTH_MODE=disabled")]
)
def test_a_cluster_that_asks_for_the_token_of_this_user_gets_it(tmp_path: Path, auth_mode: str, refusal: str) -> None:
    """Ray writes the token when it first starts on a machine; ``ray start`` then makes clusters that ask for it.

    A cluster that asks for none cannot answer a driver that shows one.
    """
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CLUSTER, auth_mode, USE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert refusal in result.stderr
    assert (result.returncode == 0) == (not refusal), result.stderr


def test_a_cluster_that_does_not_answer_is_named_with_the_remedy() -> None:
    [port] = find_free_ports(1)
    with pytest.raises(ConfigError, match=rf"address = '127.0.0.1:{port}': no Ray cluster answers .*ray start"):
        Cluster(f"127.0.0.1:{port}")


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'magrpo\[ray\]'"):
        Cluster("")


def replace_init(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> list[threading.Thread]:
    """Let ``ray.init`` raise these errors before it succeeds; returns the threads that will have called it."""
    left, threads = list(errors), list[threading.Thread]()

    def init(**_: object) -> None:
        threads.append(threading.current_thread())
        if left:
            raise left.pop(0)

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # the fixture of other tests may have connected
    monkeypatch.setattr("ray.shutdown", lambda: None)
    return threads


TOO_SLOW = Exception("The current node timed out during startup. This could happen because some of the raylet failed")


def test_ray_that_starts_too_slowly_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = replace_init(monkeypatch, TOO_SLOW)
    cluster = Cluster("")
    first, second = threads
    assert not first.is_alive(), "the kernel ends what it has started"
    assert second.is_alive()
    cluster.close()
    assert not second.is_alive()


def test_ray_that_starts_too_slowly_again_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = replace_init(monkeypatch, TOO_SLOW, TOO_SLOW)
    with pytest.raises(ConfigError, match=r"Ray did not start .*raylet\.out"):
        Cluster("")
    assert not any(thread.is_alive() for thread in threads)


def test_another_error_of_rays_start_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = replace_init(monkeypatch, RuntimeError("no disk"))
    with pytest.raises(RuntimeError, match="no disk"):
        Cluster("")
    assert len(threads) == 1


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
