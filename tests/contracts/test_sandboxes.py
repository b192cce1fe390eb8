"""What any sandbox must do, whatever its kind and isolation level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from magrpo.interfaces import Sandbox
from magrpo.plugins import build_plugin
from magrpo.sandboxes import SandboxError
from magrpo.types import Execution
from tests.sandbox.conftest import CHECK, LEVELS, RIGHT

OPTIONS = [{"kind": "pool", "level": level, "workers": 2, "test_s": 0.5, "total_s": 1.0} for level in LEVELS]


@pytest.fixture(scope="module", params=OPTIONS, ids=lambda options: f"{options['kind']}-{options['level']}")
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Yield a pool of each isolation level that works on this machine, then close it twice, which must be harmless."""
    plugin = build_plugin("sandbox", request.param)
    try:
        sandbox = plugin.open()
    except SandboxError as error:
        pytest.skip(str(error))
    yield sandbox
    sandbox.close()
    sandbox.close()


def run(sandbox: Sandbox, source: str, test: str = CHECK, watch: str = "") -> tuple[str, int, int]:
    [report] = sandbox.run([Execution(source, "f", test, watch)])
    assert report.level == sandbox.level
    return report.status, report.tests_passed, report.tests_total


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (RIGHT, ("pass", 3, 3)),
        ("print('hello')\ndef f(n):\n    print(n)\n    return n + 1\n", ("pass", 3, 3)),
        ("def f(n):\n    return 1\n", ("wrong", 1, 3)),
        ("def f(n):\n    return 1 // (n - 1) + 2\n", ("exception", 2, 3)),
        ("def f(n):\n    while n == 1:\n        pass\n    return n + 1\n", ("timeout", 2, 3)),
        ("def f(n):\n    import os\n    os._exit(0) if n == 1 else 0\n    return n + 1\n", ("crash", 2, 3)),
        ("import os\ndef f(n):\n    os._exit(0)\n", ("crash", 0, 3)),
        ("def f(n):\n    return 'x' * (1 << 40)\n", ("memory", 0, 3)),
        ("def f(n):\n    return 'x' * (1 << 24)\n", ("output_limit", 0, 3)),
        ("def f(n):\n    import os\n    os.write(3, b'abcd' * 9)\n", ("output_limit", 0, 3)),
        ("def f(n):\n    import os\n    os.write(3, b'\\x00\\x00\\x00\\x01?')\n", ("protocol", 0, 3)),
        ("def f(n:\n", ("load_error", 0, 3)),
        ("g = 1\n", ("load_error", 0, 3)),
        ("while True:\n    pass\n", ("timeout", 0, 3)),
        ("", ("load_error", 0, 3)),
    ],
)
def test_statuses(sandbox: Sandbox, source: str, expected: tuple[str, int, int]) -> None:
    assert run(sandbox, source) == expected


NESTED = "".join(f"{' ' * i}try: return 1\n{' ' * i}finally:\n" for i in range(1, 30)) + " " * 30 + "pass\n"


@pytest.mark.parametrize(
    ("source", "compiles"),
    [
        (RIGHT, True),
        ("raise SyntaxError\n", True),
        ("exec('x =')\n", True),
        ("import os\nos._exit(0)\n", True),
        ("x = 10 ** 10 ** 9\n", True),
        ("x = (((1 << 9999) << 9999) << 9999)\n", True),
        ("return 1", False),
        ("def f(n, n): return n", False),
        ("def f(n):\n    nonlocal y", False),
        ("x = \0", False),
        ("x =", False),
        ("x = " + "-" * 100_000 + "1", False),
        (f"def f(n):\n{NESTED}", False),
    ],
)
def test_what_compiles(sandbox: Sandbox, source: str, compiles: bool) -> None:
    """CPython copies every ``finally``, so the last one takes more than any memory."""
    for test in (CHECK, "assert f(lambda: 1)"):
        [report] = sandbox.run([Execution(source, "f", test)])
        assert report.compiles == compiles
        assert "infra_error" not in {case.status for case in report.cases}


def test_order_and_progress(sandbox: Sandbox) -> None:
    executions = [Execution(f"def f(n):\n    return n + 1 if n < {k} else 0\n", "f", CHECK) for k in (3, 0, 2, 0, 1)]
    done: list[int] = []
    reports = sandbox.run(executions, done.append)
    assert [report.tests_passed for report in reports] == [3, 0, 2, 0, 1]
    assert sum(done) == len(executions)
    assert reports[1] is reports[3], "equal executions run once"
    assert sandbox.run([]) == []


