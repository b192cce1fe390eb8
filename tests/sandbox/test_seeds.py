"""Random numbers: equal programs draw equal ones, and a seed that the test sets reaches the program. Also arrays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from magrpo.sandboxes.pool import Pool
from magrpo.types import Execution

from .conftest import MAIN_LEVELS, open_pool

DRAWS = """
import random
import numpy as np
own = np.random.default_rng()

def f():
    numbers = [random.random(), np.random.rand(), own.random(), np.random.default_rng().random()]
    return [*numbers, np.random.RandomState().rand()]
"""
SHOW = "assert f() == 1"
REPLAYS = """
import numpy as np
np.random.seed(3)
drawn = f(2)
np.random.seed(seed=3)
assert f(2) == drawn
np.random.seed(3)
assert np.random.rand(2).tolist() == drawn
"""
STANDARD = "import random\nrandom.seed(a=4)\nx = f()\nrandom.seed(4)\nassert x == random.random()\n"


@pytest.fixture(scope="module", params=MAIN_LEVELS)
def numpy_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = open_pool(level=request.param, workers=1, packages=["numpy"])
    yield pool
    pool.close()


def test_equal_programs_draw_equal_numbers(numpy_pool: Pool) -> None:
    first, second = (numpy_pool.run([Execution(DRAWS, "f", SHOW)])[0].cases for _ in range(2))
    assert first == second
    drawn = first[0].message.partition("got ")[2]
    assert len(set(drawn.strip("[]").split(", "))) == 5, drawn


def test_equal_tests_draw_equal_numbers(numpy_pool: Pool) -> None:
    test = "import random\nimport numpy as np\nassert f([random.random(), np.random.default_rng().random()]) == 1"
    execution = Execution("def f(drawn):\n    return drawn", "f", test)
    alone, *batch = (report.cases for count in (1, 2) for report in numpy_pool.run_batch([execution] * count))
    assert alone[0].status == "wrong"
    assert batch == [alone, alone]


def test_a_seed_set_by_the_test_reaches_the_program(numpy_pool: Pool) -> None:
    numpy = "import numpy as np\ndef f(n):\n    return np.random.rand(n).tolist()\n"
    standard = "import random\ndef f():\n    return random.random()\n"
    reports = numpy_pool.run([Execution(numpy, "f", REPLAYS), Execution(standard, "f", STANDARD)])
    assert [report.status for report in reports] == ["pass", "pass"], [report.cases for report in reports]


@pytest.mark.parametrize("numpy_pool", ["namespaces"], indirect=True)
def test_children_draw_numbers_of_their_own(numpy_pool: Pool) -> None:
    source = """
import numpy as np
from multiprocessing import Pool

def draw(_):
    return np.random.default_rng().random()

def f():
    with Pool(2) as pool:
        return len({*pool.map(draw, range(2), chunksize=1), draw(0)})
"""
    [report] = numpy_pool.run([Execution(source, "f", "assert f() == 3")])
    assert report.status == "pass", report.cases


def test_arrays_of_objects_and_types_of_numpy_are_compared_in_the_programs_process(numpy_pool: Pool) -> None:
    head = "import numpy as np\n"
    source = f"{head}def f(n):\n    return [np.array([1, None]), np.dtype('f8'), np.array([1, 2])][n]\n"
    tests = (
        "assert (f(0) == np.array([1, None])).all()\nassert (f(0) == [1, None]).all()",
        "assert f(1) == np.float64\nassert f(1) == 'float64'",
        "assert (f(2) == np.array([1, 2])).all()",
    )
    reports = numpy_pool.run([Execution(source, "f", head + test) for test in tests])
    assert {report.status for report in reports} == {"pass"}
    assert [report.forgeable for report in reports] == [True, True, False]
