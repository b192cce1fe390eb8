"""``Crew``: equal actors that pieces of work are dealt to; a piece whose actor dies goes to another one.

Ray restarts an actor that dies, on another node if its own is lost. Ray could also repeat its calls
(``max_task_retries``), but would wait for the restarted actor with them, for ever if no node has room for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from magrpo.cluster.connection import Cluster, describe_ray_error

log = logging.getLogger(__name__)
_MAX_DEATHS = 3
"""Deaths of actors that one piece of work, or opening an actor, may cause."""
_JOIN_S = 900.0
"""Seconds to wait for a restarted actor when no other is left."""
_POLL_S = 0.5


class NotOpen(RuntimeError):
    """Raised by an actor's ``work`` if Ray has restarted the actor since it was opened."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A piece of work that was given up, and why."""

    message: str


@dataclass(eq=False)
class Crew:
    """Actors with the methods ``open()``, which a restarted actor needs again, and ``work(piece)``.

    Ray may restart an actor at any time, also between the end of ``open`` and the next piece. So ``work`` raises
    :class:`NotOpen` in an actor that is not open; the crew then opens the actor and deals the piece again.
    """

    cluster: Cluster
    name: str
    """Of the actors, in messages: ``samplers``."""
    actors: Sequence[Any]
    error: type[Exception]
    """Raised if no actor is left, or the run ends."""
    restarts_on: tuple[type[Exception], ...] = ()
    """Errors of ``work`` after which an actor is restarted, as if it had died."""
    pieces_at_once: int = 1
    """Number of pieces that an actor may have at the same time."""
    _starts: dict[Any, Any] = field(default_factory=dict)
    """Actors that Ray has yet to start, by the reference to their start."""
    _openings: dict[Any, Any] = field(default_factory=dict)
    """Actors that are being opened, by the reference to the end of ``open``."""
    _deaths: Counter[Any] = field(default_factory=Counter)
    """Deaths of actors since they were last open."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that deals."""
    _is_closed: bool = False

    def open(self) -> list[Any]:
        """Wait for all actors; return their answers to ``open``.

        Raises their errors, or ``error`` if one dies three times, and kills the actors.
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
                self.cluster.wait_for_places(self.actors, self.name, check_open)
            except TimeoutError as error:
                raise self.error(str(error)) from None
            for actor in self.actors:
                self._open_actor(actor)
            while self._starts or self._openings:
                done = self._wait_for_any([])
                check_open()
                try:
                    answers += self._finish_opening(done) if done else []
                except RayTaskError as error:
                    raise error.cause from None
                except RayActorError as error:
                    raise self.error(f"one of the {self.name} died: {describe_ray_error(error)}") from None
        return answers

    def call_present(self, method: str) -> None:
        """Call a method of all actors; one that is lost is left to :meth:`deal`, which replaces it. Raises others."""
        with self._hold() as check_open:
            references = [getattr(actor, method).remote() for actor in self.actors]
            while ray.wait(references, num_returns=len(references), timeout=_POLL_S)[1]:
                check_open()
            for reference in references:
                try:
                    ray.get(reference)
                except RayTaskError as error:
                    raise error.cause from None
                except RayActorError as error:
                    log.info("one of the %s is lost: %s", self.name, describe_ray_error(error))

    def deal(
        self, pieces: Sequence[Any], watch: Callable[[Sequence[tuple[Any, int]]], None] = lambda _: None
    ) -> Generator[tuple[int, Any], None, None]:
        """Yield the number of each piece with its result, or :class:`Lost`, in the order in which they are done.

        ``watch`` is called now and then with the actors at work and the numbers of their pieces. Close the generator:
        it holds the connection to Ray.
        """
        waiting, deaths = deque(range(len(pieces))), Counter[int]()
        at_work: dict[Any, tuple[Any, int]] = {}
        with self._lock, self._hold() as check_open:
            while waiting or at_work:
                for actor in self._list_free([actor for actor, _ in at_work.values()]):
                    if waiting:
                        number = waiting.popleft()
                        at_work[actor.work.remote(pieces[number])] = (actor, number)
                done = self._wait_for_one(at_work, check_open, lambda: watch(list(at_work.values())))
                if done is None:
                    continue
                actor, number = at_work.pop(done)
                try:
                    result = ray.get(done)
                except RayTaskError as error:
                    if isinstance(error.cause, NotOpen):
                        self._open_actor(actor)
                        waiting.appendleft(number)
                        continue
                    if not isinstance(error.cause, self.restarts_on):
                        raise error.cause from None
                    message = str(error.cause)
                    ray.kill(actor, no_restart=False)
                except RayActorError as error:
                    message = describe_ray_error(error)
                else:
                    yield number, result
                    continue
                check_open()
                log.warning("one of the %s was lost, its work moves to others: %s", self.name, message)
                self._open_actor(actor)
                deaths[number] += 1
                if deaths[number] < _MAX_DEATHS:
                    waiting.append(number)
                else:
                    yield number, Lost(message)

    def _open_actor(self, actor: Any) -> None:
        """Let :meth:`_wait_for_any` open an actor once Ray has started it, unless that is under way."""
        if actor not in [*self._starts.values(), *self._openings.values()]:
            # Ray counts calls of an actor that has not started among the retries, so they must be without end; a call
            # of ``open`` must end with its actor.
            self._starts[actor.__ray_ready__.options(max_task_retries=-1).remote()] = actor

    def _wait_for_any(self, at_work: Iterable[Any]) -> Any:
        """Wait for the end of a piece or of an opening, and return its reference; None after a moment without one.

        Actors that have started meanwhile are opened. Ray must not do so by itself: the work may have ended by then,
        and an engine that loads would take the memory of an update.
        """
        ready, _ = ray.wait([*self._starts, *at_work, *self._openings], timeout=_POLL_S)
        done = ready[0] if ready else None
        if done not in self._starts:
            return done
        actor = self._starts.pop(done)
        self._openings[actor.open.remote()] = actor
        return None

    def _finish_opening(self, opening: Any) -> list[Any]:
        """Return the answer of an actor to ``open``; none if the actor has died and is opened again.

        Raises RayTaskError with the error of ``open``, or RayActorError if the actor has died three times.
        """
        actor = self._openings.pop(opening)
        try:
            answer = ray.get(opening)
        except RayActorError as error:
            self._deaths[actor] += 1
            if self._deaths[actor] == _MAX_DEATHS:
                raise
            log.warning("one of the %s died while it opened: %s", self.name, describe_ray_error(error))
            self._open_actor(actor)
            return []
        del self._deaths[actor]
        return [answer]

    def close(self) -> None:
        """Kill the actors, and end calls of other threads. May be called twice."""
        try:
            with self._hold():
                self._is_closed = True
                for actor in self.actors:
                    ray.kill(actor)
        except self.error:  # closed already
            return

    def _hold(self) -> Any:
        refusal = self.error(f"the {self.name} were closed")
        if self._is_closed:
            raise refusal
        return self.cluster.hold(refusal)

    def _list_free(self, busy: Sequence[Any]) -> list[Any]:
        """The actors that may get another piece, those without work first."""
        absent = [*self._starts.values(), *self._openings.values()]
        loads = {actor: busy.count(actor) for actor in self.actors if actor not in absent}
        free = [actor for actor, load in loads.items() for _ in range(self.pieces_at_once - load)]
        return sorted(free, key=lambda actor: loads[actor])

    def _wait_for_one(self, at_work: dict[Any, Any], check_open: Callable[[], None], watch: Callable[[], None]) -> Any:
        """Wait until one piece is done and return its reference, or None when a restarted actor has joined."""
        began = time.monotonic()
        while True:
            done = self._wait_for_any(at_work)
            check_open()
            if self._is_closed:
                raise self.error(f"the {self.name} were closed")
            if done in self._openings:
                self._admit(done)
                return None
            if done:
                return done
            if not at_work and time.monotonic() > began + _JOIN_S:
                raise self.error(f"none of the {self.name} is left")
            watch()

    def _admit(self, opening: Any) -> None:
        """Let a restarted actor work again, open it again if it has died, or leave it out if it cannot be opened."""
        actor = self._openings[opening]
        try:
            self._finish_opening(opening)
        except (RayTaskError, RayActorError) as error:
            log.warning("one of the %s could not be restarted: %s", self.name, describe_ray_error(error))
            self.actors = [other for other in self.actors if other is not actor]
            ray.kill(actor)
            if not self.actors:
                raise self.error(f"none of the {self.name} is left: {describe_ray_error(error)}") from None
