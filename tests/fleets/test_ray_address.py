"""Addresses at which no Ray cluster answers. A process that is connected to one asks no other."""

from __future__ import annotations

import socket
import threading

import pytest

from magrpo.fleets import ray
from magrpo.fleets.ray import connect_cluster
from magrpo.plugins import ConfigError


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://[::1]:9", "nobody.invalid:6379"])
def test_a_cluster_that_does_not_answer_is_named_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet.address = .*: no Ray cluster answers there"):
        connect_cluster(address)


def test_a_server_that_is_no_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes connections and never answers, and one that hangs up."""
    monkeypatch.setattr(ray, "_KNOCK_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"no Ray cluster answers there \(timed out\)"):
            connect_cluster(address)
        hanging_up = threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)])
        hanging_up.start()
        with pytest.raises(ConfigError, match=r"no Ray cluster answers there \("):
            connect_cluster(address)
        hanging_up.join()
