"""Training runs on a real Ray cluster of two nodes that lose a node in the middle of a stage.

Each ends with the weights and the evaluations of the run in one process; nothing is left of it on a lost node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from magrpo.store import RunStore
from tests.fleets.drivers import Driver, lose_node, wait_until
from tests.pipelines.flows.test_kills import EMBEDDED
from tests.pipelines.micro import command
from tests.pipelines.training.test_places import rows_of, weights_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
CONFIG = [*EMBEDDED, "engine.kind=transformers", "optim.schedule=constant"]
PLACE = '[fleet]\nkind = "ray"\naddress = "{address}"\n[update]\nranks = 2\n[sandbox]\nnodes = 2\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lost")


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunStore:
    """The run in one process."""
    arguments = ["train", *CONFIG, f"root={folder / 'alone'}", "--name", "alone", "--local"]
    assert command(arguments, folder / "alone.log") == 0, (folder / "alone.log").read_text()
    return RunStore.open(folder / "alone", "alone")


@pytest.fixture(scope="module")
def place(cluster: Any, folder: Path) -> Path:
    file = folder / "place.toml"
    file.write_text(PLACE.format(address=cluster.address))
    return file


def assert_equal(folder: Path, name: str, alone: RunStore) -> None:
    store = RunStore.open(folder / "runs", name)
    assert weights_of(store) == weights_of(alone)
    assert rows_of(store) == rows_of(alone)


def test_nodes_lost_in_score_and_in_update(cluster: Any, folder: Path, place: Path, alone: RunStore) -> None:
    arguments = ["train", *CONFIG, f"root={folder / 'runs'}", "--name", "nodes", "--place", str(place)]
    with Driver(cluster, folder, "nodes", arguments, ["00001/score.0", "00002/update"]) as driver:
        with lose_node(cluster, driver.catch("00001/score.0")):
            wait_until((folder / "runs/nodes/stages/00001/score.0/_SUCCESS").exists)
        with lose_node(cluster, driver.catch("00002/update")):
            said = driver.finish()
    assert "a node with jails was lost" in said
    assert "00002/update failed and is tried again: " in said
    assert_equal(folder, "nodes", alone)
