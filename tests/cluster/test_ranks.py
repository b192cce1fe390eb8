"""Updates by ranks: the files of an update in one process, to the bit, whatever happens to a rank."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from magrpo.cluster.connection import Cluster
from magrpo.cluster.ranks import DEADLINE_S, RanksUpdates
from magrpo.config.place import Place
from magrpo.config.run import RunConfig, load_config
from magrpo.model.policy import Policy
from magrpo.run.files import samples_file
from magrpo.run.store import write_records
from magrpo.types import Sample
from magrpo.updates import UpdatesDied
from magrpo.updates.inline import InlineUpdates
from magrpo.updates.updater import NonFiniteLoss, Updater
from tests.processes import assert_all_end, find_actors
from tests.tiny import tiny_base
from tests.updates.updating import assert_same_steps, make_samples

EMBEDDED = Path(__file__).parents[2] / "pipelines" / "configs" / "embedded.toml"
NUM_UPDATES = 5
LR = 1e-3
Alone = tuple[dict[str, float], dict[str, str]]
"""Metrics of the last update, and the digests of its files."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, and folders of samples ``samples-1``, ``samples-2``, ..."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_base(folder / "base")
    for number in range(1, NUM_UPDATES + 1):
        write_samples(folder / f"samples-{number}", make_samples(2 * number), make_samples(2 * number + 1, groups=5))
    return folder


def write_samples(folder: Path, *samples: list[Sample]) -> None:
    folder.mkdir()
    for agent, of_agent in zip(("helper", "main"), samples, strict=True):
        write_records(folder / samples_file(agent), of_agent)


def make_config(folder: Path, lanes: int, weights: str = "lora", dtype: str = "float32") -> RunConfig:
    """Two agents with a KL term and two epochs, so that every exchange of the ranks happens."""
    agents = [f"agents.{i}.{key}" for i in range(2) for key in (f"model={folder / 'base'}", f"weights={weights}")]
    algo = ["algo.beta=0.1", "algo.update_epochs=2"]
    sizes = ["lora.rank=4", "rollout.max_new_tokens=16", "optim.micro_batch_tokens=40", f"optim.lr={LR}"]
    model = ["model.device=cpu", f"model.dtype={dtype}"]
    return load_config(EMBEDDED, [*agents, *algo, *sizes, *model, f"optim.lanes={lanes}"])


def make_place(num_ranks: int, shard: str = "none") -> Place:
    return Place.model_validate({"ranks": {"count": num_ranks, "shard": shard}})


