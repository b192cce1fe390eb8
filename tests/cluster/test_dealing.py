"""Dealing work to actors: what an actor's death costs, and what it does not."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray

from magrpo.cluster.connection import Cluster, start_actor
from magrpo.cluster.dealing import Crew, Lost, NotOpen


class CrewError(RuntimeError):
    """No actor is left."""


class Exhausted(RuntimeError):
    """The actor can do no more."""


class Worker:
    """Doubles numbers. It kills itself over negative ones, and is exhausted by 13 once for each file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_open = False

    @ray.method(max_task_retries=-1)
    def open(self) -> str:
        if (self._folder / "broken").exists():
            raise Exhausted("broken")
        self._is_open = True
        return "open"

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


def open_crew(cluster: Cluster, folder: Path, count: int = 2) -> Crew:
    actors = [start_actor(Worker, {"max_restarts": -1}, folder) for _ in range(count)]
    crew = Crew(cluster, "workers", actors, CrewError, restarts_on=(Exhausted,))
    assert crew.open() == ["open"] * count
    return crew


def deal(crew: Crew, pieces: list[int]) -> dict[int, Any]:
    with closing(crew.deal(pieces)) as results:
        return {pieces[number]: result for number, result in results}


def test_a_piece_that_three_actors_die_over_is_given_up_and_others_are_done(cluster: Cluster, tmp_path: Path) -> None:
    crew = open_crew(cluster, tmp_path)
    results = deal(crew, [1, 2, -1, 3, 13])
    lost = results.pop(-1)
    assert isinstance(lost, Lost)
    assert lost.message
    assert results == {1: 2, 2: 4, 3: 6, 13: 26}, "13 is repeated by a restarted actor"
    assert deal(crew, list(range(8))) == {number: 2 * number for number in range(8)}
    crew.close()


def test_an_actor_restarted_between_two_batches_is_opened_again_and_its_errors_are_raised(
    cluster: Cluster, tmp_path: Path
) -> None:
    crew = open_crew(cluster, tmp_path, 1)
    ray.kill(crew.actors[0], no_restart=False)
    ray.get(crew.actors[0].__ray_ready__.options(max_task_retries=-1).remote())
    assert deal(crew, [1, 2]) == {1: 2, 2: 4}
    with pytest.raises(ValueError, match="ninety-nine"):
        deal(crew, [1, 99])
    assert deal(crew, [1]) == {1: 2}
    crew.close()
    with pytest.raises(CrewError, match="the workers were closed"):
        deal(crew, [1])


def test_a_crew_whose_last_actor_cannot_be_restarted_has_failed(cluster: Cluster, tmp_path: Path) -> None:
    crew = open_crew(cluster, tmp_path, 1)
    (tmp_path / "broken").touch()
    with pytest.raises(CrewError, match="none of the workers is left"):
        deal(crew, [-1])
    crew.close()
