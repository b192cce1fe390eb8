"""``RayFleet``: starts and watches the processes of a run on the nodes of a Ray cluster.

Ray chooses the node and the GPUs and says when a node is gone. The command itself is a plain process under a keeper, in
an actor that does nothing else. No tensor and no model goes through Ray.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from magrpo.fleets import Job, ProcessDied
from magrpo.fleets.local import Assignment, find_free_ports, make_refusal, stop_together
from magrpo.fleets.process import Kept, read_last_words, start_kept
from magrpo.plugins import ConfigError

log = logging.getLogger(__name__)
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_CPUS = 0.01
"""What an actor asks for: nearly nothing, but never a place on a node that offers no CPUs, such as the driver's."""
_PLACEMENT_S = 900.0
"""Seconds within which an actor must get its place; a cluster that grows on demand has to start nodes in it."""
_KNOCK_S = 30.0
"""Seconds within which a cluster must take a connection, and greet."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What an HTTP/2 client sends first, RFC 9113 section 3.4; Ray's servers speak gRPC and answer it at once."""
_CALL_S = 60.0
"""Seconds within which an actor that has its place must answer."""
_MAX_LOST_PLACES = 3
"""Attempts to start a job whose places are lost before it begins: Ray gives places on a node until it knows its end."""
_KILLED = 128 + signal.SIGKILL
_POLL_S = 0.5
"""Seconds between two looks at whether a fleet that waits for places was closed."""
_TAIL_BYTES = 65_536

_users = 0
_users_lock = threading.Lock()


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Put back the handlers that ``ray.init`` replaces; it does so in the main thread only."""
    saved = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in saved.items():
                signal.signal(number, handler)


def connect_cluster(address: str) -> Any:
    """Connect this process to a Ray cluster, whose node it must be; returns the module ``ray``.

    Each call needs one of :func:`disconnect_cluster`. Raises ConfigError if Ray is not installed or no cluster answers.
    """
    global _users
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("fleet.kind = 'ray': Ray is not installed; pip install 'magrpo[ray]', or use kind = 'local'")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray  # heavy: seconds

    with _users_lock:
        if not ray.is_initialized():
            try:
                _knock_at(address)
                with _keep_signal_handlers():
                    ray.init(address=address, log_to_driver=False, configure_logging=False)
                # Else Ray prints news of lost nodes to standard output, whatever log_to_driver says.
                ray._private.worker._worker_logs_enabled = False
            except (OSError, RuntimeError) as error:
                raise ConfigError(
                    f"fleet.address = {address!r}: no Ray cluster answers there ({str(error).splitlines()[0]}); make "
                    f"this machine a node of it with `ray start --address=HEAD:6379 --num-cpus=0`"
                ) from None
        _users += 1
    return ray


def _knock_at(address: str) -> None:
    """Raise OSError if nothing answers at ``HOST:PORT``, for which Ray would wait many minutes; no-op for ``auto``."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") in ("0", "false"):
            connection.sendall(_GREETING)
            if not connection.recv(1):
                raise ConnectionError("the process that listens there is not a Ray cluster")


def disconnect_cluster() -> None:
    """Leave the cluster once its last user in this process has called this."""
    global _users
    with _users_lock:
        _users -= 1
        if not _users:
            import ray  # heavy: seconds, but it is loaded already

            ray.shutdown()


