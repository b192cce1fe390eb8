from __future__ import annotations

import ast
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.rewards.program import extract_module
from magrpo.rewards.usage import (
    assigns_forwarding,
    classify_use,
    does_nothing,
    find_forwarding_call,
    packs_lists,
)


def f(body: str) -> str:
    return "def f(xs, k=2):\n" + "".join(f"    {line}\n" for line in body.split("\n"))


@pytest.mark.parametrize(
    "body",
    [
        "return aux(xs)",
        "return sum(aux(xs)) + 1",
        "y = aux(xs)\nreturn y",
        "y = aux(xs)\nz = y\nw = z + 1\nreturn w",
        "if aux(xs):\n    return 1\nreturn 2",
        "total = 0\nfor x in aux(xs):\n    total += x\nreturn total",
        "total = 0\ntotal += aux(xs)\nreturn total",
        "return sorted(xs, key=aux)",
        "return list(map(aux, xs))",
        "g = aux\nreturn g(xs)",
        "out = []\nout.append(aux(xs))\nreturn out",
        "d = {}\nd[k] = aux(xs)\nreturn d",
        "while aux(xs):\n    k += 1\nreturn k",
        "if (y := aux(xs)) > 1:\n    return y\nreturn 0",
        "a, *b = aux(xs)\nreturn b",
        "return [aux(x) for x in xs if x]",
        "return f'{aux(xs)}'",
        "def g():\n    return aux(xs)\nreturn g()",
        "with aux(xs) as y:\n    return 1",
        "y: int = aux(xs)\nreturn y",
        "if True:\n    return aux(xs)\nreturn 1",
        "yield aux(xs)",
        "yield from aux(xs)",
        "y = aux(xs)\nyield y",
        "k = yield aux(xs)",
        "def g():\n    for x in xs:\n        yield aux(x)\nreturn list(g())",
    ],
)
def test_used(body: str) -> None:
    assert classify_use(f(body), "aux") == "used"


@pytest.mark.parametrize(
    "body",
    [
        "aux(xs)\nreturn 1",
        "_ = aux(xs)\nreturn 1",
        "y = aux(xs)\nreturn 1",
        "y = aux(xs)\ny\nreturn 1",
        "y = aux(xs)\nz = y\nw = z + 1\nreturn 1",
        "y, z = aux(xs)\nreturn 1",
        "aux(xs) + 1\nreturn 1",
        "[aux(x) for x in xs]\nreturn 1",
        "(y := aux(xs))\nreturn 1",
        "y = 0\ny += aux(xs)\nreturn 1",
        "print(aux(xs))\nreturn 1",
        "y = len(aux(xs))\nreturn 1",
        "if aux(xs):\n    pass\nreturn 1",
        "y = aux(xs)\nif False:\n    return y\nreturn 1",
        "y = aux(xs)\nreturn 1\nreturn y",
        "g = aux\nreturn 1",
        "aux(xs).sort()\nreturn 1",
        "y: int = aux(xs)\nreturn 1",
        "yield 1\naux(xs)",
    ],
)
def test_dropped(body: str) -> None:
    assert classify_use(f(body), "aux") == "dropped"


@pytest.mark.parametrize(
    "body",
    [
        "# aux(xs)\nreturn 1",
        "'aux(xs)'\nreturn 'aux(xs)'",
        "return xs.aux(xs)",
        "if False:\n    return aux(xs)\nreturn 1",
        "if True:\n    return 1\nelse:\n    return aux(xs)",
        "while 0:\n    return aux(xs)\nreturn 1",
        "return 1\nreturn aux(xs)",
        "raise ValueError\naux(xs)",
        "def aux(x):\n    return x\nreturn aux(xs)",
        "aux = len\nreturn aux(xs)",
        "from m import aux\nreturn aux(xs)",
        "import m as aux\nreturn aux(xs)",
        "return [aux(1) for aux in xs]",
        "global aux\nreturn aux(xs)",
        "return (lambda aux: aux(xs))(len)",
        "try:\n    pass\nexcept ValueError as aux:\n    return aux(xs)",
        "match xs:\n    case aux:\n        return aux(xs)",
        "match xs:\n    case {**aux}:\n        return aux",
        "aux.__code__ = g.__code__\nreturn aux(xs)",
    ],
)
def test_not_the_partners(body: str) -> None:
    assert classify_use(f(body), "aux") == "none"


@pytest.mark.parametrize(
    ("value", "forwards"),
    [
        ("partial(aux, 2)", True),
        ("lambda xs: aux(xs, K)", True),
        ("lambda xs: aux(sorted(xs))", False),
        ("lambda xs: 2 * aux(xs)", False),
        ("compose(aux, 2)", False),
        ("partial(other, 2)", False),
        ("3", False),
    ],
)
def test_values_that_only_forward(value: str, forwards: bool) -> None:
    module = f"def compose(g, k):\n    return lambda xs: k * g(xs)\nf = {value}"
    assert assigns_forwarding(module, "f", "aux") == forwards
    assert not assigns_forwarding(f("return aux(xs)"), "f", "aux")