def test_forms_of_tests(sandbox: Sandbox) -> None:
    assert run(sandbox, RIGHT, "assert f(1) == 2\nassert f(2) == 0") == ("wrong", 1, 2)
    assert run(sandbox, RIGHT, "assert candidate(1) == 2") == ("pass", 1, 1)
    for test in ("assert (", "import pytest\n" + CHECK, "from no_such_module import g\nassert f(1) == g", "pass"):
        assert run(sandbox, RIGHT, test) == ("test_error", 0, 1)
        assert run(sandbox, "def f(n):\n    return 1\n", test) == ("test_error", 0, 1)


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ("return aux(n)", 3),
        ("return aux(n) if n else 1", 2),
        ("return [aux(k) for k in range(n + 1)][-1]", 6),
        ("aux(n)\n    return n + 1", 3),
        ("try:\n        aux(n) + 1\n    except Exception:\n        pass\n    return n + 1", 3),
        ("if False:\n        return aux(n)\n    return n + 1", 0),
        ("# aux(n)\n    'aux(n)'\n    return n + 1", 0),
    ],
)
def test_watching_a_function(sandbox: Sandbox, body: str, calls: int) -> None:
    source = f"def aux(n):\n    return n + 1\ndef f(n):\n    {body}\n"
    [report] = sandbox.run([Execution(source, "f", CHECK, "aux")])
    assert (report.status, report.watched_calls) == ("pass", calls)


@pytest.mark.parametrize(
    "aux",
    [
        "def aux(n):\n    return n and aux(n - 1) + 1\n",  # only the outermost calls count
        "from functools import lru_cache\n@lru_cache(None)\ndef aux(n):\n    return n\n",
        "aux = lambda n: n\n",
        "aux = abs\n",
    ],
)
def test_watching_unusual_functions(sandbox: Sandbox, aux: str) -> None:
    [report] = sandbox.run([Execution(f"{aux}def f(n):\n    return aux(n) + 1\n", "f", CHECK, "aux")])
    assert (report.status, report.watched_calls) == ("pass", 3)


@pytest.mark.parametrize("name", ["'aux'", "'a' + 'ux'"])
@pytest.mark.parametrize("inside", [True, False])
def test_what_takes_the_name_later_is_not_watched(sandbox: Sandbox, name: str, inside: bool) -> None:
    rebinding = f"globals()[{name}] = lambda n: n + 1"
    body = (
        f"def f(n):\n    {rebinding}\n    return aux(n)\n" if inside else f"{rebinding}\ndef f(n):\n    return aux(n)\n"
    )
    [report] = sandbox.run([Execution(f"def aux(n):\n    return -1\n{body}", "f", CHECK, "aux")])
    assert (report.status, report.watched_calls) == ("pass", 0)


@pytest.mark.parametrize(
    ("aux", "body", "calls"),
    [
        ("return None", "return aux(n) + 1", 3),
        ("raise ValueError", "return aux(n)", 0),
        ("return 1 // n", "return aux(n)", 2),
        ("while n:\n        pass\n    return 1", "return aux(n)", 1),
    ],
)
def test_watching_calls_that_do_not_return(sandbox: Sandbox, aux: str, body: str, calls: int) -> None:
    """A call of the watched function counts if it returned; what came of its result may be an exception."""
    source = f"def aux(n):\n    {aux}\ndef f(n):\n    {body}\n"
    [report] = sandbox.run([Execution(source, "f", CHECK, "aux")])
    assert {case.status for case in report.cases} & {"exception", "timeout"}
    assert report.watched_calls == calls


def test_cost_is_reported(sandbox: Sandbox) -> None:
    busy = "    x = bytearray(b'x' * 20_000_000)\n    while time.process_time() < 0.1:\n        pass\n"
    [report] = sandbox.run([Execution(f"import time\ndef f(n):\n{busy}    return n + 1\n", "f", CHECK)])
    assert report.status == "pass"
    assert report.cpu_s >= 0.09
    assert report.duration_s > 0
    assert report.memory_bytes >= 20_000_000