class Calls:
    """The calls in progress of what another thread may close.

    A user of a cluster leaves it after its last call: Ray ends a process that calls it after its shutdown, or connects
    it again.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._count = 0
        self._changed = threading.Condition()

    @contextmanager
    def enter(self, refusal: Exception) -> Iterator[None]:
        """A call lasts as long as the block. Raises ``refusal`` after :meth:`close`."""
        with self._changed:
            if self.is_closed:
                raise refusal
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Let no call begin any more; returns whether this was the first time."""
        with self._changed:
            was_closed, self.is_closed = self.is_closed, True
        return not was_closed

    def wait(self) -> None:
        """Wait for the end of all calls."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)


class _PlaceLost(ProcessDied):
    """A node ended between the choice of a place on it and the start of the command there."""


class RayFleet:
    """A :class:`magrpo.fleets.Fleet` on a Ray cluster that this process's machine is a node of."""

    def __init__(self, address: str = "auto", placement_s: float = _PLACEMENT_S) -> None:
        """Connect to the cluster at ``address``. Raises ConfigError."""
        self._ray = connect_cluster(address)
        self._placement_s = placement_s
        self._starts = Calls()
        self._running: list[RayProcess] = []
        self.host = str(self._ray.util.get_node_ip_address())

    def start(self, job: Job) -> Sequence[RayProcess]:
        """Start all copies of ``job`` once each has its place.

        Raises ProcessDied if one cannot be placed in time, or the fleet is closed.
        """
        with self._starts.enter(make_refusal(job)):
            for more_attempts in reversed(range(_MAX_LOST_PLACES)):
                try:
                    copies = self._start_once(job)
                    break
                except _PlaceLost as error:
                    if not more_attempts:
                        raise
                    log.warning("%s; starting it again elsewhere", error)
            self._running += copies
        return copies

    def close(self) -> None:
        """Stop everything that was started and leave the cluster. May be called twice."""
        if self._starts.close():
            self._starts.wait()
            stop_together(self._running)
            disconnect_cluster()

    def _start_once(self, job: Job) -> list[RayProcess]:
        """Start all copies or none. Raises ProcessDied."""
        ray = self._ray
        options: dict[str, Any] = {"num_cpus": _CPUS, "num_gpus": job.gpus, "max_concurrency": 4}
        if not job.gpus:
            options["scheduling_strategy"] = "SPREAD"
        with ExitStack() as undo:
            actors = []
            for _ in range(job.count):
                actors.append(ray.remote(NodeKeeper).options(**options).remote())
                undo.callback(ray.kill, actors[-1])
            self._warn_of_missing_gpus(job)
            addresses = self._place(job, [actor.find_address.remote() for actor in actors])
            copies = []
            for number, (actor, address) in enumerate(zip(actors, addresses, strict=True)):
                copies.append(RayProcess(ray, actor, Assignment(job, number, address, addresses[0])))
            for copy in copies:
                copy.begin()
            undo.pop_all()
        return copies

    def _warn_of_missing_gpus(self, job: Job) -> None:
        wanted, present = job.gpus * job.count, self._ray.cluster_resources().get("GPU", 0)
        if wanted > present:
            text = "%s: needs %d GPUs, the cluster has %d; waiting at most %g s for it to grow"
            log.warning(text, job.name, wanted, present, self._placement_s)

    def _place(self, job: Job, addresses: Sequence[Any]) -> list[tuple[str, int]]:
        deadline = time.monotonic() + self._placement_s
        while self._ray.wait(list(addresses), num_returns=job.count, timeout=_POLL_S)[1]:
            if self._starts.is_closed:
                raise make_refusal(job)
            if time.monotonic() > deadline:
                free = self._ray.available_resources()
                raise ProcessDied(
                    f"{job.name}: no room after {self._placement_s:g} s for {job.count} processes with {job.gpus} "
                    f"GPUs each; the cluster has {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs free"
                )
        try:
            found: list[tuple[str, int]] = self._ray.get(list(addresses))
        except self._ray.exceptions.RayError as error:
            raise _PlaceLost(f"{job.name}: {describe_error(error)}") from None
        return found


