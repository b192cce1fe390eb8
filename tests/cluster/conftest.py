"""Ray on this machine, shared by the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from magrpo.cluster.connection import Cluster
from tests.cluster.clusters import SETTINGS


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """The connection of a run that starts Ray itself."""
    os.environ.update(SETTINGS)
    cluster = Cluster("")
    yield cluster
    cluster.close()