def update_inline(config: RunConfig, folder: Path, out: Path) -> dict[str, float]:
    """Begin and take all updates in this process, ``out/0``, ``out/1``, ...; returns the last metrics."""
    policy = Policy.open(config.agents, config.model, config.lora, config.train.seed)
    updates = InlineUpdates(policy, config, out / "failed-batch")
    updates.begin(out / "0")
    metrics: dict[str, float] = {}
    for number in range(1, NUM_UPDATES + 1):
        metrics = updates.update(folder / f"samples-{number}", out / f"{number - 1}", out / f"{number}")
        updates.adopt(out / f"{number}")
    return metrics


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Of one process with one lane."""
    out = tmp_path_factory.mktemp("alone")
    metrics = update_inline(make_config(folder, lanes=1), folder, out)
    return metrics, digest_checkpoint(out / f"{NUM_UPDATES}")


def digest_checkpoint(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def open_ranks(
    cluster: Cluster, config: RunConfig, place: Place, out: Path, deadline_s: float = DEADLINE_S
) -> RanksUpdates:
    return RanksUpdates(cluster, place, config, out / "failed-batch", deadline_s)


def read_slowly(path: Path) -> Future[bytes]:
    """Keep the rank that writes ``path`` waiting for two seconds, in which the driver hears of the other ranks."""
    path.parent.mkdir()
    os.mkfifo(path)
    written = Future[bytes]()

    def read() -> None:
        time.sleep(2)
        written.set_result(path.read_bytes())

    threading.Thread(target=read, daemon=True).start()  # it waits for ever if the rank has been killed
    return written


def run_updates(
    updates: RanksUpdates, folder: Path, out: Path, numbers: range = range(1, NUM_UPDATES + 1)
) -> dict[str, float]:
    """Take updates from checkpoint to checkpoint, from the beginning where ``numbers`` start at 1."""
    metrics: dict[str, float] = {}
    if numbers[0] == 1:
        updates.begin(out / "0")
        updates.adopt(out / "0")
    for number in numbers:
        metrics = updates.update(folder / f"samples-{number}", out / f"{number - 1}", out / f"{number}")
        updates.adopt(out / f"{number}")
    return metrics


def test_agents_on_two_ranks_are_agents_in_one_process(
    folder: Path, cluster: Cluster, alone: Alone, tmp_path: Path
) -> None:
    config, reported = make_config(folder, lanes=1), list[int]()
    updates = open_ranks(cluster, config, make_place(2), tmp_path)
    assert run_updates(updates, folder, tmp_path) == alone[0]
    assert digest_checkpoint(tmp_path / f"{NUM_UPDATES}") == alone[1]
    updates.update(folder / "samples-1", tmp_path / "0", tmp_path / "again", reported.append)
    assert digest_checkpoint(tmp_path / "again") == digest_checkpoint(tmp_path / "1")
    assert sum(reported) == len(make_samples(2)) + len(make_samples(3, groups=5))
    huge = replace(make_samples(2)[0], advantage=1e39)
    write_samples(tmp_path / "broken", make_samples(2), [huge, *make_samples(3)])
    written = read_slowly(tmp_path / "failed-batch" / "update-2-main.jsonl")
    with pytest.raises(NonFiniteLoss, match=r"agent 'main'.*failed-batch/update-2-main.jsonl"):
        updates.update(tmp_path / "broken", tmp_path / "1", tmp_path / "never")
    assert b'"advantage":1e39' in written.result(60)
    assert_all_end(find_actors("Rank"))


@pytest.mark.slow
def test_one_two_and_four_ranks_write_the_same_files(folder: Path, cluster: Cluster, tmp_path: Path) -> None:
    """Begun on two ranks and resumed on four included."""
    config = make_config(folder, lanes=4)
    expected = update_inline(config, folder, tmp_path / "one")
    digests = digest_checkpoint(tmp_path / "one" / f"{NUM_UPDATES}")
    for num_ranks in (1, 2, 4):
        out = tmp_path / f"{num_ranks}"
        updates = open_ranks(cluster, config, make_place(num_ranks), out)
        assert run_updates(updates, folder, out) == expected
        assert digest_checkpoint(out / f"{NUM_UPDATES}") == digests
        if num_ranks == 4:
            (tmp_path / "2" / "3").rename(out / "from-two")
            updates.update(folder / "samples-4", out / "from-two", out / "4-again")
            assert digest_checkpoint(out / "4-again") == digest_checkpoint(out / "4")
        updates.close()
    assert_all_end(find_actors("Rank"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
def test_a_base_spread_over_two_ranks_gives_the_files_of_one_process(
    folder: Path, cluster: Cluster, tmp_path: Path, dtype: str
) -> None:
    """Even to the bit: gathered layers are the base's own, and gradients of adapters are added as ever."""
    config = make_config(folder, lanes=1, dtype=dtype)
    expected = update_inline(config, folder, tmp_path / "one")
    updates = open_ranks(cluster, config, make_place(2, shard="base"), tmp_path)
    assert run_updates(updates, folder, tmp_path) == expected
    assert digest_checkpoint(tmp_path / f"{NUM_UPDATES}") == digest_checkpoint(tmp_path / "one" / f"{NUM_UPDATES}")


def read_checkpoint(config: RunConfig, folder: Path) -> dict[str, Tensor]:
    """All weights and optimizer states of a checkpoint, by name, as a process of its own reads them."""
    updater = Updater.of(Policy.open(config.agents, config.model, config.lora, 0), config, folder)
    updater.load(folder)
    found = {}
    for agent, optimizer in updater.optimizers.items():
        for name, parameter in updater.policy.parameters(agent).items():
            found[f"{agent} {name}"] = parameter.detach()
            found |= {f"{agent} {name} {key}": value for key, value in optimizer.state[parameter].items()}
    return found


def assert_same_training(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], num_steps: int, gap: float = 1e-6, moments: float = 1e-5
) -> None:
    """The weights took the same steps; the moments, sums of gradients, are the same by the norm of each tensor."""
    assert ours.keys() == theirs.keys()
    summed = {name for name in theirs if "exp_avg" in name}
    for name in summed:
        assert float((ours[name] - theirs[name]).norm()) <= moments * float(theirs[name].norm()), name
    of_ours, of_theirs = ({name: state[name] for name in theirs.keys() - summed} for state in (ours, theirs))
    assert_same_steps(of_ours, of_theirs, num_steps, LR, gap)


