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
from .confine import Limits
from .proxy import Broken, Inexpressible, Proxy
from .recorder import CandidateFailure, Unusable, escape_text

TEST_CPU_S = 10
TEST_MEMORY = 1 << 30
CLAIMS = frozenset({"pass", "wrong", "exception", "memory"})


def serve_job(
    connection: socket.socket, requests: socket.socket, process: CandidateProcess, limits: Limits, children: bool
) -> None:
    """Read one job from the parent, run it and report. ``children``: whether the candidate may have any."""
    resource.setrlimit(resource.RLIMIT_CPU, (TEST_CPU_S, TEST_CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (TEST_MEMORY, TEST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = wire.FrameReader(connection, 1 << 30).read_message(lambda: None)
    began = time.monotonic()
    try:
        proxy = Proxy([job["source"], job["entry_point"], job["watch"]], requests, process, limits, children)
        report = judge_candidate(job, proxy)
        report["compiles"] = proxy.compiles
        report["cpu_s"], report["memory_bytes"] = proxy.measure_usage()
    except Unusable as error:
        report = {"unusable": escape_text(str(error))}
    except Broken as error:
        report = {"broken": escape_text(str(error))}
    report["duration_s"] = time.monotonic() - began
    wire.send_message(connection, report)


def judge_candidate(job: dict[str, Any], proxy: Proxy) -> dict[str, Any]:
    """Judge the candidate with the test code in this process if possible, else in the candidate's process."""
    if not job["needs"]:
        try:
            cases = recorder.run_test_code(base64.b64decode(job["code"]), job["entry_point"], proxy, {})
            return {"cases": cases, "watched_calls": proxy.watched_calls, "watched_used": proxy.result_used()}
        except Inexpressible:
            proxy.replace_process()
    return judge_inside_candidate(job, proxy)


def judge_inside_candidate(job: dict[str, Any], proxy: Proxy) -> dict[str, Any]:
    """Run the test in the candidate's own process, which can lie: the report is marked forgeable."""
    report: dict[str, Any] = {"forgeable": True}
    try:
        if proxy.failure:
            raise CandidateFailure(*proxy.failure)
        claimed, report["watched_calls"], report["watched_used"] = proxy.run_test(job["code"])
        cases = [
            [status if status in CLAIMS else "protocol", escape_text(message)]
            for status, message in claimed[: recorder.MAX_CASES]
        ]
    except CandidateFailure as failure:
        cases = [[failure.args[0], escape_text(failure.args[1])]]
    missing = max(job["asserts"], 1) - len(cases)
    return {**report, "cases": cases + [["not_run", "the test did not get that far"]] * missing}
