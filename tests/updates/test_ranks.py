"""Updates by ranks under torchrun: the files of an update in one process, to the bit, whatever happens to a rank."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from magrpo.config import RunConfig, load_config
from magrpo.fleets.local import LocalFleet
from magrpo.layout import samples_file
from magrpo.place import Place
from magrpo.plugins import ConfigError
from magrpo.policy import Policy
from magrpo.stages.work import NonFiniteLoss
from magrpo.store import write_records
from magrpo.types import Sample
from magrpo.updates import UpdatesDied
from magrpo.updates.inline import InlineUpdates
from magrpo.updates.ranks import RanksUpdates
from tests.stages.updating import make_samples
from tests.tiny import tiny_base

EMBEDDED = Path(__file__).parents[2] / "pipelines" / "configs" / "embedded.toml"
NUM_UPDATES = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, and folders of samples ``samples-1``, ``samples-2``, ..."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_base(folder / "base")
    for number in range(1, NUM_UPDATES + 1):
        write_samples(folder / f"samples-{number}", make_samples(2 * number), make_samples(2 * number + 1, groups=5))
    return folder


@pytest.fixture
def fleet() -> Iterator[LocalFleet]:
    fleet = LocalFleet()
    yield fleet
    fleet.close()


def write_samples(folder: Path, *samples: list[Sample]) -> None:
    folder.mkdir()
    for agent, of_agent in zip(("helper", "main"), samples, strict=True):
        write_records(folder / samples_file(agent), of_agent)


def make_config(folder: Path, lanes: int) -> RunConfig:
    """Two agents with a KL term and two epochs, so that every exchange of the ranks happens."""
    agents = [f"agents.{i}.model={folder / 'base'}" for i in range(2)]
    algo = ["algo.beta=0.1", "algo.update_epochs=2"]
    sizes = ["lora.rank=4", "rollout.max_new_tokens=16", "optim.micro_batch_tokens=40", "optim.lr=1e-3"]
    return load_config(EMBEDDED, [*agents, *algo, *sizes, f"optim.lanes={lanes}", "model.device=cpu"])


def make_place(num_ranks: int, **update: Any) -> Place:
    return Place.model_validate({"update": {"ranks": num_ranks, **update}})


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


def digest_checkpoint(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def open_ranks(config: RunConfig, place: Place, fleet: LocalFleet, out: Path) -> RanksUpdates:
    return RanksUpdates(config, place, fleet, out / "failed-batch", out / "logs")


def find_ranks() -> dict[int, psutil.Process]:
    """The processes of ranks that this process has started, by number."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        command = process.cmdline()
        if "magrpo.updates.rank" in command and "torch.distributed.run" not in command:
            found[int(process.environ()["RANK"])] = process
    return found


def test_a_number_of_ranks_that_does_not_divide_the_work_is_refused(folder: Path, fleet: LocalFleet) -> None:
    with pytest.raises(ConfigError, match="update.ranks = 4 must divide optim.lanes = 1"):
        open_ranks(make_config(folder, lanes=1), make_place(4), fleet, folder)


def test_agents_on_two_ranks_are_agents_in_one_process(folder: Path, fleet: LocalFleet, tmp_path: Path) -> None:
    """A rank that is killed, and one that stops, are named; the update after each of them gives the same bits."""
    config, reported = make_config(folder, lanes=1), list[int]()
    expected = update_inline(config, folder, tmp_path / "one")
    updates = open_ranks(config, make_place(2, deadline_s=120), fleet, tmp_path)
    updates.begin(tmp_path / "0")
    updates.adopt(tmp_path / "0")
    for number in range(1, NUM_UPDATES + 1):
        job = (folder / f"samples-{number}", tmp_path / f"{number - 1}", tmp_path / f"{number}")
        if number in (2, 4):
            find_ranks()[1].send_signal(signal.SIGKILL)
            with pytest.raises(UpdatesDied, match=r"update rank 1 was killed by SIGKILL, at: .*logs/rank-1\.\d\.log"):
                updates.update(*job)
            assert not find_ranks()
        reported.clear()
        metrics = updates.update(*job, reported.append)
        updates.adopt(job[2])
    assert metrics == expected
    assert sum(reported) == len(make_samples(2 * NUM_UPDATES)) + len(make_samples(1, groups=5))
    assert digest_checkpoint(tmp_path / str(NUM_UPDATES)) == digest_checkpoint(tmp_path / "one" / str(NUM_UPDATES))
    updates.close()
    assert not find_ranks()
