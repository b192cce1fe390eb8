"""``Cluster``: the connection of a run to Ray, which it starts on this machine unless it is given an address."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magrpo.config.place import Place
from magrpo.errors import ConfigError, first_line

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

log = logging.getLogger(__name__)
CPUS = 0.01
"""CPUs that an actor asks for: nearly none, but a node that offers none, such as the driver's, gets no actor."""
_PLACEMENT_S = 900.0
"""Seconds within which actors must get their places; a cluster that grows on demand has to start nodes in it."""
_WARNING_S = 60.0
"""Seconds after which a warning says that actors have not started yet."""
_CONNECT_S = 30.0
_POLL_S = 0.2
"""Seconds between two looks at whether another thread has closed the connection."""


class Cluster:
    """A connection to Ray. Several threads may use it; :meth:`close` ends their calls.

    Raises ConfigError if Ray is not installed, or no cluster answers at ``address`` (empty: start Ray here), or Ray
    does not start in time.
    """

    def __init__(self, address: str) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("the cluster file (place) needs Ray, which is not installed: pip install 'magrpo[ray]'")
        if address:
            _use_token()
        import ray  # takes a second, and is optional

        self._is_closed = False
        self._num_calls = 0
        self._changed = threading.Condition()
        self._shared_gpus: PlacementGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        """That of the connection; None if this process had one already."""
        if not ray.is_initialized():
            try:
                self._thread = _connect_in_thread(address)
            except _StartedTooSlowly:
                log.warning("Ray did not start in time; starting it once more")
                self._thread = _connect_in_thread(address)

    @contextmanager
    def hold(self, refusal: Exception) -> Iterator[Callable[[], None]]:
        """Keep the connection open during the block, which must use Ray nowhere else: Ray aborts a process that calls
        it after its shutdown.

        Yields a function for the block to call now and then. After :meth:`close` it raises ``refusal``, and so does a
        new block.
        """

        def check_open() -> None:
            if self._is_closed:
                raise refusal from None

        with self._changed:
            check_open()
            self._num_calls += 1
        try:
            yield check_open
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def wait_for_places(self, actors: Collection[Any], name: str, check_open: Callable[[], None]) -> None:
        """Wait until Ray has placed and started all actors.

        Raises TimeoutError, with the free resources, or ConfigError if the cluster may not answer this process.
        """
        import ray  # loaded already

        began, has_warned = time.monotonic(), False
        ready = [actor.answer.remote() for actor in actors]
        while ray.wait(ready, num_returns=len(ready), timeout=_POLL_S)[1]:
            check_open()
            waited_s = time.monotonic() - began
            if waited_s < _WARNING_S or (has_warned and waited_s < _PLACEMENT_S):
                continue
            free = ray.available_resources()  # type: ignore[no-untyped-call]
            room = f"the cluster has {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs free"
            if waited_s >= _PLACEMENT_S:
                raise TimeoutError(f"no room for {len(actors)} {name} after {_PLACEMENT_S:g} s; {room}")
            log.warning("waiting for %d %s to start, at most %g s; %s", len(actors), name, _PLACEMENT_S, room)
            has_warned = True
        if os.environ.get("RAY_AUTH_MODE") == "token":
            _check_answers(ready)

    def choose_options(self, place: Place, count: int, gpus: int) -> list[dict[str, Any]]:
        """Options of ``ray.remote`` that place ``count`` samplers or ranks, each on ``gpus`` GPUs.

        With ``place.colocate``, a sampler and a rank of the same number share a GPU.
        """
        from ray.util.placement_group import placement_group  # loaded already
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not place.colocate:
            return [{"num_gpus": gpus, "scheduling_strategy": "DEFAULT" if gpus else "SPREAD"}] * count
        if self._shared_gpus is None:
            num_gpus = max(place.samplers.count, place.ranks.count)
            self._shared_gpus = placement_group([{"GPU": 1, "CPU": 2 * CPUS}] * num_gpus)
        strategies = [PlacementGroupSchedulingStrategy(self._shared_gpus, number) for number in range(count)]
        return [{"num_gpus": 0.5, "scheduling_strategy": strategy} for strategy in strategies]

    def close(self) -> None:
        """End the calls of other threads and leave the cluster; Ray then kills all actors. May be called twice."""
        import ray  # loaded already

        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.wait_for(lambda: self._num_calls == 0)
        if self._thread is not None:
            ray.shutdown()
            self._thread.shutdown()


