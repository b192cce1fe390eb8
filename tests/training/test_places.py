"""One run at several places: the same weights and the same evaluations, whoever sampled, updated and ran programs."""

from __future__ import annotations

import hashlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from magrpo.process.children import list_family
from magrpo.run.files import find_evaluations, read_evaluation
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.types import EvalRow
from pipelines.cli import main
from tests.cluster.clusters import add_node, open_cluster
from tests.pipelines.flows.served import serve_schedule
from tests.pipelines.micro import start, write_config
from tests.processes import assert_all_end, find_actors, wait_until
from tests.updates.updating import assert_same_steps

EMBEDDED = Path(__file__).parents[2] / "pipelines" / "configs" / "embedded.toml"
RANKS = "[ranks]\ncount = 2\n"
SAMPLERS = "[samplers]\ncount = 2\n"
SMALL = ("train.num_iterations=2", "rollout.problems_per_iteration=4", "eval.max_problems=4", "eval.every=1")


def weights_of(store: RunStore) -> dict[str, str]:
    """Digests of all trained weights and optimizer states that the run kept."""
    folders = [store.stage_folder(Step("update", iteration).output) for iteration in range(3)]
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


def move_in_the_middle(store: RunStore, *flags: str) -> None:
    """Take back everything from the second rollout on, and do it again in one process."""
    again = ["--from-stage", "rollout:2", "--place", "none", "--root", str(store.path.parent), *flags]
    run_magrpo("resume", store.run_id, *again)


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """A micro run in one process; its configuration is ``run.toml`` beside it."""
    folder = tmp_path_factory.mktemp("micro")
    return train(folder, "alone", str(write_config(folder, iterations=2)), "", "--local")


@pytest.mark.slow
def test_samplers_and_ranks_give_the_run_of_one_process_and_it_may_move(micro: RunStore) -> None:
    root, config = micro.path.parent, str(micro.path.with_name("run.toml"))
    shared = train(root, "shared", config, SAMPLERS + RANKS, "--local")
    assert weights_of(shared) == weights_of(micro)
    assert rows_of(shared) == rows_of(micro)
    move_in_the_middle(shared, "--local")
    assert weights_of(shared) == weights_of(micro)


LAGGED = ("train.lag=1", "algo.importance_cap=2")


@pytest.mark.slow
def test_a_run_with_a_lag_is_the_same_on_a_sampler_and_ranks(tmp_path: Path) -> None:
    """With one sampler: the importance weights of a lag depend on the last bits of log-probabilities, and so on the
    batch in which they were computed."""
    config = str(write_config(tmp_path, iterations=4))
    alone = train(tmp_path, "alone", config, "", "--local", *LAGGED)
    shared = train(tmp_path, "shared", config, SAMPLERS.replace("2", "1") + RANKS, "--local", *LAGGED)
    assert weights_of(shared) == weights_of(alone)
    assert rows_of(shared) == rows_of(alone)


@pytest.mark.slow
def test_a_run_killed_in_the_middle_leaves_no_process_and_is_resumed_to_the_same_bits(
    micro: RunStore, tmp_path: Path
) -> None:
    """It is killed on samplers and ranks, and resumed in one process."""
    config = str(micro.path.with_name("run.toml"))
    place = tmp_path / "place.toml"
    place.write_text(SAMPLERS + RANKS)
    arguments = ["train", config, "--name", "killed", f"root={tmp_path}", "--place", str(place), "--local"]
    driver = start(arguments, tmp_path / "killed.log")
    store = RunStore(tmp_path, "killed")
    update = Step("update", 1).output
    wait_until(lambda: (store.exists() and store.is_committed(update)) or not driver.is_alive())
    assert driver.pid is not None
    family = list_family(driver.pid)
    for kind in ("SamplerActor", "Rank"):
        assert len(find_actors(kind, driver.pid)) == 2
    driver.kill()
    driver.join()
    assert driver.exitcode == -signal.SIGKILL
    assert_all_end(family)
    run_magrpo("resume", "killed", "--root", str(tmp_path), "--place", "none", "--local")
    assert weights_of(store) == weights_of(micro)
    assert rows_of(store) == rows_of(micro)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with open_cluster(4, 4) as cluster:
        yield cluster


