"""Training runs on a real Ray cluster of two nodes that lose a node, or their driver, in the middle of a stage.

Each ends with the weights and the evaluations of the run in one process, and leaves no process behind.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from prefect.states import Cancelling

from magrpo.process.children import list_family
from magrpo.run.store import RunStore
from tests.fleets.drivers import Driver, lose_node, nothing_left, wait_until
from tests.pipelines.flows.served import serve_schedule
from tests.pipelines.flows.test_kills import EMBEDDED
from tests.pipelines.micro import command
from tests.processes import assert_all_end
from tests.training.test_places import rows_of, weights_of

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
    assert "a sandbox node was lost" in said
    assert "00002/update failed, retrying: " in said
    assert_equal(folder, "nodes", alone)


def test_drivers_that_are_interrupted_and_killed(cluster: Any, folder: Path, place: Path, alone: RunStore) -> None:
    """Whatever ends the driver, nothing of it is left on any node; the run goes on where it was."""
    ends = {"00001/update": signal.SIGINT, "00002/score.0": signal.SIGKILL}
    arguments = ["train", *CONFIG, f"root={folder / 'runs'}", "--name", "driver", "--place", str(place)]
    for stage, sent in ends.items():
        with Driver(cluster, folder, "driver", arguments, [stage]) as driver:
            driver.catch(stage)
            assert driver.process.pid is not None
            children = list_family(driver.process.pid)
            with nothing_left(cluster, sent.name):
                os.kill(driver.process.pid, sent)
            driver.process.join()
            assert driver.process.exitcode != 0
        assert_all_end(children)
        arguments = ["resume", "driver", "--root", str(folder / "runs")]
    with Driver(cluster, folder, "driver", arguments, []) as driver:
        driver.finish()
    assert_equal(folder, "driver", alone)


def test_runs_of_the_schedule_that_prefect_cancels_and_completes(
    cluster: Any, folder: Path, place: Path, alone: RunStore
) -> None:
    """Both are started from the deployment, with a place that the schedule does not have."""
    root = folder / "scheduled"
    with serve_schedule(folder, "scheduled", [*CONFIG, f"root={root}"]) as schedule:
        overrides = json.dumps([*CONFIG[1:], "train.num_iterations=1000"])
        cancelled = schedule.begin([f"place={place}", f"overrides={overrides}"])
        wait_until(lambda: [*root.glob("scheduled-*/stages/00001/evaluate/_SUCCESS")])
        with nothing_left(cluster, "a cancelled flow run"), schedule.open_client() as client:
            client.set_flow_run_state(cancelled, Cancelling())
        assert schedule.wait_for_end(cancelled) == "Cancelled", schedule.log.read_text()
        completed = schedule.begin([f"place={place}"])
        assert schedule.wait_for_end(completed) == "Completed", schedule.log.read_text()
    first, second = (RunStore.open(root, path.name) for path in sorted(root.glob("scheduled-*")))
    found, expected = weights_of(first), weights_of(alone)
    both = found.keys() & expected.keys()
    assert any("/00001/update/" in file for file in both)
    assert {file: found[file] for file in both} == {file: expected[file] for file in both}
    assert weights_of(second) == expected
    assert rows_of(second) == rows_of(alone)
