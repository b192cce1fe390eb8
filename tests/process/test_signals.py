"""Signals that end a command, and a console that is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from magrpo.process.signals import EndedBySignal, describe_interrupt, find_exit_code, is_interrupt, raise_on_signals
from tests.pipelines.micro import command, write_config

WAITING = """
import sys, time
from pipelines import cli
def wait(*_, **__):
    print("ready", flush=True)
    while True:
        time.sleep(0.1)  # signal.pause misses a signal that comes just before
cli._run_command = wait
sys.exit(cli.main(["train"]))
"""
"""A command that waits for its end."""


def print_variables(names: list[str]) -> int:
    print([os.environ.get(name) for name in names])
    return 0


def test_a_command_has_the_environment_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the test for which the process it is forked from was started; of Prefect's variables, the given ones."""
    names = ["RAY_AUTH_MODE", "PREFECT_API_URL", "PREFECT_HOME"]
    log = tmp_path / "log"
    for value in ("token", "disabled"):
        for name in names:
            monkeypatch.setenv(name, value)
        assert command(names, log, program=print_variables, environment={"PREFECT_HOME": "/given"}) == 0
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert command(names, log, program=print_variables) == 0
    assert log.read_text().splitlines() == [
        "['token', None, '/given']",
        "['disabled', None, '/given']",
        "[None, None, None]",
    ]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def send_three(number: int) -> None:
    try:
        send(number)
    finally:  # closing goes on undisturbed
        send(signal.SIGHUP)
        send(signal.SIGTERM)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_is_raised_once(number: signal.Signals, code: int) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores it
    try:
        with pytest.raises(EndedBySignal) as raised, raise_on_signals():
            send_three(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert (find_exit_code(raised.value), describe_interrupt(raised.value)) == (code, f"ended by {number.name}")
    assert (find_exit_code(KeyboardInterrupt()), describe_interrupt(KeyboardInterrupt())) == (130, "interrupted")


def test_an_error_is_an_interrupt_if_one_was_handled_and_a_timeout_is_none() -> None:
    def fail(first: BaseException) -> BaseException:
        error = ValueError("while it was handled")
        error.__context__ = first
        return error

    assert is_interrupt(KeyboardInterrupt())
    assert is_interrupt(fail(fail(EndedBySignal(signal.SIGTERM))))
    assert is_interrupt(fail(SystemExit()))
    assert not is_interrupt(ValueError())
    assert not is_interrupt(fail(asyncio.CancelledError())), "as a timeout of asyncio"
    assert not is_interrupt(fail(GeneratorExit()))


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_on_signals():
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


class Collected:
    """Its end is watched by a callback."""


def lose(number: int) -> None:
    """Raise an interrupt where it is lost, and work on."""
    watched = Collected()
    lost = weakref.ref(watched, lambda _: send(number))
    del watched
    assert lost() is None, "the exception ended in the callback"
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_lost_in_a_callback_of_the_garbage_collector_is_sent_again(number: signal.Signals) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as raised, raise_on_signals():
            lose(number)
    finally:
        signal.signal(signal.SIGINT, before)
    assert find_exit_code(raised.value) == 128 + number


def namespaces_work() -> bool:
    command = ["unshare", "--pid", "--fork", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("first", [False, True], ids=["ordinary", "first process of a container"])
def test_a_command_ends_by_sigterm(first: bool) -> None:
    """The kernel keeps signals without a handler from the first process of a PID namespace."""
    if first and not namespaces_work():
        pytest.skip("no PID namespace can be made here")
    inside = [sys.executable, "-c", WAITING]
    started = ["unshare", "--pid", "--fork", "--kill-child", *inside] if first else inside
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]) if first else process.pid, signal.SIGTERM)
            assert process.wait(60) == 143
        finally:
            process.kill()


def lose_console() -> None:
    """Let nobody read standard output, and the disk behind standard error be full."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    os.close(writer)
    os.close(reader)


def test_a_run_goes_on_without_its_console(tmp_path: Path) -> None:
    arguments = ["train", str(write_config(tmp_path, iterations=1)), "--local", "--name", "alone"]
    assert command(arguments, tmp_path / "log", lose_console) == 0
    assert (tmp_path / "runs" / "alone" / "report.html").exists()


PRINTING = """
import sys
from magrpo.process.signals import keep_printing
before = sys.stdout
with keep_printing():
    print("grüße")
    assert sys.stdout is not before
assert sys.stdout is before
"""


def test_output_is_kept_as_long_as_it_can_be_written() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", PRINTING], env=environment, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode("latin-1") == "grüße\n"
