"""``Crew``: equal actors that pieces of work are dealt to; a piece whose actor dies goes to another one.

Ray restarts an actor that dies, on another node if its own is lost, and repeats ``open`` until the actor has started.
Ray could also repeat the work (``max_task_retries``), but only on the same actor: for ever if no node has room for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from magrpo.cluster.connection import Cluster, describe_ray_error

log = logging.getLogger(__name__)
MAX_RESTARTS = 5
"""Number of restarts after which Ray gives an actor up; more than one piece of work may cause."""
_MAX_FAILURES = 3
"""Failures of actors that one piece of work may cause."""
_JOIN_S = 900.0
"""Seconds to wait for a restarted actor when no other is left."""
_POLL_S = 0.5


class NotOpen(Exception):
    """Raised by ``work`` of an actor that is not open: Ray has restarted it, or what it had opened has died."""


@dataclass(eq=False)
class Crew:
    """Actors with the methods ``open()``, which does nothing in an actor that is open, and ``work(piece)``.

    Ray may restart an actor at any time. So each batch begins with ``open``, and an actor whose ``work`` raises
    :class:`NotOpen` is opened again. Between batches nothing is opened: an engine that loads would take the memory of
    an update.
    """

    cluster: Cluster
    name: str
    """Of the actors, in messages: ``samplers``."""
    actors: Sequence[Any]
    """An actor that may have several pieces at the same time is listed as often."""
    error: type[Exception]
    """Raised if no actor is left, or the run ends."""
    retries_on: tuple[type[Exception], ...] = ()
    """Errors of ``work`` after which a piece is dealt again, as if its actor had died."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that deals."""
    _is_closed: bool = False

    def open(self) -> list[Any]:
        """Wait for all actors; return their answers to ``open``.

        Raises their errors, or ``error`` if one has no place or is given up, and kills the actors.
        """
        try:
            return self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> list[Any]:
        answers: list[Any] = []
        with self._hold() as check_open:
            try:
                self.cluster.wait_for_places({*self.actors}, self.name, check_open)
                openings = [_start_opening(actor) for actor in self.actors]
                while openings:
                    done, openings = ray.wait(openings, timeout=_POLL_S)
                    check_open()
                    answers += ray.get(done)
            except TimeoutError as error:
                raise self.error(str(error)) from None
            except RayTaskError as error:
                raise error.cause from None
            except RayActorError as error:
                raise self.error(f"one of the {self.name} died: {describe_ray_error(error)}") from None
        return answers

    def call_present(self, method: str) -> None:
        """Call a method of all actors but those that Ray is restarting. Raises their errors."""
        with self._hold() as check_open:
            # of an actor that is being restarted, such a call fails at once, because it is not to be repeated
            calls = [getattr(actor, method).remote() for actor in self.actors]
            while ray.wait(calls, num_returns=len(calls), timeout=_POLL_S)[1]:
                check_open()
            for call in calls:
                try:
                    ray.get(call)
                except RayTaskError as error:
                    raise error.cause from None
                except RayActorError as error:
                    log.info("one of the %s is lost: %s", self.name, describe_ray_error(error))

    def deal(
        self, pieces: Sequence[Any], watch: Callable[[Sequence[tuple[Any, int]]], None] = lambda _: None
    ) -> Generator[tuple[int, Any], None, None]:
        """Yield the number of each piece with its result, in the order in which they are done.

        The result of a piece over which three actors failed is an ``error`` that says so. ``watch`` is called now and
        then with the actors at work and the numbers of their pieces. Close the generator: it holds the connection to
        Ray.
        """
        waiting, failures = deque(range(len(pieces))), Counter[int]()
        idle, at_work = deque[Any](), dict[Any, tuple[Any, int]]()
        with self._lock, self._hold() as check_open, self._open_actors() as openings:
            since = time.monotonic()
            while waiting or at_work:
                while waiting and idle:
                    actor, number = idle.popleft(), waiting.popleft()
                    at_work[actor.work.remote(pieces[number])] = actor, number
                ready, _ = ray.wait([*at_work, *openings], timeout=_POLL_S)
                check_open()
                if at_work:
                    since = time.monotonic()
                if not ready:
                    if time.monotonic() > since + _JOIN_S:
                        raise self.error(f"none of the {self.name} is left")
                    watch(list(at_work.values()))
                    continue
                [done] = ready
                if done in openings:
                    idle += self._admit(openings.pop(done), done)
                    continue
                actor, number = at_work.pop(done)
                try:
                    result = ray.get(done)
                except RayTaskError as error:
                    if isinstance(error.cause, NotOpen):
                        openings[_start_opening(actor)] = actor
                        waiting.appendleft(number)
                        continue
                    if not isinstance(error.cause, self.retries_on):
                        raise error.cause from None
                    message = str(error.cause)
                except RayActorError as error:
                    message = describe_ray_error(error)
                else:
                    idle.append(actor)
                    yield number, result
                    continue
                log.warning("one of the %s failed, its work moves to others: %s", self.name, message)
                openings |= {_start_opening(other): other for other in (actor, *idle)}  # which may have died with it
                idle.clear()
                failures[number] += 1
                if failures[number] < _MAX_FAILURES:
                    waiting.append(number)
                else:
                    yield number, self.error(f"several of the {self.name} failed over the same work: {message}")

    @contextmanager
    def _open_actors(self) -> Iterator[dict[Any, Any]]:
        """Yield the actors that are being opened, by the call; at the end of the block, cancel the calls left there."""
        openings = {_start_opening(actor): actor for actor in self.actors}
        try:
            yield openings
        finally:
            for opening in openings:
                ray.cancel(opening)

    def _admit(self, actor: Any, opening: Any) -> list[Any]:
        """The actor, which can work now; no actor if it could not be opened, which is then killed."""
        try:
            ray.get(opening)
        except (RayTaskError, RayActorError) as error:
            reason = describe_ray_error(error.cause if isinstance(error, RayTaskError) else error)
            log.warning("one of the %s could not be restarted: %s", self.name, reason)
            self.actors = [other for other in self.actors if other is not actor]
            ray.kill(actor)
            if not self.actors:
                raise self.error(f"none of the {self.name} is left: {reason}") from None
            return []
        return [actor]

    def close(self) -> None:
        """Kill the actors, and end calls of other threads. May be called twice."""
        try:
            with self._hold():
                self._is_closed = True
                for actor in self.actors:
                    ray.kill(actor)
        except self.error:  # closed already
            return

    @contextmanager
    def _hold(self) -> Iterator[Callable[[], None]]:
        """As :meth:`Cluster.hold`; the function refuses after :meth:`close`, too."""
        refusal = self.error(f"the {self.name} were closed")

        def check_open() -> None:
            if self._is_closed:
                raise refusal from None
            check_connection()

        with self.cluster.hold(refusal) as check_connection:
            check_open()
            yield check_open


def _start_opening(actor: Any) -> Any:
    """Call ``open`` of an actor as soon as Ray has started it, again if it dies meanwhile, until it is given up."""
    # Ray counts calls of an actor that has not started among the retries, so they must be without end.
    return actor.open.options(max_task_retries=-1).remote()
