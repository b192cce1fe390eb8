"""Functions of bytes computed in other processes: order, errors, a process that dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from magrpo.fleets import ProcessDied
from magrpo.fleets.workers import Workers


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(2, tmp_path_factory.mktemp("workers"))
    yield workers
    workers.close()
    workers.close()


def name_process(message: bytes) -> bytes:
    return message + b" %d" % os.getpid()


def refuse_message(message: bytes) -> bytes:
    raise FileNotFoundError(message.decode())


def die_once(message: bytes) -> bytes:
    if Path(message.decode()).exists():
        return b"alive"
    Path(message.decode()).touch()
    os._exit(3)


def die_always(message: bytes) -> bytes:
    os._exit(3)


def test_equal_numbers_meet_the_same_process(workers: Workers) -> None:
    first = workers.call(name_process, {7: b"a", 2: b"b", 5: b"c"})
    assert list(first) == [7, 2, 5]
    assert [answer.split()[0] for answer in first.values()] == [b"a", b"b", b"c"]
    process_by_number = {number: int(answer.split()[1]) for number, answer in first.items()}
    assert process_by_number[7] == process_by_number[5] != process_by_number[2]
    assert os.getpid() not in process_by_number.values()
    assert workers.call(name_process, {5: b"a"}) == {5: b"a %d" % process_by_number[5]}


def test_the_error_of_a_function_is_raised_here(workers: Workers) -> None:
    with pytest.raises(FileNotFoundError, match="no such thing"):
        workers.call(refuse_message, {0: b"no such thing"})
    assert workers.call(name_process, {0: b"a"})[0].startswith(b"a ")


def test_a_process_that_dies_is_replaced_once(workers: Workers, tmp_path: Path) -> None:
    assert workers.call(die_once, {0: str(tmp_path / "seen").encode()}) == {0: b"alive"}
    with pytest.raises(ProcessDied, match=r"a worker ended with status 3.*worker-1\.log"):
        workers.call(die_always, {1: b""})
    assert workers.call(name_process, {1: b"a"})[1].startswith(b"a ")


def test_closed_workers_compute_nothing() -> None:
    closed = Workers(1)
    closed.close()
    with pytest.raises(RuntimeError):
        closed.call(name_process, {0: b"a"})
