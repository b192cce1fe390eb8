"""The pool: it recycles, survives its workers, keeps order and verdicts, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from magrpo.process.children import list_family, wait_for_end
from magrpo.sandboxes import SandboxDied, SandboxError
from magrpo.sandboxes import pool as pool_module
from magrpo.sandboxes.jail.zygote import fork_process
from magrpo.sandboxes.jail_command import JailSpec
from magrpo.sandboxes.pool import Pool
from magrpo.sandboxes.worker import Worker, WorkerDied
from magrpo.types import Execution
from tests.process_state import use_temporary_folder
from tests.processes import assert_all_end, wait_until

from .conftest import CHECK, RIGHT, open_pool, run_honest, the_worker, wait_until_gone
from .honest import PROGRAMS
from .hostile import CORPUS
from .world import UID


def right(number: int = 0) -> Execution:
    return Execution(f"{RIGHT}# {number}\n", "f", CHECK)


@pytest.fixture(autouse=True)
def _pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """None before another try: whatever failed here has been put right by then, or is to fail again."""
    monkeypatch.setattr(pool_module, "PAUSE_S", 0)


@pytest.fixture(scope="module")
def single() -> Iterator[Pool]:
    """With one worker, which every test leaves working."""
    pool = open_pool(workers=1)
    yield pool
    pool.close()


def test_workers_are_recycled(single: Pool) -> None:
    workers = set()
    with contextlib.closing(Pool(single.spec, 1)) as pool:
        pool.recycle_after = 2
        for k in range(6):
            [report] = pool.run([right(k)])
            assert report.status == "pass"
            workers.add(the_worker(pool).process.pid)
    assert len(workers) == 3


@pytest.mark.parametrize("who", ["bubblewrap", "zygote"])
def test_a_dead_worker_is_replaced_and_nobody_notices(single: Pool, who: str) -> None:
    before = the_worker(single)
    first, *_ = psutil.Process(before.process.pid).children()
    os.kill(before.process.pid if who == "bubblewrap" else first.pid, signal.SIGKILL)
    wait_until_gone(before)
    [report] = single.run([right()])
    assert report.status == "pass"
    assert the_worker(single) is not before


def test_a_worker_that_dies_during_a_job_is_replaced(single: Pool) -> None:
    before = the_worker(single)
    served = before.jobs
    zygote(before).suspend()  # so that the job is not done before the kill
    running = single.threads.submit(single.run_batch, [right()])
    while before.jobs == served:
        time.sleep(0.001)
    before.kill()
    assert running.result()[0].status == "pass"
    assert the_worker(single) is not before


def test_repeated_failure_raises(single: Pool) -> None:
    def fail(_: JailSpec) -> Worker:
        raise WorkerDied("no jail today")

    the_worker(single).kill()
    wait_until_gone(the_worker(single))
    single.make_worker = fail
    reports = single.run([right(0)]) + single.run([right(1)])
    assert [(report.status, report.tests_passed) for report in reports] == [("infra_error", 0)] * 2
    assert "no jail today" in reports[0].cases[0].message
    with pytest.raises(SandboxError, match="no jail today"):
        single.run([right(2)])
    single.make_worker = Worker
    assert single.run([right(3)])[0].status == "pass", "a dead pool is rebuilt"


MakePool = Callable[[Callable[[JailSpec], Worker]], Pool]


@pytest.fixture
def make_pool(single: Pool) -> Iterator[MakePool]:
    """Opens pools of one worker, which the given function makes."""
    with contextlib.ExitStack() as opened:
        yield lambda make_worker: opened.enter_context(contextlib.closing(Pool(single.spec, 1, make_worker)))


def kill_now(worker: Worker) -> None:
    worker.kill()
    wait_until_gone(worker)  # else it may still answer


class Frail(Worker):
    """A jail that a program can kill."""

    def run_jobs(self, jobs: Sequence[dict[str, object]], timeout_s: float) -> list[dict[str, object]]:
        if any("kill the jail" in str(job["source"]) for job in jobs):
            kill_now(self)
        return super().run_jobs(jobs, timeout_s)


def test_a_program_that_kills_two_jails_is_a_crash(make_pool: MakePool) -> None:
    """However many do, and whoever stands between them: the sandbox works."""
    killers = [
        Execution(f"'kill the jail'\n{right(k).source}", "f", "assert f(0) == 1\nassert f(1) == 2") for k in range(5)
    ]
    reports = make_pool(Frail).run([*killers, right()])
    assert [report.status for report in reports] == ["crash"] * 5 + ["pass"]
    assert [case.status for case in reports[0].cases] == ["crash", "crash"]
    assert "two jails" in reports[0].cases[0].message


def test_jails_that_kill_themselves_are_nobodys_crash(make_pool: MakePool) -> None:
    class Doomed(Worker):
        def run_jobs(self, jobs: Sequence[dict[str, object]], timeout_s: float) -> list[dict[str, object]]:
            if any(job["source"] for job in jobs):  # else it is told the verdict, and runs nothing
                kill_now(self)
            return super().run_jobs(jobs, timeout_s)

    pool = make_pool(Doomed)
    assert [pool.run([right()])[0].status for _ in range(2)] == ["infra_error"] * 2
    with pytest.raises(SandboxDied):
        pool.run([right()])


def test_the_longest_limits_can_be_waited_for() -> None:
    pool = open_pool(workers=1, test_s=86_400, total_s=86_400)
    assert {report.status for report in pool.run([right(k) for k in range(2 * pool_module.BATCHES)])} == {"pass"}
    pool.close()


def test_failures_with_batches_between_them_do_not_end_a_run(make_pool: MakePool) -> None:
    class Failing(Worker):
        def run_jobs(self, jobs: Sequence[dict[str, object]], timeout_s: float) -> list[dict[str, object]]:
            if any("no memory" in str(job["source"]) for job in jobs):
                self.jobs += 2  # it is not a new one, so no program is to blame
                raise WorkerDied("no memory today")
            return super().run_jobs(jobs, timeout_s)

    pool = make_pool(Failing)
    for k in range(pool_module.MAX_FAILURES):
        [report] = pool.run([Execution(f"'no memory'\n{right(k).source}", "f", CHECK)])
        assert report.status == "infra_error"
        batch = [right(number) for number in range(2 * pool_module.BATCHES)]
        assert {report.status for report in pool.run(batch)} == {"pass"}


def test_a_machine_without_room_for_processes_costs_no_place(single: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    the_worker(single).kill()
    wait_until_gone(the_worker(single))
    with monkeypatch.context() as patches:
        patches.setattr(subprocess, "Popen", refuse)
        [report] = single.run([right(0)])
    assert report.status == "infra_error"
    assert "no more processes" in report.cases[0].message
    assert [report.status for report in single.run([right(1), right(2)])] == ["pass"] * 2


def test_a_zygote_waits_for_room_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, None, 17])

    def fork() -> int:
        pid = next(answers)
        if pid is None:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return pid

    monkeypatch.setattr(os, "fork", fork)
    assert fork_process() == 17


def test_a_machine_without_descriptors_costs_no_place(single: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "no more descriptors")

    with monkeypatch.context() as patches:
        patches.setattr(socket, "socketpair", refuse)
        assert single.run([right(0)])[0].status == "infra_error"
    assert [report.status for report in single.run([right(1), right(2)])] == ["pass"] * 2


def test_a_process_with_many_open_files_has_a_sandbox(single: Pool) -> None:
    """``select`` takes no descriptor above 1023, and every worker opens two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 1200:
        pytest.skip(f"this user may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while opened.enter_context(open(os.devnull)).fileno() < 1030:  # noqa: PTH123
            pass
        pool = opened.enter_context(contextlib.closing(Pool(single.spec, 1)))
        [report] = pool.run([right()])
    assert report.status == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("level", ["landlock", "namespaces-flat"])
def test_more_workers_than_a_program_may_have_descriptors(level: str) -> None:
    """Each that waits for a program has sent a descriptor that is not received yet; the kernel counts them by user."""
    pool = open_pool(level=level, workers=64)
    reports = pool.run([right(number) for number in range(256)])
    pool.close()
    assert {(report.status, report.level) for report in reports} == {("pass", level)}


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_closing_ends_what_runs(level: str) -> None:
    """Long before its own limits do, also where no pid namespace ends with its first process."""
    pool = open_pool(level=level, workers=1, test_s=1000, total_s=1000)
    child = psutil.Process(the_worker(pool).process.pid)
    jail = child.children(recursive=True)
    endless = [Execution(f"while True:\n    {number}\n", "f", CHECK) for number in range(2)]
    with ThreadPoolExecutor() as other_thread:
        running = other_thread.submit(pool.run, endless)
        while the_worker(pool).jobs == 0:
            time.sleep(0.001)
        pool.close()
        with pytest.raises(SandboxDied, match="closed"):
            running.result()
    with pytest.raises(SandboxDied, match="closed"):
        pool.run(endless)
    assert_all_end([child, *jail])


def close_meanwhile(pool: Pool, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event) -> None:
    """Close a pool; ``go_on`` is set once everything is killed and closing waits for the threads of the pool."""
    shut_down = pool.threads.shutdown

    def wait_last(**options: bool) -> None:
        shut_down(wait=False, **options)
        go_on.set()
        shut_down()

    monkeypatch.setattr(pool.threads, "shutdown", wait_last)
    pool.close()


def test_closing_while_a_batch_has_just_been_judged(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    judged, go_on = threading.Event(), threading.Event()

    class Slow(Worker):
        def run_jobs(self, jobs: Sequence[dict[str, object]], timeout_s: float) -> list[dict[str, object]]:
            reports = super().run_jobs(jobs, timeout_s)
            judged.set()
            go_on.wait()
            return reports

    pool = make_pool(Slow)

    def close_then() -> None:
        judged.wait()
        close_meanwhile(pool, monkeypatch, go_on)

    with ThreadPoolExecutor() as other_thread:
        other_thread.submit(close_then)
        with pytest.raises(SandboxDied, match="closed"):
            pool.run([right(k) for k in range(8)])


def test_closing_while_batches_are_handed_out(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(Worker)
    submit = pool.threads.submit

    def close_first(*arguments: Any) -> Future[Any]:
        pool.close()
        return submit(*arguments)

    monkeypatch.setattr(pool.threads, "submit", close_first)
    with pytest.raises(SandboxDied, match="closed"):
        pool.run([right()])


def test_a_worker_that_starts_while_its_pool_closes_gets_no_job(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def start_slowly(spec: JailSpec) -> Worker:
        worker = Worker(spec)
        started.set()
        go_on.wait()
        return worker

    pool = make_pool(Worker)
    pool.recycle_after, pool.make_worker = 0, start_slowly

    def close_then() -> None:
        started.wait()
        close_meanwhile(pool, monkeypatch, go_on)

    with ThreadPoolExecutor() as other_thread:
        other_thread.submit(close_then)
        with pytest.raises(SandboxDied, match="closed"):
            pool.run([right()])
    assert not pool.alive


def test_a_worker_may_be_killed_while_another_thread_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = open_pool(level="namespaces", workers=1)
    worker, close = the_worker(pool), os.close

    def close_and_kill(descriptor: int) -> None:
        close(descriptor)
        worker.kill()

    with monkeypatch.context() as patches:
        patches.setattr(os, "close", close_and_kill)
        worker.close()
    pool.close()


def _train_until_killed(level: str, sender: multiprocessing.connection.Connection) -> None:
    """Keep a pool busy with an endless program, report through ``sender`` once it runs, and wait to be killed."""
    pool = open_pool(level=level, workers=2, test_s=100, total_s=100)
    pool.threads.submit(pool.run_batch, [Execution("import time\ntime.sleep(1e9)\n", "f", CHECK)])
    while not any(worker.jobs for worker in pool.alive):
        time.sleep(0.001)
    sender.send("at work")
    time.sleep(1000)


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_killing_the_trainer_leaves_no_process(level: str) -> None:
    open_pool(level=level, workers=1).close()  # where that is impossible, the process below would say so to nobody
    receiver, sender = multiprocessing.Pipe(duplex=False)
    trainer = multiprocessing.get_context("spawn").Process(
        target=_train_until_killed, args=(level, sender), daemon=True
    )
    trainer.start()
    sender.close()  # so that a trainer that ends too early is noticed
    receiver.recv()
    assert trainer.pid is not None
    # Two zygotes, each with a candidate that waits; a tester and its candidate.
    pid = trainer.pid
    wait_until(lambda: len(list_family(pid)) >= 6)
    family = list_family(pid)
    trainer.kill()
    trainer.join()
    assert_all_end(family)
    receiver.close()


def test_no_isolation_is_logged_on_every_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MAGRPO_SANDBOX_ALLOW_NONE", "1")
    pool = open_pool(level="none", workers=1)
    for _ in range(2):
        [report] = pool.run([right()])
        assert (report.status, report.level) == ("pass", "none")
    pool.close()
    assert [record.levelno for record in caplog.records if "without isolation" in record.message] == [logging.ERROR] * 2


def test_many_that_loop_forever() -> None:
    """64 candidates, 4 of which never end: the others are unharmed."""
    pool = open_pool(workers=2, test_s=1, total_s=1)
    executions = [
        Execution(f"while True:\n    {k}\n", "f", CHECK) if k % 16 == 0 else right(k) for k in range(64)
    ]  # fmt: skip
    reports = pool.run(executions)
    pool.close()
    assert [report.status for report in reports] == ["timeout" if k % 16 == 0 else "pass" for k in range(64)]


def test_the_processes_of_a_program_share_its_memory_limit(single: Pool) -> None:
    """Four children of 200 MiB stay below the limit of 512 MiB each, and are too much together."""

    def hold(mib: int, then: str) -> Execution:
        body = f"    for _ in range(4):\n        if os.fork() == 0:\n            x = bytearray(b'x') * ({mib} << 20)\n"
        wait = "    for _ in range(4):\n        os.wait()\n    return n + 1\n"
        source = f"import os, time\ndef f(n):\n{body}            {then}\n{wait}"
        return Execution(source, "f", "assert candidate(1) == 2")

    reports = single.run([hold(40, "os._exit(0)"), right(0), hold(200, "time.sleep(60)"), right(1)])
    assert [report.status for report in reports] == ["pass", "pass", "memory", "pass"]


def verdicts(pool: Pool, executions: list[Execution]) -> list[tuple[str, tuple[str, ...]]]:
    return [(report.status, tuple(case.status for case in report.cases)) for report in pool.run(executions)]


def busy() -> None:
    while True:
        pass


@pytest.mark.slow
def test_verdicts_do_not_depend_on_load() -> None:
    """210 candidates, some near their limits, give the same verdicts when every core has two more jobs."""
    executions = [right(k) for k in range(150)]
    for k in range(20):
        until = (
            f"    end = time.process_time() + {0.3 + k / 1000}\n    while time.process_time() < end:\n        pass\n"
        )
        executions.append(Execution(f"import time\ndef f(n):\n{until}    return n + 1\n", "f", CHECK))
        executions.append(Execution(f"while True:\n    {k}\n", "f", CHECK))
        nap = f"    time.sleep({0.2 if k % 2 else 9} * (n == 1))\n"
        executions.append(Execution(f"import time\ndef f(n):\n{nap}    return n + 1\n# {k}", "f", CHECK))
    pool = open_pool(workers=2, test_s=0.6, total_s=2.0)
    calm = verdicts(pool, executions)
    number = 2 * len(os.sched_getaffinity(0))
    others = [multiprocessing.get_context("spawn").Process(target=busy) for _ in range(number)]
    for process in others:
        process.start()
    try:
        loaded = verdicts(pool, executions)
    finally:
        for process in others:
            process.kill()
            process.join()
        pool.close()
    assert loaded == calm
    assert [status for status, _ in calm].count("pass") == 180


def inventory(pool: Pool, temporary: Path) -> dict[str, int]:
    """What must not grow: here, in the workers, and in the folders for temporary files.

    ``temporary``: that of this test. In that of the machine, only files of the user that programs run as count, and
    none that other runs of this project may make.
    """
    gc.collect()
    here = psutil.Process()
    zygotes = [zygote(worker) for worker in pool.alive]
    found = {
        "descriptors": here.num_fds(),
        "memory": here.memory_info().rss,
        "zygote's memory": max(process.memory_info().rss for process in zygotes),
        "processes": len(wait_for_end(list_family(here.pid), 0.0)),
        "files": len([*temporary.iterdir(), *filter(is_of_a_program, Path("/tmp").iterdir())]),
    }
    if os.geteuid() == 0:
        found["zygote's descriptors"] = max(process.num_fds() for process in zygotes)
    return found


def zygote(worker: Worker) -> psutil.Process:
    top = psutil.Process(worker.process.pid)
    return next(process for process in [top, *top.children(recursive=True)] if process.name().startswith("python"))


def is_of_a_program(path: Path) -> bool:
    try:
        return path.lstat().st_uid == UID and not path.name.startswith("magrpo")
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_soak(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,500 candidates, hostile ones among them: no growth of descriptors, processes, memory or temporary files."""
    use_temporary_folder(monkeypatch, tmp_path)
    strangers = set(list_family(os.getpid()))
    pool = open_pool(level=level, workers=2, test_s=0.25, total_s=0.25, memory_mib=256)
    sources = [program.source for program in CORPUS if "@" not in program.source]
    sources += [source for source, _ in PROGRAMS.values()]
    counts: list[dict[str, int]] = []
    for batch in range(15):
        executions = [
            Execution(f"{sources[k % len(sources)]}\n# {batch}", "f", CHECK) if k % 4 == 0 else right(1000 * batch + k)
            for k in range(batch * 25, batch * 25 + 100)
        ]
        reports = pool.run(executions)
        honest = [k for k in range(100) if (batch * 25 + k) % 4]
        again = [reports[k] if reports[k].status != "timeout" else run_honest(pool, executions[k]) for k in honest]
        assert [report.status for report in again] == ["pass"] * 75
        assert not [report for report in reports if report.status == "infra_error"]
        counts.append(inventory(pool, tmp_path))
    jobs = sum(worker.jobs for worker in pool.alive)
    pool.close()
    assert jobs >= 1400, "no worker was replaced"
    slack = {"descriptors": 2, "processes": 8, "memory": 10_000_000, "zygote's memory": 2_000_000}  # some are dying
    for name, first in counts[4].items():
        assert counts[-1][name] <= first + slack.get(name, 0), (name, [count[name] for count in counts])
    assert_all_end([child for child in list_family(os.getpid()) if child not in strangers])
