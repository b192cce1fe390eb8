"""Runs the test code against a candidate that lives in another process, and records one case for each assert.

Expected values and comparisons exist only here and in the parent.
"""

from __future__ import annotations

import base64
import builtins
import marshal
import re
import reprlib
import resource
import socket
import time
from typing import Any

from . import wire
from .confine import Limits
from .proxy import Broken, CandidateFailure, Process, Proxy, Unusable

HOOK = "__magrpo__"
MAX_CASES = 10_000
MAX_MESSAGE = 500
TEST_CPU_S = 10
TEST_MEMORY = 1 << 30


def printable(text: str) -> str:
    """At most 500 characters, control and other unprintable characters escaped."""
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text[:MAX_MESSAGE])
    return text[:MAX_MESSAGE]


class Recorder:
    """What instrumented test code reports to. See ``instrument.py`` for the rules."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.cases: list[list[str]] = []
        self.undefined: dict[str, tuple[str, str]] = {}
        self.trouble: tuple[str, str] | None = None
        self.calls = 0

    def begin(self) -> None:
        """An assert begins."""
        self.calls = len(self.proxy.values)

    def verdict(self, source: str, counts: bool, value: Any) -> None:
        """An assert's expression has a value."""
        if not value:
            got = [reprlib.repr(value) for value in self.proxy.values[self.calls :]]
            self.add("wrong", f"assert {source}" + (f"  # got {', '.join(got[-2:])}" if got else ""))
        elif counts:
            self.add("pass", "")

    def error(self, source: str, error: Exception) -> None:
        """An assert raised."""
        status, message = self.classify(error)
        self.add(status, f"assert {source}: {message}")

    def mark(self) -> int:
        """A guarded statement begins."""
        return len(self.cases)

    def skipped(self, error: Exception, mark: int, number: int, names: list[str]) -> None:
        """A guarded statement raised: it holds ``number`` asserts and would have set ``names``."""
        status, message = self.classify(error)
        self.trouble = self.trouble or (status, message)
        self.undefined.update(dict.fromkeys(names, (status, message)))
        if number == 0 and not names:
            self.add(status, message)
        missing = number - (len(self.cases) - mark)
        for k in range(missing):
            self.add(status if k == 0 else "not_run", message)

    def classify(self, error: Exception) -> tuple[str, str]:
        """Status and message of an exception that reached the test."""
        if isinstance(error, CandidateFailure):
            return error.args[0], error.args[1]
        if self.proxy.raised and error is self.proxy.raised[0]:
            return self.proxy.raised[1:]
        if isinstance(error, ImportError):
            raise Unusable(f"the test needs {error}")
        if isinstance(error, NameError):
            name = re.search(r"'(\w+)'", str(error))  # an unbound local is named in the message only
            if name and name[1] in self.undefined:
                return self.undefined[name[1]]
        return "wrong", f"{type(error).__name__}: {error}"

    def add(self, status: str, message: str) -> None:
        if len(self.cases) >= MAX_CASES:
            raise Unusable(f"more than {MAX_CASES} cases")
        self.cases.append([status, printable(message)])

    def finish(self) -> None:
        """The test has ended: make sure that what went wrong outside of asserts shows."""
        trouble = self.trouble or self.proxy.failure
        if trouble and all(case[0] == "pass" for case in self.cases):
            self.add(*trouble)
        if not self.cases:
            if not self.proxy.values:
                raise Unusable("the test neither asserts anything nor calls the candidate")
            self.add("pass", "")


def run(code: bytes, entry_point: str, proxy: Proxy) -> list[list[str]]:
    """Run instrumented test code; one ``[status, message]`` for each case.

    Raises:
        Unusable: the test itself cannot be run.
    """
    recorder = Recorder(proxy)
    namespace: dict[str, Any] = {
        "__name__": "test", "__builtins__": builtins, HOOK: recorder, "candidate": proxy, entry_point: proxy
    }  # fmt: skip
    try:
        exec(marshal.loads(code), namespace)  # the test code, compiled by the parent
        check = namespace.get("check")
        if callable(check) and check is not proxy:
            check(proxy)
    except Exception as error:  # noqa: BLE001 - whatever the test raises outside of a guard
        recorder.skipped(error, len(recorder.cases), 0, [])
    recorder.finish()
    return recorder.cases


def serve(connection: socket.socket, requests: socket.socket, process: Process, proc: int, limits: Limits) -> None:
    """Do one job: read it from the parent, run it, report."""
    resource.setrlimit(resource.RLIMIT_CPU, (TEST_CPU_S, TEST_CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (TEST_MEMORY, TEST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = wire.Reader(connection, 1 << 30).message(lambda: None)
    began = time.monotonic()
    report: dict[str, Any] = {}
    try:
        proxy = Proxy([job["source"], job["entry_point"], job["watch"]], requests, process, proc, limits)
        report["cases"] = run(base64.b64decode(job["code"]), job["entry_point"], proxy)
        report["watched_calls"], report["watched_used"] = proxy.watched_calls, proxy.result_used()
        report["cpu_s"], report["memory_bytes"] = proxy.consumed()
    except Unusable as error:
        report = {"unusable": printable(str(error))}
    except Broken as error:
        report = {"broken": printable(str(error))}
    report["duration_s"] = time.monotonic() - began
    wire.send(connection, report)
