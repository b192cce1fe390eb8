"""One run at several places: the same weights and the same evaluations, whoever sampled, updated and ran programs."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from magrpo.run.files import LOGS, find_evaluations, read_evaluation
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.types import EvalRow
from pipelines.cli import main
from tests.fleets.clusters import open_cluster
from tests.fleets.drivers import Driver, lose_node
from tests.pipelines.flows.served import serve_schedule
from tests.pipelines.micro import write_config
from tests.stages.updating import assert_same_steps

EMBEDDED = Path(__file__).parents[2] / "pipelines" / "configs" / "embedded.toml"
RANKS = "[update]\nranks = 2\n"
SERVERS = "[engine]\nservers = 2\ngpus = 0\n"
SMALL = ("train.num_iterations=2", "rollout.problems_per_iteration=4", "eval.max_problems=4", "eval.every=1")


def weights_of(store: RunStore) -> dict[str, str]:
    """Digests of all trained weights and optimizer states that the run kept."""
    folders = [store.stage_folder(Step("update", iteration).folder) for iteration in range(3)]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".safetensors", ".pt")]
    assert len(files) >= 6, "two agents, untrained and after two iterations"
    return {str(path.relative_to(store.path)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rows_of(store: RunStore) -> list[tuple[EvalRow, ...]]:
    """What all evaluations found."""
    return [read_evaluation(store.folder(pointer)).rows for pointer in find_evaluations(store).values()]


def run_magrpo(*words: str) -> None:
    """Run a command, with Prefect in a process of its own."""
    if "--local" in words:
        assert main(list(words)) == 0
    else:
        program = "import sys; from pipelines.cli import main; sys.exit(main())"
        subprocess.run([sys.executable, "-c", program, *words], check=True)


def train(root: Path, name: str, config: str, place: str = "", *flags: str) -> RunStore:
    """Run ``config`` to its end at ``place``, the text of a file."""
    if place:
        file = root / f"{name}.toml"
        file.write_text(place)
        flags = ("--place", str(file), *flags)
    run_magrpo("train", config, "--name", name, f"root={root}", *flags)
    return RunStore.open(root, name)


def processes_of(store: RunStore) -> set[str]:
    """Names of the jobs whose processes left logs."""
    return {path.name.rpartition("-")[0] for path in (store.path / LOGS).glob("*.log")}


def move_in_the_middle(store: RunStore, *flags: str) -> None:
    """Take back everything from the second rollout on, and do it again in one process."""
    again = ["--from-stage", "rollout:2", "--place", "none", "--root", str(store.path.parent), *flags]
    run_magrpo("resume", store.run_id, *again)


def test_two_ranks_give_the_run_of_one_process_and_it_may_move(tmp_path: Path) -> None:
    config = str(write_config(tmp_path, iterations=2))
    alone = train(tmp_path, "alone", config, "", "--local")
    shared = train(tmp_path, "shared", config, RANKS, "--local")
    assert processes_of(alone) == set()
    assert processes_of(shared) == {"update", "rank"}
    assert weights_of(shared) == weights_of(alone)
    assert rows_of(shared) == rows_of(alone)
    move_in_the_middle(shared, "--local")
    assert weights_of(shared) == weights_of(alone)


VLLM = [*SMALL, "engine.kind=vllm"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with open_cluster(4, 4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("places")


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunStore:
    """The embedded run in one process."""
    return train(folder, "alone", "embedded", "", *VLLM)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_servers_and_ranks_give_the_run_of_one_process(folder: Path, alone: RunStore) -> None:
    servers = train(folder, "servers", "embedded", SERVERS + RANKS, *VLLM)
    assert processes_of(servers) == {"vllm-0", "update", "rank"}
    assert weights_of(servers) == weights_of(alone)
    assert rows_of(servers) == rows_of(alone)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_full_weights_spread_over_ranks_give_the_run_of_one_process(folder: Path) -> None:
    """With truncated sampling, whose support the servers send, and a server of its own for each agent's copy."""
    config = folder / "full.toml"
    config.write_text(re.sub("^model = .*base.*", r'\g<0>\nweights = "full"', EMBEDDED.read_text(), flags=re.MULTILINE))
    arguments = [
        *VLLM,
        "rollout.top_k=20",
        "rollout.keep_support=true",
        "optim.lr=1e-5",
        "optim.lanes=2",
        f"root={folder}",
    ]
    place = folder / "spread.toml"
    place.write_text(SERVERS.replace("2", "1") + RANKS + 'shard = "base"\n')
    for name, flags in (("one", ()), ("spread", ("--place", str(place)))):
        run_magrpo("train", str(config), *arguments, "--name", name, *flags)
    one, spread = (RunStore.open(folder, name) for name in ("one", "spread"))
    assert processes_of(spread) == {"vllm-0", "vllm-1", "update", "rank"}
    assert rows_of(spread) == rows_of(one)
    begin = load_weights(one, 0)
    for iteration in (1, 2):
        expected = load_weights(one, iteration)
        assert not all(torch.equal(tensor, expected[name]) for name, tensor in begin.items()), "it learned"
        assert_same_steps(load_weights(spread, iteration), expected, num_steps=iteration, lr=1e-5)


def load_weights(store: RunStore, iteration: int) -> dict[str, torch.Tensor]:
    """All tensors of all agents after an iteration."""
    folder = store.stage_folder(Step("update", iteration).folder)
    return {
        f"{path.parent.name}/{name}": tensor
        for path in sorted(folder.rglob("model*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_a_run_of_the_schedule_on_a_cluster_gives_the_run_of_one_process(
    folder: Path, alone: RunStore, cluster: Any
) -> None:
    """It is started from the deployment, with a place that the schedule does not have, and moved in the middle."""
    place, root = folder / "ray.toml", folder / "scheduled"
    place.write_text(write_ray(cluster, "[sandbox]\nnodes = 2\n" + SERVERS + RANKS))
    with serve_schedule(folder, "served", ["embedded", *VLLM, f"root={root}"]) as schedule:
        run = schedule.begin([f"place={place}"])
        assert schedule.wait_for_end(run) == "Completed", schedule.log.read_text()
    [path] = root.glob("served-*")
    spread = RunStore.open(root, path.name)
    assert processes_of(spread) == {"vllm-0", "update", "rank"}
    assert weights_of(spread) == weights_of(alone)
    assert rows_of(spread) == rows_of(alone)
    move_in_the_middle(spread)
    assert weights_of(spread) == weights_of(alone)
    assert rows_of(spread) == rows_of(alone)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_a_node_that_is_lost_in_a_rollout_changes_nothing(folder: Path, alone: RunStore, cluster: Any) -> None:
    place, root = folder / "lost.toml", folder / "lost"
    place.write_text(write_ray(cluster, SERVERS))
    arguments = ["train", "embedded", *VLLM, f"root={root}", "--name", "lost", "--place", str(place)]
    with (
        Driver(cluster, folder, "lost", arguments, ["00001/rollout.0"]) as driver,
        lose_node(cluster, driver.catch("00001/rollout.0")),
    ):
        said = driver.finish()
    assert re.search("was removed from the pool: .* requests move to other servers", said), said
    lost = RunStore.open(root, "lost")
    assert weights_of(lost) == weights_of(alone)
    assert rows_of(lost) == rows_of(alone)


def write_ray(cluster: Any, rest: str) -> str:
    """The text of a place on ``cluster``."""
    return f'[fleet]\nkind = "ray"\naddress = "{cluster.address}"\n{rest}'
