"""Ray on this machine, shared by the tests of this folder."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from magrpo.cluster.connection import Cluster
from tests.cluster.clusters import SETTINGS, list_handlers


@pytest.fixture(scope="package")
def handlers() -> list[Any]:
    """The handlers before Ray is started."""
    return list_handlers()


@pytest.fixture(scope="package")
def cluster(handlers: list[Any]) -> Iterator[Cluster]:
    """The connection of a run that starts Ray itself, in a thread that ends at once."""
    os.environ.update(SETTINGS)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 2}')  # what the node claims to have
        patch.delenv("RAY_worker_niceness")  # which the connection sets itself
        with warnings.catch_warnings():
            # Where a first start has failed, Ray forgets processes that it has started.
            warnings.simplefilter("ignore", ResourceWarning)
            cluster = pool.submit(Cluster, "").result()
            gc.collect()
    yield cluster
    cluster.close()
    cluster.close()
    assert handlers == list_handlers()
