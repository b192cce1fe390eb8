"""One run at several places: the same weights and the same evaluations, whoever sampled, updated and ran programs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magrpo.layout import LOGS, Step, find_evaluations, read_evaluation
from magrpo.store import RunStore
from magrpo.types import EvalRow
from pipelines.cli import main
from tests.fleets.clusters import open_cluster
from tests.pipelines.micro import write_config

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
    run_magrpo("train", "--resume", store.run_id, *again)


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


@pytest.fixture
def cluster() -> Iterator[Any]:
    with open_cluster(4, 4) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_servers_ranks_and_a_cluster_give_the_run_of_one_process(tmp_path: Path, cluster: Any) -> None:
    """The embedded run through Prefect: in one process, on servers and ranks, on Ray, and moved in the middle."""
    overrides = [*SMALL, "engine.kind=vllm"]
    alone = train(tmp_path, "alone", "embedded", "", *overrides)
    servers = train(tmp_path, "servers", "embedded", SERVERS + RANKS, *overrides)
    assert processes_of(servers) == {"vllm-0", "update", "rank"}
    assert weights_of(servers) == weights_of(alone)
    assert rows_of(servers) == rows_of(alone)
    ray = f'[fleet]\nkind = "ray"\naddress = "{cluster.address}"\n[sandbox]\nnodes = 2\n'
    spread = train(tmp_path, "spread", "embedded", ray + SERVERS + RANKS, *overrides)
    assert processes_of(spread) == {"vllm-0", "update", "rank"}
    assert weights_of(spread) == weights_of(alone)
    assert rows_of(spread) == rows_of(alone)
    move_in_the_middle(spread)
    assert weights_of(spread) == weights_of(alone)
    assert rows_of(spread) == rows_of(alone)