@pytest.mark.slow
def test_full_weights_spread_over_ranks_are_those_of_one_process(
    folder: Path, cluster: Cluster, tmp_path: Path
) -> None:
    """What two ranks save, one process and four ranks load; what one process saves, two ranks load."""
    config = make_config(folder, lanes=4, weights="full")
    expected = update_inline(config, folder, tmp_path / "one")
    two, four = (tmp_path / "2", tmp_path / "4")
    updates = open_ranks(cluster, config, make_place(2, shard="base"), two)
    metrics = run_updates(updates, folder, two)
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    saved = {number: read_checkpoint(config, two / f"{number}") for number in (3, 4)}
    alone = read_checkpoint(config, tmp_path / "one" / "4")
    assert_same_training(saved[4], alone, num_steps=8)
    copy_checkpoint(updates, tmp_path / "one" / "4", two / "copy")
    torch.testing.assert_close(read_checkpoint(config, two / "copy"), alone, rtol=0, atol=0)
    updates.close()
    updates = open_ranks(cluster, config, make_place(4, shard="base"), four)
    copy_checkpoint(updates, two / "3", four / "copy")
    torch.testing.assert_close(read_checkpoint(config, four / "copy"), saved[3], rtol=0, atol=0)
    updates.update(folder / "samples-4", two / "3", four / "4")
    assert_same_training(read_checkpoint(config, four / "4"), saved[4], num_steps=2)
    updates.close()
    assert_all_end(find_actors("Rank"))


def copy_checkpoint(updates: RanksUpdates, source: Path, target: Path) -> None:
    """Have the ranks load a checkpoint and save it again."""
    updates._ask_ranks(None, source, target, None)


@pytest.mark.slow
def test_full_weights_in_bfloat16_stay_near_those_of_one_process(
    folder: Path, cluster: Cluster, tmp_path: Path
) -> None:
    config = make_config(folder, lanes=2, weights="full", dtype="bfloat16")
    update_inline(config, folder, tmp_path / "one")
    updates = open_ranks(cluster, config, make_place(2, shard="base"), tmp_path)
    run_updates(updates, folder, tmp_path, range(1, 3))
    of_ranks, alone = (read_checkpoint(config, path) for path in (tmp_path / "2", tmp_path / "one" / "2"))
    assert_same_training(of_ranks, alone, num_steps=4, gap=1e-4, moments=1e-2)


@pytest.mark.slow
def test_a_rank_that_fails_is_named_with_its_own_words(folder: Path, cluster: Cluster, tmp_path: Path) -> None:
    updates = open_ranks(cluster, make_config(folder, lanes=1), make_place(2), tmp_path)
    run_updates(updates, folder, tmp_path, range(1, 2))
    (tmp_path / "file").touch()
    with pytest.raises(UpdatesDied, match=r"rank 0 failed: NotADirectoryError: .*file/2"):
        updates.update(folder / "samples-2", tmp_path / "1", tmp_path / "file" / "2")
    assert_all_end(find_actors("Rank"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "shard", "words"),
    [
        (signal.SIGKILL, "none", "update rank [01] died: "),
        (signal.SIGKILL, "base", "update rank [01] died: "),
        (signal.SIGSTOP, "none", "rank [01] failed: .*[Tt]imed? ?out.*; rank [01] did not answer"),
    ],
)
def test_a_rank_that_dies_or_hangs_in_an_update_is_named(
    folder: Path,
    cluster: Cluster,
    alone: Alone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    shard: str,
    words: str,
) -> None:
    """The update is then taken again by new ranks, with the same result."""
    config, sent, deadline_s = make_config(folder, lanes=1), list[int](), DEADLINE_S
    if number == signal.SIGSTOP:
        deadline_s = 30.0
    else:  # a slow machine's Ray may be late with the news
        monkeypatch.setattr("magrpo.cluster.ranks._GRACE_S", 120.0)
    updates = open_ranks(cluster, config, make_place(2, shard), tmp_path, deadline_s)
    run_updates(updates, folder, tmp_path, range(1, 2))

    def strike(_: int) -> None:
        if not sent:
            sent.append(find_actors("Rank")[1].pid)
            os.kill(sent[0], number)

    write_samples(tmp_path / "many", make_samples(4), make_samples(5, groups=500))
    with pytest.raises(UpdatesDied, match=words):
        updates.update(tmp_path / "many", tmp_path / "1", tmp_path / "2", strike)
    assert_all_end(find_actors("Rank"))
    run_updates(updates, folder, tmp_path, range(2, NUM_UPDATES + 1))
    assert digest_checkpoint(tmp_path / f"{NUM_UPDATES}") == alone[1]
    updates.close()
