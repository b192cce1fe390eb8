"""Runs on a Ray cluster that are caught in the middle of a stage, and what is left of them on its nodes.

A stage is caught by stopping one of its processes, so that it cannot end before its node does.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from magrpo.process.children import list_family, send_signal
from magrpo.run.layout import Step
from tests.fleets.clusters import add_node
from tests.pipelines.micro import start
from tests.processes import assert_all_end

WORKERS = {"rollout": "vllm.entrypoints", "score": "ray::Jails", "update": "magrpo.updates.rank"}
"""What the command lines of a stage's processes contain."""


def hold_stages(folder: Path, stages: Sequence[str]) -> None:
    """Begin each of ``stages`` when the file ``go`` of its folder is there, and tell there that it is at work."""
    import magrpo.sandboxes.ray  # in the driver only
    import magrpo.updates.ranks

    from magrpo.progress.console import RunConsole

    magrpo.sandboxes.ray._CHUNK = (1, 1)  # else one node may get all programs
    start_step = RunConsole.start_step

    def start_held(self: RunConsole, step: Step) -> Callable[[int], None]:
        advance, signs = start_step(self, step), folder / step.folder
        if step.folder not in stages or signs.exists():
            return advance
        signs.mkdir(parents=True)
        wait_until((signs / "go").exists)

        def tell(finished: int) -> None:
            (signs / "began").touch()
            advance(finished)

        return tell

    do_job = magrpo.updates.ranks._Group.do_job

    def do_noticed(self: Any, *job: Any) -> dict[str, float]:
        """A rank without work of its own makes no progress before the one that is stopped."""
        for signs in folder.glob("*/update"):
            (signs / "began").touch()
        return do_job(self, *job)

    RunConsole.start_step = start_held  # type: ignore[method-assign,assignment]
    magrpo.updates.ranks._Group.do_job = do_noticed  # type: ignore[method-assign]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def list_work(cluster: Any) -> list[tuple[Any, psutil.Process, str]]:
    """Actors of this project and all below them: the node, the process and its command line."""
    found = []
    for node in cluster.worker_nodes:
        for child in psutil.Process(node.all_processes["raylet"][0].process.pid).children():
            if read_command(child).startswith(("ray::Jails", "ray::NodeKeeper")):
                found += [(node, process, read_command(process)) for process in (child, *list_family(child.pid))]
    return found


def read_command(process: psutil.Process) -> str:
    """The command line of a process; empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


class Driver(AbstractContextManager["Driver"]):
    """``magrpo train`` in a process of its own, held at some stages, which ends with the block."""

    def __init__(self, cluster: Any, folder: Path, name: str, arguments: Sequence[str], stages: Sequence[str]) -> None:
        self.cluster, self.name, self.log = cluster, name, folder / f"{name}.log"
        self.signs = folder / name
        self.process: multiprocessing.Process = start(arguments, self.log, partial(hold_stages, self.signs, stages))

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def catch(self, stage: str) -> Any:
        """Wait until ``stage`` is at work and cannot end; returns the node of which it waits for a process."""
        signs = self.signs / stage
        wait_until(lambda: signs.exists() or not self.process.is_alive())
        assert self.process.is_alive(), self.log.read_text()
        word = WORKERS[stage.partition("/")[2].partition(".")[0]]
        node, worker, _ = next(
            found for found in list_work(self.cluster)
            if word in found[2] and "keeper.py" not in found[2] and "torch.distributed.run" not in found[2]
        )  # fmt: skip
        is_actor = word == WORKERS["score"]
        send_signal([*([] if is_actor else [worker]), *list_family(worker.pid)], signal.SIGSTOP)
        (signs / "go").touch()
        wait_until(lambda: (signs / "began").exists() or not self.process.is_alive())
        assert self.process.is_alive(), self.log.read_text()
        return node

    def finish(self) -> str:
        """Wait for its end, which is a good one; returns what it said."""
        self.process.join()
        said = self.log.read_text()
        assert self.process.exitcode == 0, f"it ended with {self.process.exitcode} and said: {said}"
        return said


@contextmanager
def nothing_left(cluster: Any, what: str, node: Any = None) -> Iterator[None]:
    """The block ends all work on the cluster, or on one ``node``."""
    work = [process for at, process, _ in list_work(cluster) if node in (None, at)]
    assert work
    yield
    began = time.monotonic()
    assert_all_end(work)
    print(f"{what}: {len(work)} processes were gone after {time.monotonic() - began:.2f} s")


@contextmanager
def lose_node(cluster: Any, node: Any) -> Iterator[None]:
    """Lose a node, all of whose processes end; after the block there is a new one."""
    try:
        with nothing_left(cluster, "a lost node", node):
            cluster.remove_node(node, allow_graceful=False)
        yield
    finally:
        add_node(cluster, num_cpus=4)
