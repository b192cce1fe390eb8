"""What tests of whole runs have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pipelines.micro import blank_pictures

DRAWN = "tests.pipelines.commands.test_compare"
"""The module whose pages hold their pictures."""


@pytest.fixture(autouse=True, scope="module")
def _pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.module.__name__ == DRAWN:
        yield
    else:
        with blank_pictures():
            yield
