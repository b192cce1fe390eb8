"""A Ray cluster that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleets.clusters import open_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs and two nodes with four."""
    with open_cluster(4, 4) as cluster:
        yield cluster