@pytest.mark.parametrize(
    "body",
    [
        "return xs",
        "return k",
        "return 7",
        "return [xs, (k, 1)], {'xs': xs}",
        "y = xs\nz, *w = y, k\nreturn w",
        "yield xs",
        "return lambda: xs",
        "'Documented.'\nreturn xs",
        "return len('abc') + 1",
        "import math\nreturn math.pi",
    ],
)
def test_does_nothing(body: str) -> None:
    assert does_nothing(f(body), "f")


@pytest.mark.parametrize(
    "body",
    [
        "return xs[0]",
        "return -k",
        "return list(xs)",
        "return xs.copy()",
        "return xs if k else 0",
        "return [x for x in xs]",
        "n = 0\nwhile True:\n    yield n\n    n += 1",
        "return lambda x: x + 1",
        "def g(x):\n    return x + 1\nreturn g",
    ],
)
def test_does_something(body: str) -> None:
    assert not does_nothing(f(body), "f")


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ("return aux(xs) + 1", "aux(xs)"),
        ("return aux((xs, 1), k=[k])[0]", "aux((xs, 1), k=[k])"),
        ("return aux(*xs)", "aux(*xs)"),
        ("y = aux(k)\nreturn aux(y)", "aux(k)"),
        ("return aux(xs, -1, 1 + 1, n=len(xs))", "aux(xs, -1, 1 + 1, n=len(xs))"),
        ("return aux(list(xs)) + 1", "aux(list(xs))"),
        ("return aux(len([x for x in xs if x]))", ""),
        ("return aux(xs[0] + k)", ""),
        ("return aux(xs, K)", "aux(xs, K)"),
        ("return aux(K)", ""),
        ("y = k\nreturn aux(xs, y)", ""),
        ("def g(x):\n    return x\nreturn aux(xs, g)", ""),
        ("ys = xs[1:]\nreturn aux(ys)", ""),
        ("return aux(sorted(xs))", ""),
        ("return aux(1)", ""),
        ("return [aux(x) for x in xs]", ""),
        ("return sorted(xs, key=aux)", ""),
        (f"return aux(xs, 0x{'f' * 9000})", f"aux(xs, 0x{'f' * 9000})"),
    ],
)
def test_the_call_that_carries_the_parameters(body: str, call: str) -> None:
    assert find_forwarding_call(f(body), "f", "aux") == call


@pytest.mark.parametrize(
    ("body", "packs"),
    [
        ("return [k]", True),
        ("if k:\n    return [xs, k]\nreturn [0, 1]", True),
        ("return [x for x in xs]", False),
        ("if k:\n    return [k]\nreturn xs", False),
    ],
)
def test_lists_that_are_written_out(body: str, packs: bool) -> None:
    assert packs_lists(f(body), "f") is packs


@given(
    st.lists(st.sampled_from(["y = aux(xs)", "y", "return y", "z = y", "if y:\n    pass", "aux", "y = k"]), max_size=8)
)
def test_use_is_always_decided(lines: list[str]) -> None:
    source = extract_module(f("\n".join([*lines, "pass"])), "f").source
    mentioned = any(isinstance(n, ast.Name) and n.id == "aux" for n in ast.walk(ast.parse(source)))
    assert mentioned or classify_use(source, "aux") == "none"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "source",
    [
        f("\n".join(f"a{i} = a{i + 1}" for i in range(1500)) + "\na1500 = aux(xs)\nreturn a0"),
        f("\n".join("y = " + "+".join(["y"] * 250) for _ in range(60)) + "\nreturn aux(y)"),
        f("return " + "+".join(["aux(xs)"] * 250)),
    ],
    ids=["chain", "sums", "calls"],
)
def test_large_modules(source: str) -> None:
    assert classify_use(source, "aux") == "used"


TARGETS = "=".join(f"a{i}" for i in range(2000))


@pytest.mark.parametrize(
    "line",
    [
        f"{TARGETS} = ({','.join(f'b{i}' for i in range(3000))})",
        f"{TARGETS} = ({','.join(f'(a := b{i})' for i in range(1500))})",
        f"x = {'aux(' * 90}[{','.join(['x'] * 9000)}]{')' * 90}",
    ],
    ids=["targets", "walrus", "nested calls"],
)
def test_hostile_modules_take_memory_in_proportion(line: str) -> None:
    """A pair for each target and value would be 300 MiB."""
    tracemalloc.start()
    try:
        source = f(f"{line}\nreturn aux(xs) + 1")
        assert classify_use(source, "aux") == "used"
        assert find_forwarding_call(source, "f", "aux") == "aux(xs)"
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
