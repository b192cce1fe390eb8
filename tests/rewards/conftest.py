"""A real sandbox, shared by the tests of a module."""

from collections.abc import Iterator

import pytest

from magrpo.interfaces import Sandbox
from magrpo.sandboxes.pool import PoolSandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """Gives up a test after half a second."""
    opened = PoolSandbox(test_s=0.5, total_s=1.0).open()
    yield opened
    opened.close()