class RayProcess:
    """A :class:`magrpo.fleets.Running` on a node of the cluster. Once it is stopped it asks Ray nothing any more."""

    def __init__(self, ray: Any, actor: Any, assignment: Assignment) -> None:
        self._ray, self._actor, self._assignment = ray, actor, assignment
        self.number, (self.host, self.port) = assignment.number, assignment.own
        self.log = assignment.make_log()
        self._lock = threading.RLock()
        self._status: int | None = None
        self._reason = ""
        self._end: Any = None  # the reference to its exit status
        self._is_shared = True  # whether its node writes the log where the driver reads it

    def begin(self) -> None:
        """Run the command. Raises ProcessDied if its node is gone already."""
        mark = secrets.token_hex(16)
        self.log.write_text(mark)
        job = self._assignment.job
        command = self._assignment.make_command()
        if command[0] == sys.executable:
            command[0] = ""
        environment = self._assignment.fill_in_environment()
        started = self._actor.run.remote(command, environment, str(self.log.resolve()), mark, str(Path.cwd()))
        try:
            self._is_shared = self._ray.get(started, timeout=_CALL_S)
        except self._ray.exceptions.RayError as error:
            raise _PlaceLost(f"{job.name} {self.number}: {describe_error(error)}") from None
        self._end = self._actor.wait_for_end.remote()

    def exit_status(self) -> int | None:
        with self._lock:
            if self._status is None and self._ray.wait([self._end], timeout=0)[0]:
                self._settle()
            return self._status

    def last_words(self) -> str:
        with self._lock:
            if self._status is None:
                self._fetch_log()
        if not self._reason:
            return read_last_words(self.log)
        words = read_last_words(self.log) if self._is_shared else ""
        return f"{self._reason}; last output: {words}" if words else self._reason

    def stop(self) -> None:
        with self._lock:
            if self.exit_status() is not None:
                return
            with suppress(self._ray.exceptions.RayError):  # its node is gone, and its keeper ends it
                self._ray.get(self._actor.stop.remote(), timeout=_CALL_S)
            if self._ray.wait([self._end], timeout=_CALL_S)[0]:
                self._settle()
            else:
                self._status, self._reason = _KILLED, f"did not end within {_CALL_S:g} s"
                self._ray.kill(self._actor)

    def _settle(self) -> None:
        """Take down the exit status, or why there is none, and give its place on the cluster back."""
        try:
            status = self._ray.get(self._end)
        except self._ray.exceptions.RayError as error:
            self._reason = describe_error(error)
            status = _KILLED
        else:
            self._fetch_log()
        self._status = status
        self._ray.kill(self._actor)

    def _fetch_log(self) -> None:
        """Copy the end of a log that only its node can read."""
        if not self._is_shared:
            with suppress(self._ray.exceptions.RayError):
                self.log.write_bytes(self._ray.get(self._actor.read_log.remote(), timeout=_CALL_S))


class NodeKeeper:
    """The actor: runs one command on its node, under a keeper."""

    def __init__(self) -> None:
        self._process: Kept | None = None
        self._log = Path()

    def find_address(self) -> tuple[str, int]:
        """The node's address and a free port of it."""
        import ray  # only a node of a cluster has it

        return str(ray.util.get_node_ip_address()), find_free_ports(1)[0]  # type: ignore[no-untyped-call]

    def run(self, command: Sequence[str], added: Mapping[str, str], log: str, mark: str, folder: str) -> bool:
        """Start the command; the word "" stands for this interpreter. Returns whether the driver can read its log.

        The driver has written ``mark`` into ``log``: whoever reads it there shares the folder.
        """
        self._log = Path(log)
        is_shared = self._log.exists() and self._log.read_text() == mark
        if not is_shared:
            self._log = Path(tempfile.mkdtemp(prefix="magrpo-")) / self._log.name
        if Path(folder).is_dir():
            os.chdir(folder)
        environment = {**_read_node_environment(), "CUDA_VISIBLE_DEVICES": ",".join(_list_given_gpus()), **added}
        self._process = start_kept([command[0] or sys.executable, *command[1:]], self._log, environment)
        return is_shared

    def wait_for_end(self) -> int:
        assert self._process is not None
        return self._process.wait()

    def read_log(self) -> bytes:
        """The end of the log."""
        return self._log.read_bytes()[-_TAIL_BYTES:]

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def _list_given_gpus() -> list[str]:
    import ray  # only a node of a cluster has it

    return [str(gpu) for gpu in ray.get_gpu_ids()]


def _read_node_environment() -> dict[str, str]:
    """The environment the node was started with. An actor's own has what Ray adds, such as OMP_NUM_THREADS=1."""
    words = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    environment = dict(os.fsdecode(word).partition("=")[::2] for word in words if b"=" in word)
    if "/ray/core/" in environment.get("LD_PRELOAD", ""):  # Ray's allocator, for its own daemon
        del environment["LD_PRELOAD"]
    return environment


def describe_error(error: Exception) -> str:
    """What Ray says of a dead actor or node, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:400]