class StartedActor:
    """Base of the classes of actors."""

    def answer(self) -> None:
        """Do nothing: the answer shows that Ray has started the actor."""


def start_actor(kind: type, options: Mapping[str, Any], *arguments: object) -> Any:
    """Start an actor of the class ``kind``; ``options`` are those of ``ray.remote``.

    Calls that are waiting at the same time may be executed in any order.
    """
    import ray  # loaded already

    # In order, a restarted actor would wait for calls that went to the process before it: after 30 s Ray gives them up
    # and with them all calls that have arrived, as if the actor had died again.
    defaults = {"num_cpus": CPUS, "allow_out_of_order_execution": True}
    actor_class: Any = ray.remote(**{**defaults, **options})(kind)
    return actor_class.remote(*arguments)


def decide_gpus(asked: int | None, device: str) -> int:
    """The number of GPUs of an actor: ``asked``, or 1 if models run on a GPU by ``model.device``."""
    import torch  # half a second

    if asked is not None:
        return asked
    return int(device == "cuda" or (device == "auto" and torch.cuda.is_available()))


def prepare_actor(num_threads: int, gpus: int) -> None:
    """Let this actor compute with as many threads as the driver, since sums on a CPU depend on their number.

    Call it in each method that computes: PyTorch keeps the number by thread.
    """
    os.environ["OMP_NUM_THREADS"] = str(num_threads)  # for processes that the actor starts; Ray has set it to 1
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch  # reads the variables

    torch.set_num_threads(num_threads)


def describe_ray_error(error: Exception) -> str:
    """Ray's words about a dead actor or node, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:400]


def _use_token() -> None:
    """Show this user's token, if there is one, to a cluster at a given address, which may ask for it.

    Ray writes the token when it first starts on a machine; from then on, ``ray start`` makes clusters that ask for it,
    but a driver that is given an address does not show it by itself. A cluster that asks for none cannot call such a
    driver back (:func:`_check_answers`). Ray reads the variable when it is imported; set later, it would reach only the
    processes that Ray starts.
    """
    if "ray" not in sys.modules and (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _check_answers(answers: list[Any]) -> None:
    """Raise ConfigError if Ray has ended actors at once because it could not ask this process, which wants a token."""
    import ray  # loaded already
    from ray.exceptions import RayActorError

    for answer in answers:
        try:
            ray.get(answer)
        except RayActorError as error:  # others show in the next call
            if "never ran" in str(error):
                raise ConfigError(
                    "the Ray cluster asks for no token, but this process does, because this user has a file "
                    "~/.ray/auth_token: set the environment variable RAY_AUTH_MODE=disabled"
                ) from None


class _StartedTooSlowly(ConfigError):
    """Ray gave up: its agents may take 15 s to start and a node 30 s, which no setting changes."""


def _connect_in_thread(address: str) -> ThreadPoolExecutor:
    """Connect to Ray in a new thread.

    The kernel kills the Ray that this process starts, in full or in part, when the thread ends that has started it.
    Outside the main thread Ray leaves the handlers of signals alone, too.
    """
    thread = ThreadPoolExecutor(1, "magrpo-ray")
    try:
        thread.submit(_connect, address).result()
    except BaseException:
        thread.shutdown()
        raise
    return thread


def _connect(address: str) -> None:
    import ray  # loaded already

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address:
        # By default Ray's workers have a niceness of 15: beside other programs a run would wait for its samplers.
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises no narrower type
            if "timed out during startup" not in str(error):
                raise
            raise _StartedTooSlowly(
                "Ray did not start on this machine in time: run fewer programs beside it, or see why in "
                "/tmp/ray/session_latest/logs/raylet.out"
            ) from None
        return
    try:
        _check_port(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"address = {address!r}: no Ray cluster answers there ({first_line(error)}); make "
            f"this machine a node of it with `ray start --address=HEAD:6379 --num-cpus=0`, and copy the head's "
            f"~/.ray/auth_token here if it has one"
        ) from None


def _check_port(address: str) -> None:
    """Raise OSError if nothing listens at ``HOST:PORT``, for which Ray would wait many minutes; no-op for ``auto``."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
