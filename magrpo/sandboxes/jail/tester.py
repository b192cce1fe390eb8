"""Runs the test code against a candidate in another process.

Expected values and comparisons exist only here and in the parent process.
"""

import base64
import resource
import socket
import time
from typing import Any

from . import recorder, wire
from .candidate_process import CandidateProcess
from .clock import start_clock, stop_clock
from .confine import Limits
from .proxy import Broken, Proxy
from .recorder import CandidateFailure, Unusable, escape_text
from .seeds import seed_generators
from .stand_ins import Inexpressible

TEST_CPU_S = 10
LEFT_S = 2  # for the work after the test, before the kernel ends the process
TEST_MEMORY = 1 << 30
CLAIMS = frozenset({"pass", "wrong", "exception", "memory"})


def limit_process(package_bytes: int) -> None:
    """Limit the CPU time of this process, and its memory beyond the ``package_bytes`` that imported packages take."""
    resource.setrlimit(resource.RLIMIT_CPU, (TEST_CPU_S + LEFT_S, TEST_CPU_S + LEFT_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (TEST_MEMORY + package_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve_jobs(
    connection: socket.socket, requests: socket.socket, process: CandidateProcess, limits: Limits, children: bool
) -> None:
    """Read jobs from the parent, run one after another, and report on each.

    Every program gets a process of its own, unless the parent lets neighbours share one. Ends early when tests have
    used much CPU time; the parent then has the remaining jobs run elsewhere. ``children``: whether the candidate may
    have child processes.
    """
    seed_generators()  # a fork has seeded them from the system
    jobs = wire.FrameReader(connection, 1 << 30).read_message(lambda: None)
    for job, following in zip(jobs, [*jobs[1:], None], strict=True):
        began = time.monotonic()
        report, proxy = run_job(job, requests, process, limits, children)
        wire.send_message(connection, report | {"duration_s": time.monotonic() - began})
        if proxy:
            proxy.surroundings.restore_seeds()
        if not following or not proxy or time.process_time() > LEFT_S:  # so that the next test gets all of its CPU time
            return
        may_share = job["may_share"] and following["may_share"] and "forgeable" not in report
        process = proxy.pass_on_process(may_share)


def run_job(
    job: dict[str, Any], requests: socket.socket, process: CandidateProcess, limits: Limits, children: bool
) -> tuple[dict[str, Any], Proxy | None]:
    """Return the report on a job, and the proxy of its program unless something outside the program went wrong."""
    try:
        if job["verdict"]:
            return {"cases": fail_all(job, *job["verdict"])}, None
        proxy = Proxy([job["source"], job["entry_point"], job["watch"]], requests, process, limits, children)
        report = judge_candidate(job, proxy)
        report["compiles"] = proxy.compiles
        report["cpu_s"], report["memory_bytes"] = proxy.measure_usage()
    except Unusable as error:
        return {"unusable": escape_text(str(error))}, None
    except Broken as error:
        return {"broken": escape_text(str(error))}, None
    except Exception as error:  # noqa: BLE001 - all that is not trusted here is the program
        return {"cases": fail_all(job, "protocol", f"its answers cannot be served: {type(error).__name__}")}, None
    return report, proxy


def judge_candidate(job: dict[str, Any], proxy: Proxy) -> dict[str, Any]:
    """Judge the candidate with the test code in this process if possible, else in the candidate's process."""
    if not job["needs"]:
        try:
            cases = run_test(job, proxy)
            return {"cases": cases, "watched_calls": proxy.watched_calls}
        except Inexpressible:
            proxy.restart()
    return judge_inside_candidate(job, proxy)


def judge_inside_candidate(job: dict[str, Any], proxy: Proxy) -> dict[str, Any]:
    """Run the test in the candidate's own process, which can lie: the report is marked forgeable."""
    report: dict[str, Any] = {"forgeable": True}
    try:
        if proxy.failure:
            raise CandidateFailure(*proxy.failure)
        claimed, report["watched_calls"] = proxy.run_test(job["code"])
    except CandidateFailure as failure:
        return report | {"cases": fail_all(job, *failure.args)}
    cases = [
        [status if status in CLAIMS else "protocol", escape_text(message)]
        for status, message in claimed[: recorder.MAX_CASES]
    ]
    return report | {"cases": cases or fail_all(job, "protocol", "it reports no cases")}


def run_test(job: dict[str, Any], callee: recorder.Callee) -> list[list[str]]:
    """Return the cases of the test, run in this process within its limit of CPU time."""
    start_clock(TEST_CPU_S)
    try:
        return recorder.run_test_code(base64.b64decode(job["code"]), job["entry_point"], callee, {})
    finally:
        stop_clock()


def fail_all(job: dict[str, Any], status: str, message: str) -> list[list[str]]:
    """Fail as many cases as the test has when nothing can be called: ending a test early must not earn fewer."""
    cases = run_test(job, recorder.DeadCallee(status, message))
    return [[status, escape_text(message)]] * max(len(cases), 1)
