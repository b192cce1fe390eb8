"""Actors of a Ray that a run has started: where they are placed, and what the death of one costs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from magrpo.cluster import dealing
from magrpo.cluster.connection import Cluster, StartedActor, start_actor
from magrpo.cluster.dealing import MAX_RESTARTS, Crew, NotOpen
from magrpo.config.place import Place
from tests.cluster.clusters import list_handlers
from tests.processes import wait_until


class Echo:
    """An actor that returns what it is given, its niceness, and its share of the GPUs."""

    def repeat(self, word: str) -> str:
        return word

    def read_niceness(self) -> int:
        return os.nice(0)

    def list_gpus(self) -> list[int]:
        return list(ray.get_gpu_ids())


def test_ray_outlives_the_thread_that_has_started_it(cluster: Cluster, handlers: list[Any]) -> None:
    """The kernel would kill it at the end of that thread. The handlers of signals stay, too."""
    assert handlers == list_handlers()
    echo = start_actor(Echo, {})
    assert ray.get(echo.repeat.remote("here")) == "here"
    assert ray.get(echo.read_niceness.remote()) == os.nice(0), "as if it were in the run's process"


def test_a_sampler_and_a_rank_share_each_gpu_if_they_are_colocated(cluster: Cluster) -> None:
    """On two GPUs that the node only claims to have."""
    place = Place.model_validate({"colocate": True, "samplers": {"count": 2}, "ranks": {"count": 2}})
    samplers, ranks = (
        [start_actor(Echo, options) for options in cluster.choose_options(place, 2, 1)] for _ in range(2)
    )
    of_samplers, of_ranks = (ray.get([actor.list_gpus.remote() for actor in actors]) for actors in (samplers, ranks))
    assert sorted(of_samplers) == [[0], [1]]
    assert of_ranks == of_samplers
    ray.util.remove_placement_group(cluster._shared_gpus)  # later tests need all of the node's CPUs
    cluster._shared_gpus = None


@pytest.mark.usefixtures("cluster")
def test_a_run_joins_the_cluster_at_an_address() -> None:
    address = ray.get_runtime_context().gcs_address
    connect = f"from magrpo.cluster.connection import Cluster; Cluster('{address}').close()"
    subprocess.run([sys.executable, "-c", connect], check=True)


class CrewError(RuntimeError):
    """No actor is left."""


class Exhausted(RuntimeError):
    """The actor can do no more."""


class Worker(StartedActor):
    """Doubles numbers. It kills itself over negative ones, and is exhausted by 13 once for each folder.

    While there is a file ``broken``, it cannot be opened. While there is a file ``deadly``, it adds a line to it and
    kills itself when it is opened. While there is a file ``held``, it does not start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_open = False
        wait_until(lambda: not (folder / "held").exists())

    def open(self) -> str:
        if self._is_open:
            return "open"
        if (self._folder / "broken").exists():
            raise OSError("broken")
        if (self._folder / "deadly").exists():
            with (self._folder / "deadly").open("a") as deaths:
                deaths.write("dead\n")
            os.kill(os.getpid(), signal.SIGKILL)
        self._is_open = True
        return "open"

    def sleep(self) -> None:
        (self._folder / "asleep").touch()

    def is_open(self) -> bool:
        return self._is_open

    def work(self, number: int) -> int:
        if not self._is_open:
            raise NotOpen
        if number < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 13 and not (self._folder / "exhausted").exists():
            (self._folder / "exhausted").touch()
            raise Exhausted("thirteen")
        if number == 99:
            raise ValueError("ninety-nine")
        return 2 * number


def open_crew(cluster: Cluster, folder: Path, count: int = 2, max_restarts: int = MAX_RESTARTS) -> Crew:
    actors = [start_actor(Worker, {"max_restarts": max_restarts}, folder) for _ in range(count)]
    crew = Crew(cluster, "workers", actors, CrewError, retries_on=(Exhausted,))
    assert crew.open() == ["open"] * count
    return crew


def deal(crew: Crew, pieces: list[int]) -> dict[int, Any]:
    with closing(crew.deal(pieces)) as results:
        return {pieces[number]: result for number, result in results}


