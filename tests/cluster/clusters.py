"""A Ray cluster of real nodes on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from magrpo.process.ports import find_free_ports

# The raylets are started with this environment. By default they give their workers a niceness of 15, which beside other
# tests takes a worker ten times as long.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "disabled",  # the developer may have a token
}


def list_handlers() -> list[Any]:
    """What handles the signals that end a run."""
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def add_node(cluster: Any, **changes: Any) -> Any:
    """Add a node that does not wait for its agents to say at which ports they listen: Ray gives them 15 s, too little
    on a loaded machine."""
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    ports = dict(zip(names, find_free_ports(len(names)), strict=True))
    options = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    return cluster.add_node(**options | ports | changes)


@contextmanager
def open_cluster(*cpus: int, auth_mode: str = "disabled") -> Iterator[Any]:
    """A ``ray.cluster_utils.Cluster``: a head without CPUs, and a node for each number of ``cpus``."""
    os.environ.update(SETTINGS | {"RAY_AUTH_MODE": auth_mode})
    from ray.cluster_utils import Cluster  # reads the environment

    cluster = Cluster()
    try:
        add_node(cluster, num_cpus=0)
        for count in cpus:
            add_node(cluster, num_cpus=count)
        yield cluster
    finally:
        cluster.shutdown()
