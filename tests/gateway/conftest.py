"""Lineups without weights, which are opened once, and a fake model."""

from __future__ import annotations

import pytest

from magrpo.model.lineup import Lineup
from tests.gateway.playing import HERMES_TEMPLATE, FakeModel, make_lineup


@pytest.fixture(scope="session")
def lineup(tmp_path_factory: pytest.TempPathFactory) -> Lineup:
    """Its chat template has no tools."""
    return make_lineup(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Lineup:
    """Its chat template has tools, in the Hermes form."""
    return make_lineup(tmp_path_factory.mktemp("hermes"), HERMES_TEMPLATE)


@pytest.fixture
def model(lineup: Lineup) -> FakeModel:
    return FakeModel(lineup)