def test_a_piece_that_three_actors_die_over_is_given_up_and_others_are_done(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crew = open_crew(cluster, tmp_path)
    results = deal(crew, [1, 2, -1, 3, 13])
    lost = results.pop(-1)
    assert isinstance(lost, CrewError)
    assert re.search("several of the workers failed over the same work: .*(died|unavailable)", str(lost))
    assert results == {1: 2, 2: 4, 3: 6, 13: 26}, "13 is repeated"
    assert caplog.text.count("of the workers failed,") == 4, "each death costs the piece at work, and no other"
    assert deal(crew, list(range(8))) == {number: 2 * number for number in range(8)}
    crew.close()


def test_an_actor_that_is_restarted_is_opened_again_unless_it_cannot_be(cluster: Cluster, tmp_path: Path) -> None:
    """Between two batches; errors of the work itself are raised, and change nothing."""
    crew = open_crew(cluster, tmp_path, 1)
    kill_actor(crew.actors[0])
    assert deal(crew, [1, 2]) == {1: 2, 2: 4}
    with pytest.raises(ValueError, match="ninety-nine"):
        deal(crew, [1, 99])
    assert deal(crew, [1]) == {1: 2}
    (tmp_path / "broken").touch()
    with pytest.raises(CrewError, match="none of the workers is left"):
        deal(crew, [-1])
    crew.close()
    with pytest.raises(CrewError, match="the workers were closed"):
        deal(crew, [1])


def kill_actor(actor: Any) -> None:
    """Kill the process of an actor, and wait for its end."""
    ray.kill(actor, no_restart=False)
    wait_until(lambda: is_lost(actor))


def is_lost(actor: Any) -> bool:
    """Whether Ray is restarting an actor."""
    try:
        ray.get(actor.is_open.remote())
    except RayActorError:
        return True
    return False


def test_an_actor_that_starts_between_two_batches_is_opened_in_the_next_one(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its memory is for others, which do not wait for it."""
    crew = open_crew(cluster, tmp_path)
    restarted, other = crew.actors
    held = tmp_path / "held"
    held.touch()
    kill_actor(restarted)
    assert deal(crew, [1, 2]) == {1: 2, 2: 4}
    crew.call_present("sleep")
    assert (tmp_path / "asleep").exists()
    held.unlink()
    wait_until(lambda: not is_lost(restarted))
    assert [ray.get(restarted.is_open.remote()) for _ in range(100)] == [False] * 100
    held.touch()
    kill_actor(other)
    assert deal(crew, [1, 2]) == {1: 2, 2: 4}
    assert ray.get(restarted.is_open.remote())
    kill_actor(restarted)
    monkeypatch.setattr(dealing, "_JOIN_S", 0.0)
    with pytest.raises(CrewError, match="none of the workers is left"):
        deal(crew, [1])
    held.unlink()
    crew.close()


def test_an_actor_that_is_restarted_while_idle_is_opened_again_unless_it_cannot_be(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Within a batch; its piece has caused no failure."""
    crew = open_crew(cluster, tmp_path, 1)
    with closing(crew.deal([1, 2, 3])) as results:
        assert next(results) == (0, 2)
        restart_actor(crew.actors[0])
        assert next(results) == (1, 4)
        restart_actor(crew.actors[0])
        (tmp_path / "broken").touch()
        with pytest.raises(CrewError, match="none of the workers is left: broken"):
            next(results)
    assert "one of the workers could not be restarted: broken" in caplog.text
    assert "moves to others" not in caplog.text
    crew.close()


def restart_actor(actor: Any) -> None:
    """Kill the process of an actor, and wait until Ray has started another."""
    kill_actor(actor)
    wait_until(lambda: not is_lost(actor))


def test_an_actor_that_dies_too_often_while_it_opens_is_given_up(cluster: Cluster, tmp_path: Path) -> None:
    """At the start of a run, and when it is restarted. Its CPUs are free again, whoever keeps the error."""
    crew = open_crew(cluster, tmp_path, 1, max_restarts=1)
    deaths = tmp_path / "deadly"
    deaths.touch()
    with pytest.raises(CrewError, match=r"none of the workers is left: .*(died|unavailable)"):
        deal(crew, [-1])
    assert deaths.read_text().count("dead") == 1, "and once over the work"
    crew.close()
    deaths.write_text("")
    with pytest.raises(CrewError, match=r"one of the workers died: .*(died|unavailable)") as refusal:
        open_crew(cluster, tmp_path, 1, max_restarts=1)
    assert deaths.read_text().count("dead") == 2
    assert refusal.tb, "holds the actors' handles"
    wait_until(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"])
