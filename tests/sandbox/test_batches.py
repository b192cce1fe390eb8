"""Programs share a tester, variants and self-contained programs a process: verdicts are as if each ran alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from socket import socketpair
from weakref import ref

import pytest

from magrpo.sandboxes.jail.candidate import MODULE, CandidateServer
from magrpo.sandboxes.pool import MAX_BATCH, Pool, make_batches
from magrpo.sandboxes.traces import is_self_contained, leaves_no_trace
from magrpo.sandboxes.worker import Worker
from magrpo.types import Execution, ExecutionReport

from .conftest import CHECK, MAIN_LEVELS, RIGHT, open_pool, wait_until_gone

COUNT = "import math\ndef f(n):\n    math.calls = getattr(math, 'calls', 0) + 1\n    return math.calls\n"
"""Returns how often the process has called it."""
COUNTS = "def check(candidate):\n    assert candidate(0) == 1\n"
HOLDS = "kept = []\ndef f(n):\n    kept.append([n] * {size})\n    return n + 1\n"
"""Holds eight bytes for each of ``size``, three times."""
MISCHIEF = {
    "never returns": "def f(n):\n    while True:\n        pass\n",
    "ends its process": "import os\ndef f(n):\n    os._exit(3)\n",
    "wants too much memory": "def f(n):\n    return len(bytearray(1 << 30))\n",
    "starts a thread": "import threading\ndef f(n):\n    threading.Thread(target=threading.Event().wait).start()\n",
    "answers twice": "import os\ndef f(n):\n    os.write(3, b'\\0\\0\\0\\x02[]')\n    return n + 1\n",
    "is no Python": "def f(n)\n    return n + 1\n",
    "raises": "def f(n):\n    raise KeyError(n)\n",
    "is wrong": "def f(n):\n    return n\n",
    "calls itself for ever": "def f(n):\n    return f(n)\n",
    "holds much memory": HOLDS.format(size=2 * 10**6),
    "changes what it is given": "def f(n, seen=[]):\n    seen.append(n)\n    return len(seen)\n",
    "overflows the stack when destroyed": (
        "kept = []\ndef f(n):\n    x = n\n    for _ in range(200_000 if n == 0 else 0):\n        x = slice(x)\n"
        "    kept.append(x)\n    return n + 1\n"
    ),
    "calls an unknown name": "def f(n):\n    return g(n)\n",
}
HARMLESS = {"holds much memory", "changes what it is given", "overflows the stack when destroyed"}
"""Mischief that passes where it has a process for itself."""
EXECUTIONS = [
    Execution(f"{source}# {name}\n", "f", CHECK) for name, mischief in MISCHIEF.items() for source in (mischief, RIGHT)
]
"""All of the mischief, each followed by a program that is right."""
EVEN_RANDOM = "import random\ndef check(candidate):\n    n = random.random()\n    assert candidate(n) == n + 1, n\n"


@pytest.fixture(scope="module", params=MAIN_LEVELS)
def level_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = open_pool(workers=1, level=request.param, test_s=0.5, total_s=1.0)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def alone(level_pool: Pool) -> list[ExecutionReport]:
    """The reports on ``EXECUTIONS``, each of which ran by itself."""
    return [level_pool.run([execution])[0] for execution in EXECUTIONS]


def describe(report: ExecutionReport) -> tuple[object, ...]:
    """All of a report that does not depend on time."""
    return report.status, [case.status for case in report.cases], report.compiles, report.forgeable


def test_programs_in_one_batch_have_the_verdicts_of_programs_alone(
    level_pool: Pool, alone: list[ExecutionReport]
) -> None:
    [batch] = make_batches(EXECUTIONS, len(EXECUTIONS))
    assert batch == EXECUTIONS
    assert [report.status for report in alone[1::2]] == ["pass"] * len(MISCHIEF)
    passed = {name for name, report in zip(MISCHIEF, alone[::2], strict=True) if report.status == "pass"}
    assert passed >= HARMLESS
    assert len(passed - HARMLESS) <= 1
    together = level_pool.run_batch(batch)
    assert [describe(report) for report in together] == [describe(report) for report in alone]


def test_a_program_is_destroyed_before_the_next_one_begins() -> None:
    channel, far = socketpair()
    with channel, far:
        server = CandidateServer(far)
        server.answer_verb("load", "held = {1}\ndef f(n):\n    return held\n", "f", "")
        held = ref(sys.modules[MODULE].held)
        assert server.answer_verb("forget") == ["ok", None, [], 0]
    assert held() is None
    assert MODULE not in sys.modules


def test_programs_have_processes_of_their_own_and_variants_share_one(level_pool: Pool) -> None:
    executions = [Execution(f"{COUNT}# {k}\n", "f", COUNTS) for k in range(2)]
    assert [report.status for report in level_pool.run_batch(executions)] == ["pass", "pass"]
    variants = [replace(execution, variant_of=RIGHT) for execution in executions]
    assert [report.status for report in level_pool.run_batch(variants)] == ["pass", "wrong"], "they share a process"
    apart = [replace(execution, variant_of=COUNT) for execution in executions]
    assert [report.status for report in level_pool.run_batch(apart)] == ["pass", "pass"], "the program leaves a trace"


def test_self_contained_programs_share_a_process_unless_one_has_used_much(level_pool: Pool) -> None:
    def measure(*sources: str) -> int:
        """Peak memory of the process of the last program."""
        return level_pool.run_batch([Execution(source, "f", CHECK) for source in sources])[-1].memory_bytes

    alone = measure(RIGHT)
    held = measure(HOLDS.format(size=5 * 10**5)) - alone
    assert held > 1e7
    assert measure(HOLDS.format(size=5 * 10**5), RIGHT) > alone + held / 2, "they share it"
    assert measure(HOLDS.format(size=5 * 10**5), f"import os\n{RIGHT}") < alone + held / 2
    assert measure(HOLDS.format(size=10**6), RIGHT) < alone + held / 2, "the first has used too much"


@pytest.mark.parametrize("mischief", MISCHIEF)
def test_a_variant_that_leaves_a_trace_has_the_process_for_itself(
    level_pool: Pool, alone: list[ExecutionReport], mischief: str
) -> None:
    sources = [RIGHT, MISCHIEF[mischief], RIGHT + "\n", MISCHIEF[mischief] + "\n", RIGHT + "\n\n"]
    variants = [Execution(source, "f", CHECK, variant_of=RIGHT) for source in sources]
    first, bad, second, _, third = level_pool.run_batch(variants)
    assert [report.status for report in (first, second, third)] == ["pass"] * 3
    assert describe(bad) == describe(alone[2 * list(MISCHIEF).index(mischief)])


def test_each_test_of_a_batch_draws_the_same_random_numbers(level_pool: Pool) -> None:
    executions = [Execution(f"def f(n):\n    return n + 2\n# {k}", "f", EVEN_RANDOM) for k in range(3)]
    messages = {report.cases for report in level_pool.run_batch(executions)}
    assert len(messages) == 1


def test_batches_hold_what_may_share_a_tester() -> None:
    executions = [Execution(f"{RIGHT}# {k}", "f", CHECK if k % 2 else COUNTS) for k in range(50)]
    alone = [Execution(f"{RIGHT}# {k}", "f", f"import sys\nsys.mark = 1\n{CHECK}") for k in range(5)]
    batches = make_batches(alone + executions, 7)
    assert batches[:5] == [[execution] for execution in alone]
    assert [execution for batch in batches[5:] for execution in batch] == executions
    assert {len(batch) for batch in batches[5:-1]} == {7}
    assert max(map(len, make_batches(executions, 1000))) == MAX_BATCH
    assert make_batches([], 0) == []


def test_a_batch_of_several_tests(level_pool: Pool) -> None:
    one, two = (f"def check(candidate):\n    x = candidate(1)\n    assert x == {n}\n" for n in (2, 3))
    executions = [Execution(RIGHT, "f", test) for test in (one, two, one + "\n", "assert f(0) == 1")]
    executions.append(Execution("def g(n):\n    return n\n", "g", "assert g(0) == 0"))
    assert [report.status for report in level_pool.run_batch(executions)] == ["pass", "wrong", "pass", "pass", "pass"]


def test_a_worker_that_dies_in_a_batch_costs_no_verdict(level_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    run_jobs = Worker.run_jobs

    def die_once(worker: Worker, jobs: list[dict[str, object]], timeout_s: float) -> list[dict[str, object]]:
        served.append(len(jobs))
        if len(served) == 1:
            worker.kill()
            wait_until_gone(worker)
        return run_jobs(worker, jobs, timeout_s)

    monkeypatch.setattr(Worker, "run_jobs", die_once)
    executions = [Execution(f"{RIGHT}# {k}", "f", CHECK) for k in range(8)]
    assert [report.status for report in level_pool.run_batch(executions)] == ["pass"] * 8
    assert served == [8] + [1] * 8


@pytest.mark.parametrize(
    "source",
    [
        RIGHT,
        CHECK,
        EVEN_RANDOM,
        "from collections import Counter\nimport math as m\ndef f(x):\n    return Counter(x), m.pi\n",
        "class A:\n    def __init__(self):\n        self.x = {}\n        self.x['y'].z = 1\n",
        "def f(code, queue):\n    token = code\n    return token, queue, f.__name__\n",
    ],
)
def test_code_that_leaves_no_trace(source: str) -> None:
    assert leaves_no_trace(source)


@pytest.mark.parametrize(
    "source",
    [
        RIGHT,
        HOLDS,
        "import math as m\ndef f(x):\n    return m.sqrt(x) + m.pi\n",
        "from math import gcd\ndef f(x, y=(), *a, key=None, **k):\n    return gcd(*a) or f'{x!r:>{y}}'\n",
        "def f(x):\n    try:\n        return aux(x)\n    except ValueError as e:\n        raise KeyError(x) from e\n",
        "n = 0\ndef f(x):\n    global n\n    n += 1\n    return ' '.join(str(c) for c in x).split()[::-1]\n",
        "def f(s):\n    return dict.fromkeys(sorted(s, key=lambda c: -ord(c)), {c: 1 for c in s if s[:1]})\n",
    ],
)
def test_self_contained_code(source: str) -> None:
    assert is_self_contained(source)


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "import math.x",
        "import math, sys",
        "from math import *",
        "from math import __loader__ as load",
        "from math import pow",
        "from . import math",
        "from typing import List",
        "import math\ndef f(x):\n    return math\n",
        "import math\nm = math\n",
        "import math as len",
        "import math as __builtins__",
        "math.pi = 3",
        "def f(x):\n    x.y = 1\n",
        "def f(x):\n    del x.y\n",
        "def f(x):\n    x.y += 1\n",
        "def f(x):\n    return x.__class__\n",
        "def f(x):\n    return x.gi_frame\n",
        "def f(x):\n    return '{0.__class__}'.format(x)\n",
        "def f(x):\n    return x.encode('idna')\n",
        "def f(x):\n    return type(x)\n",
        "def f(x):\n    return getattr(x, 'y')\n",
        "def f(x):\n    return vars()\n",
        "def f(x):\n    return object()\n",
        "def f(x):\n    return __builtins__\n",
        "def f(x):\n    return BaseException\n",
        "__builtins__ = {}",
        "sum = 0",
        "def f(__x):\n    pass\n",
        "def f(list):\n    return list\n",
        "def len(x):\n    return 0\n",
        "def f(x):\n    global print\n    print = x\n",
        "def f(x):\n    nonlocal __class__\n",
        "def f(x):\n    try:\n        x()\n    except KeyError as open:\n        pass\n",
        "class A:\n    pass\n",
        "async def f(x):\n    pass\n",
        "async def f(x):\n    await x\n",
        "def f(x):\n    try:\n        yield x\n    finally:\n        x()\n",
        "def f(x):\n    yield from x\n",
        "def f(x):\n    with x:\n        pass\n",
        "def f(x):\n    match x:\n        case 1:\n            pass\n",
        "def f(x):\n    return \uff4fpen(x)\n",
        "[open := 1]",
        "[x for len in y]",
        "@property\ndef f(x):\n    pass\n",
        "def f(",
        "x = '\0'",
        "(" * 3000,
    ],
)
def test_code_that_may_reach_beyond_itself(source: str) -> None:
    assert not is_self_contained(source)


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "import collections, sys",
        "from decimal import getcontext",
        "from . import math",
        "import math\nmath.pi = 3",
        "import math\ndel math.pi",
        "import math\nmath.memory[0].x = 1",
        "def f(x):\n    g(x).y = 1\n",
        "setattr(f, 'x', 1)",
        "def f(x):\n    return __import__('os')\n",
        "def f(x):\n    return x.__class__.__mro__\n",
        "open('/tmp/x', 'w')",
        "assert f(sys.maxsize) == 1",
        "def f(",
        "x = '\0'",
        "(" * 3000,
    ],
)
def test_code_that_may_leave_a_trace(source: str) -> None:
    assert not leaves_no_trace(source)