VLLM = [*SMALL, "engine.kind=vllm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("places")


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunStore:
    """The embedded run in one process."""
    return train(folder, "alone", "embedded", "", *VLLM)


@pytest.mark.slow
@pytest.mark.vllm
def test_full_weights_spread_over_ranks_give_the_run_of_one_process(folder: Path) -> None:
    """With truncated sampling, whose support the samplers record."""
    config = folder / "full.toml"
    config.write_text(re.sub("^model = .*base.*", r'\g<0>\nweights = "full"', EMBEDDED.read_text(), flags=re.MULTILINE))
    sampling = ["rollout.top_k=20", "rollout.keep_support=true"]
    arguments = [*VLLM, *sampling, "optim.lr=1e-5", "optim.lanes=2", f"root={folder}"]
    place = folder / "spread.toml"
    place.write_text(SAMPLERS.replace("2", "1") + RANKS + 'shard = "base"\n')
    for name, flags in (("one", ()), ("spread", ("--place", str(place)))):
        run_magrpo("train", str(config), *arguments, "--name", name, *flags)
    one, spread = (RunStore.open(folder, name) for name in ("one", "spread"))
    assert rows_of(spread) == rows_of(one)
    begin = load_weights(one, 0)
    for iteration in (1, 2):
        expected = load_weights(one, iteration)
        assert not all(torch.equal(tensor, expected[name]) for name, tensor in begin.items()), "it learned"
        assert_same_steps(load_weights(spread, iteration), expected, num_steps=iteration, lr=1e-5)


def load_weights(store: RunStore, iteration: int) -> dict[str, torch.Tensor]:
    """All tensors of all agents after an iteration."""
    folder = store.stage_folder(Step("update", iteration).output)
    return {
        f"{path.parent.name}/{name}": tensor
        for path in sorted(folder.rglob("model*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.slow
@pytest.mark.vllm
def test_a_run_of_the_schedule_on_a_cluster_gives_the_run_of_one_process(
    folder: Path, alone: RunStore, cluster: Any
) -> None:
    """It is started from the deployment, with a place that the schedule does not have, and moved in the middle."""
    place, root = folder / "ray.toml", folder / "scheduled"
    place.write_text(f'address = "{cluster.address}"\n[jails]\nnodes = 2\n' + SAMPLERS + RANKS)
    with serve_schedule(folder, "served", ["embedded", *VLLM, f"root={root}"]) as schedule:
        run = schedule.begin([f"place={place}"])
        assert schedule.wait_for_end(run) == "Completed", schedule.log.read_text()
    [path] = root.glob("served-*")
    spread = RunStore.open(root, path.name)
    assert weights_of(spread) == weights_of(alone)
    assert rows_of(spread) == rows_of(alone)
    move_in_the_middle(spread)
    assert weights_of(spread) == weights_of(alone)
    assert rows_of(spread) == rows_of(alone)


@pytest.mark.slow
def test_a_node_that_is_lost_in_a_run_changes_nothing(micro: RunStore, tmp_path: Path, cluster: Any) -> None:
    config = str(micro.path.with_name("run.toml"))
    place = tmp_path / "lost.toml"
    place.write_text(f'address = "{cluster.address}"\n' + SAMPLERS)
    arguments = ["train", config, "--name", "lost", f"root={tmp_path}", "--place", str(place), "--local"]
    driver = start(arguments, tmp_path / "lost.log")
    store = RunStore(tmp_path, "lost")
    wait_until(lambda: (store.exists() and store.is_committed(Step("evaluate", 0).output)) or not driver.is_alive())
    try:
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        driver.join()
    finally:
        add_node(cluster, num_cpus=4)
    assert driver.exitcode == 0, (tmp_path / "lost.log").read_text()
    assert weights_of(store) == weights_of(micro)
    assert rows_of(store) == rows_of(micro)
