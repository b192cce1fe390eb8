"""What tests of whole runs have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.pipelines.micro import blank_pictures

DRAWN = {"tests.pipelines.commands.test_compare", "tests.training.test_writing"}
"""Modules whose runs draw their pictures."""


@pytest.fixture(autouse=True, scope="module")
def _pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if request.module.__name__ in DRAWN else blank_pictures():
        yield
