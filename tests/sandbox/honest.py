# ruff: noqa: E501
"""Honest programs of many kinds, each with a test that a correct sandbox passes in full."""

from __future__ import annotations

from magrpo.types import Execution

_SIMPLE = "def check(candidate):\n    for n in range(4):\n        assert candidate(n) == n * n\n"

PROGRAMS: dict[str, tuple[str, str]] = {
    "plain": ("def f(n):\n    return n * n\n", _SIMPLE),
    "prints": ("print('loading')\ndef f(n):\n    print('n', n)\n    return n * n\n", _SIMPLE),
    "prints_a_lot": ("def f(n):\n    for _ in range(20000):\n        print('x' * 100)\n    return n * n\n", _SIMPLE),
    "writes_to_stderr": ("import sys\ndef f(n):\n    sys.stderr.write('note')\n    return n * n\n", _SIMPLE),
    "recursion_900": ("def f(n):\n    return 1 + f(n - 1) if n else 0\n", "assert f(900) == 900\nassert f(0) == 0\n"),
    "dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n"
        "    x: int\n    y: P | None = None\ndef f(n):\n    return max(P(n * n), P(0)).x\n",
        _SIMPLE,
    ),
    "named_tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(n):\n    return P(n, [n])\n",
        "assert f(3) == (3, [3])\n",
    ),
    "asyncio": (
        "import asyncio\nasync def g(n):\n    await asyncio.sleep(0.001)\n    return n * n\ndef f(n):\n"
        "    return asyncio.run(g(n))\n",
        _SIMPLE,
    ),
    "asyncio_thread": (
        "import asyncio\ndef f(n):\n    async def main():\n        return await asyncio.to_thread(pow, n, 2)\n"
        "    return asyncio.run(main())\n",
        _SIMPLE,
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\ndef f(n):\n    with ThreadPoolExecutor(3) as pool:\n"
        "        return sum(pool.map(lambda _: n, range(n)))\n",
        _SIMPLE,
    ),
    "called_from_several_threads": (
        "def f(n):\n    return [n] * n\n",
        "from concurrent.futures import ThreadPoolExecutor\ndef check(candidate):\n    with ThreadPoolExecutor(4) as pool:\n"
        "        assert list(pool.map(candidate, range(50))) == [[n] * n for n in range(50)]\n",
    ),
    "generator": ("def g(n):\n    for _ in range(n):\n        yield n\ndef f(n):\n    return sum(g(n))\n", _SIMPLE),
    "closure_and_cache": (
        "from functools import lru_cache\n@lru_cache(None)\ndef g(n):\n    return n if n < 2 else g(n - 1) + g(n - 2)\n"
        "def f(n):\n    return g(n)\n",
        "assert f(90) == 2880067194370816120\n",
    ),
    "one_second_of_cpu": (
        "import time\ndef f(n):\n    while time.process_time() < 1.0 and n == 3:\n        pass\n    return n * n\n",
        _SIMPLE,
    ),
    "big_integers": (
        "def f(n):\n    return 3 ** n\n",
        "assert f(20000) == 3 ** 20000\nassert f(30) == 3 ** 30\nassert f(0) == 1\n",
    ),
    "big_integer_argument": ("def f(n):\n    return n % 10 ** 9\n", "assert f(7 ** 9000) == 7 ** 9000 % 10 ** 9\n"),
    "floats": (
        "def f(n):\n    return [n / 3, float('inf'), -0.0]\n",
        "assert f(1) == [1 / 3, float('inf'), 0.0]\nassert str(f(1)[2]) == '-0.0'\n",
    ),
    "unicode": (
        "def f(s):\n    return s[::-1] + '\u2603\U0001f40d'\n",
        "assert f('a\u0301\u00e9') == '\u00e9\u0301a\u2603\U0001f40d'\n",
    ),
    "all_plain_types": (
        "def f(*a, **k):\n    return {'a': a, 'k': k}\n",
        "assert f(None, True, 1, 2.5, 'x', b'y', bytearray(b'z'), 1j, (1, [2]), {3}, frozenset([4]), range(2), k={5: 6})"
        " == {'a': (None, True, 1, 2.5, 'x', b'y', bytearray(b'z'), 1j, (1, [2]), {3}, frozenset([4]), range(2)), "
        "'k': {'k': {5: 6}}}\n",
    ),
    "changes_its_argument": (
        "def f(items):\n    items.sort()\n",
        "def check(candidate):\n    items = [3, 1, 2]\n    assert candidate(items) is None\n    assert items == [1, 2, 3]\n",
    ),
    "raises_as_asked": (
        "def f(n):\n    if n < 0:\n        raise ValueError('negative')\n    return n\n",
        "def check(candidate):\n    try:\n        candidate(-1)\n        assert False\n    except ValueError:\n"
        "        assert True\n    assert candidate(2) == 2\n",
    ),
    "own_exception": (
        "class Odd(KeyError):\n    pass\ndef f(n):\n    raise Odd(n)\n",
        "def check(candidate):\n    try:\n        candidate(1)\n        assert False\n    except LookupError:\n"
        "        assert True\n",
    ),
    "random": ("import random\ndef f(n):\n    return random.randint(n, n) ** 2\n", _SIMPLE),
    "sees_the_functions_of_random_itself": (
        "import random\ndef f():\n    return random.seed.__func__ is random.Random.seed\n",
        "assert f()\n",
    ),
    "many_imports": (
        "import heapq, bisect, itertools, math, re, string, collections, decimal, fractions, datetime, json, hashlib\n"
        "def f(n):\n    return int(fractions.Fraction(n) * decimal.Decimal(n).__int__())\n",
        _SIMPLE,
    ),
    "catches_everything": (
        "def f(n):\n    try:\n        1 / 0\n    except BaseException:\n        return n * n\n",
        _SIMPLE,
    ),
    "type_hints_and_protocols": (
        "from typing import Protocol, TypeVar, Generic\nT = TypeVar('T')\nclass B(Generic[T]):\n    def __init__(self, "
        "x: T) -> None:\n        self.x = x\ndef f(n: int) -> int:\n    return B(n).x * n\n",
        _SIMPLE,
    ),
    "main_guard": ("def f(n):\n    return n * n\nif __name__ == '__main__':\n    raise SystemExit(f(2))\n", _SIMPLE),
    "state_between_calls": (
        "calls = []\ndef f(n):\n    calls.append(n)\n    return len(calls)\n",
        "assert f(0) == 1\nassert f(0) == 2\nassert f(0) == 3\n",
    ),
    "long_answer": ("def f(n):\n    return list(range(n))\n", "assert f(50000) == list(range(50000))\n"),
    "counter": (
        "from collections import Counter, OrderedDict, defaultdict\ndef f(s):\n    d = defaultdict(list)\n"
        "    d[0].append(Counter(s))\n    return OrderedDict(d)\n",
        "assert f('aab') == {0: [{'a': 2, 'b': 1}]}\n",
    ),
}
NEEDS_NAMESPACES = {
    "scratch_file": (
        "import os, tempfile\ndef f(n):\n    with tempfile.NamedTemporaryFile('w+') as file:\n        "
        "file.write(str(n * n))\n        file.seek(0)\n        return int(file.read())\n",
        _SIMPLE,
    ),
    "child_process": (
        "import os\ndef f(n):\n    r, w = os.pipe()\n    pid = os.fork()\n    if pid == 0:\n        os.write(w, "
        "bytes([n * n]))\n        os._exit(0)\n    os.waitpid(pid, 0)\n    return os.read(r, 1)[0]\n",
        _SIMPLE,
    ),
    "processes_with_lock_value_and_queue": (
        "import multiprocessing as mp\ndef add(lock, total, queue, k):\n    with lock:\n        total.value += k\n"
        "    queue.put(k)\ndef f(n):\n    lock, total, queue = mp.Lock(), mp.Value('i', 0), mp.Queue()\n"
        "    children = [mp.Process(target=add, args=(lock, total, queue, n)) for _ in range(n)]\n"
        "    for child in children:\n        child.start()\n    got = [queue.get() for _ in children]\n"
        "    for child in children:\n        child.join()\n    assert sum(got) == total.value\n    return total.value\n",
        _SIMPLE,
    ),
    "pool_of_processes": (
        "from multiprocessing import Pool\ndef g(n):\n    return n\ndef f(n):\n    with Pool(2) as pool:\n"
        "        return sum(pool.map(g, [n] * n))\n",
        _SIMPLE,
    ),
    "executor_of_processes": (
        "from concurrent.futures import ProcessPoolExecutor\ndef g(n):\n    return n\ndef f(n):\n"
        "    with ProcessPoolExecutor(2) as pool:\n        return sum(pool.map(g, [n] * n))\n",
        _SIMPLE,
    ),
    "null_device": (
        "import contextlib, os\ndef f(n):\n    with open(os.devnull, 'w') as null, contextlib.redirect_stdout(null):\n"
        "        print(n)\n    return n * n\n",
        _SIMPLE,
    ),
}
NUMPY = Execution(
    "import numpy as np\ndef f(n):\n    return float((np.ones((n, n)) @ np.arange(n)).sum())\n",
    "f",
    "import numpy as np\ndef check(candidate):\n    np.testing.assert_allclose(candidate(3), 9.0)\n"
    "    assert candidate(2) == 2.0\n",
)
