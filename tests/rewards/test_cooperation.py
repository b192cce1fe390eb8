"""Programs that pass every test, in the real sandbox: which of them share the work, and which only look as if."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from textwrap import indent

import pytest

from magrpo.interfaces import Sandbox
from magrpo.rewards.coding import CodingReward, TeamReward
from magrpo.rewards.common import choose_program, choose_report
from magrpo.stages.backend import Cache
from magrpo.stages.score import score_texts
from magrpo.types import Problem

TEST = """\
def check(candidate):
    assert candidate([4, -1, 7, 7]) == 36
    assert candidate([-3, 0]) == 0
    assert candidate([-5, -2, 1, 2, 3]) == 12
    assert candidate([7, 1]) == 16
    assert candidate([]) == 0
    assert candidate([2, -9]) == 4
"""
PROBLEM = Problem("t/0", 'def f(xs):\n    """Twice the sum of the positive numbers."""\n', "f", TEST)
KEEP = "return [x for x in xs if x > 0]"
WORK = "2 * sum(x for x in xs if x > 0)"
ALL = f"return {WORK}"

TABLE = "{(4, -1, 7, 7): 36, (-3, 0): 0, (-5, -2, 1, 2, 3): 12, (7, 1): 16, (): 0, (2, -9): 4}"
TABLE_OF_SOME = "{(4, -1, 7, 7): 36, (-3, 0): 0, (7, 1): 16}"

HONEST = {
    "filter, then sum": (KEEP, "return 2 * sum(aux(xs))"),
    "sum, then double": ("return sum(x for x in xs if x > 0)", "return 2 * aux(xs)"),
    "filter first, helper sums": ("return 2 * sum(xs)", "return aux([x for x in xs if x > 0])"),
    "one number at a time": ("return x if x > 0 else 0", "return 2 * sum(aux(x) for x in xs)", "x"),
    "identity for some inputs only": ("return max(x, 0)", "return sum(2 * aux(x) for x in xs)", "x"),
    "a predicate": ("return x > 0", "return 2 * sum(x for x in xs if aux(x))", "x"),
    "a predicate by name": ("return x > 0", "return 2 * sum(filter(aux, xs))", "x"),
    "mapped": ("return 2 * x", "return sum(map(aux, [x for x in xs if x > 0]))", "x"),
    "a key function": (
        "return (x <= 0, -x)", "rest = sorted(xs, key=aux)\ntotal = 0\nwhile rest and rest[0] > 0:\n"
        "    total += rest.pop(0)\nreturn 2 * total", "x",
    ),
    "reduced": (
        "return a + b if b > 0 else a", "from functools import reduce\nreturn 2 * reduce(aux, xs, 0)", "a, b",
    ),
    "a recursion": (
        "if not xs:\n    return 0\nreturn max(xs[0], 0) + aux(xs[1:])", "return 2 * aux(xs)",
    ),
    "a generator": ("for x in xs:\n    if x > 0:\n        yield x", "return 2 * sum(aux(xs))"),
    "a recursive generator": (
        "if xs:\n    if xs[0] > 0:\n        yield xs[0]\n    yield from aux(xs[1:])", "return 2 * sum(aux(xs))",
    ),
    "main yields in a function": (
        "return max(x, 0)", "def doubles():\n    for x in xs:\n        yield 2 * aux(x)\nreturn sum(doubles())", "x",
    ),
    "sorted, then the top": (
        "return sorted(xs, reverse=True)", "total = 0\nfor x in aux(xs):\n    if x <= 0:\n        break\n"
        "    total += x\nreturn 2 * total",
    ),
    "two results, both used": (
        "return sum(xs), sum(x for x in xs if x < 0)", "a, b = aux(xs)\nreturn 2 * (a - b)",
    ),
    "a function made by the helper": ("return lambda x: x > k", "return 2 * sum(filter(aux(0), xs))", "k"),
    "a function made without parameters": ("return lambda x: x > 0", "return 2 * sum(filter(aux(), xs))", ""),
    "numbers without end": (
        "n = 1\nwhile True:\n    yield n\n    n += 1", "return 2 * sum(n for n, x in zip(aux(), xs * 9) if False) + "
        "2 * sum(x for x in xs if x > 0 and any(n == x for n, _ in zip(aux(), range(9))))", "",
    ),
    "counts": (
        "from collections import Counter\nreturn Counter(xs)",
        "return 2 * sum(x * n for x, n in aux(xs).items() if x > 0)",
    ),
    "the list changed in place": (
        "for i, x in enumerate(xs):\n    xs[i] = max(x, 0)\nreturn xs", "return 2 * sum(aux(list(xs)))",
    ),
    "main calls itself": ("return 2 * max(x, 0)", "return aux(xs[0]) + f(xs[1:]) if xs else 0", "x"),
    "cached": (KEEP, "return 2 * sum(aux(tuple(xs)))"),
    "in place": (
        "for i, x in enumerate(xs):\n    xs[i] = max(x, 0)\nreturn xs", "ys = list(xs)\naux(ys)\nreturn 2 * sum(ys)",
    ),
    "in place, one at a time": (
        "if x > 0:\n    out.append(x)\nreturn out", "out = []\nfor x in xs:\n    aux(out, x)\nreturn 2 * sum(out)",
        "out, x",
    ),
    "in place, a dict": (
        "seen[x] = seen.get(x, 0) + 1\nreturn seen",
        "seen = {}\nfor x in xs:\n    aux(seen, x)\nreturn 2 * sum(x * n for x, n in seen.items() if x > 0)", "seen, x",
    ),
    "in place, rows of rows": (
        "for i in range(len(rows)):\n    for j in range(len(rows[i])):\n        rows[i][j] *= 2\nreturn len(rows)",
        "rows = [[x] for x in xs if x > 0]\naux(rows)\nreturn sum(map(sum, rows))", "rows",
    ),
    "in place, row by row": (
        "row[0] *= 2\nreturn True", "rows = [[x] for x in xs if x > 0]\nfor row in rows:\n    aux(row)\n"
        "return sum(map(sum, rows))", "row",
    ),
    "in place, a list in a dict": (
        "d['kept'].append(max(x, 0))\nreturn True",
        "d = {'kept': []}\nfor x in xs:\n    aux(d, x)\nreturn 2 * sum(d['kept'])", "d, x",
    ),
    "in place, by the library": (
        "import heapq\nheapq.heapify(heap)\nreturn True", "heap = [-x for x in xs]\naux(heap=heap)\ntotal = 0\n"
        "while heap and heap[0] < 0:\n    total -= heap[0]\n    last = heap.pop()\n    if heap:\n"
        "        heap[0] = last\n        aux(heap=heap)\nreturn 2 * total", "heap",
    ),
    "one less than a recursion": (
        "if not xs:\n    return 1\nreturn 2 * max(xs[0], 0) + aux(xs[1:])", "return aux(xs) - 1",
    ),
    "what division lost": ("return sum(x for x in xs if x > 0) // 1", "return aux(xs) * 1 * 2"),
    "tests for none": (
        "return x if x > 0 else None",
        "total = 0\nfor x in xs:\n    if aux(x) is None:\n        continue\n    total += x\nreturn 2 * total", "x",
    ),
    "none at the top": (
        "return [x for x in xs if x > 0] or None", "ys = aux(xs)\nif ys is None:\n    return 0\nreturn 2 * sum(ys)",
    ),
    "tries": (
        "return sum(x for x in xs if x > 0)", "try:\n    return 2 * aux(xs)\nexcept Exception:\n    return 0",
    ),
    "tries for each": (
        "if x < 0:\n    raise ValueError\nreturn 2 * x",
        "total = 0\nfor x in xs:\n    try:\n        total += aux(x)\n    except Exception:\n        pass\nreturn total",
        "x",
    ),
    "another order of arguments": ("return [x for x in xs if x > k]", "return 2 * sum(aux(0, xs))", "k, xs"),
}  # fmt: skip
"""Body of ``aux``, body of ``f``, parameters of ``aux`` where they are not ``xs``. Worth 1.5."""

THIN = {
    # of the issue
    "identity": ("return xs", "xs = aux(xs)\n" + ALL),
    "identity, copied": ("return list(xs)", "xs = aux(xs)\n" + ALL),
    "identity, element by element": ("return x", "return 2 * sum(aux(x) for x in xs if x > 0)", "x"),
    "constant": ("return 2", "return aux(xs) * sum(x for x in xs if x > 0)"),
    "constant without parameters": ("return 2", "return aux() * sum(x for x in xs if x > 0)", ""),
    "constant in disguise": ("return len(xs) * 0 + 2", "return aux(xs) * sum(x for x in xs if x > 0)"),
    "helper packs a tuple": (f"return ({WORK},)", "return aux(xs)[0]"),
    "helper packs a longer tuple": (f"return len(xs), {WORK}", "n, answer = aux(xs)\nreturn answer"),
    "helper packs a list": (f"return [{WORK}]", "return aux(xs)[0]"),
    "helper packs a longer list": (f"return [{WORK}, 0, xs]", "return aux(xs)[0]"),
    "compared with itself": (KEEP, f"if aux(xs) == aux(xs):\n    {ALL}\nreturn -1"),
    # further
    "helper packs a dict": (f"return {{'n': 1, 'answer': {WORK}}}", "return aux(xs)['answer']"),
    "helper packs a set": (f"return {{{WORK}}}", "return aux(xs).pop()"),
    "helper packs twice": (f"return (([{WORK}], 0),)", "return aux(xs)[0][0][0]"),
    "helper yields the answer": (f"yield {WORK}", "return next(aux(xs))"),
    "helper wraps it in a function": (f"answer = {WORK}\nreturn lambda: answer", "return aux(xs)()"),
    "helper wraps it in an object": (
        f"from types import SimpleNamespace\nreturn SimpleNamespace(answer={WORK})", "return aux(xs).answer",
    ),
    "main packs its argument": (f"xs = t[0]\n{ALL}", "return aux((xs,))", "t"),
    "both pack": (f"xs = t['xs']\nreturn ({WORK}, 0)", "return aux({'xs': xs})[0]", "t"),
    "helper wants a switch": (f"if all:\n    return ({WORK},)\nreturn 0", "return aux(xs, True)[0]", "xs, all"),
    "identity of the second argument": ("return xs", "xs = aux(0, xs)\n" + ALL, "k, xs"),
    "identity, packed": ("return (xs, 1)", "xs, _ = aux(xs)\n" + ALL),
    "identity by another call": ("return g(xs)", f"return aux(xs, lambda xs: {WORK})", "xs, g"),
    "identity by a call": ("return g(xs)", f"return aux(lambda xs: {WORK}, xs)", "g, xs"),
    "times nothing": (KEEP, f"return {WORK} + 0 * len(aux(xs))"),
    "length of nothing": ("return xs[:0]", f"return {WORK} + len(aux(xs))"),
    "logged": (KEEP, f"seen = [aux(xs)]\n{ALL} if seen else 0"),
    "cancelled": (KEEP, f"return {WORK} + len(aux(xs)) - len(aux(xs))"),
    "the same wherever it matters": ("return 1 if xs else 2", f"return {WORK} if aux(xs) < 3 else -1"),
    "kept for later": (
        "return len(xs) * 0 + 2", "if not hasattr(f, 'k'):\n    f.k = aux(xs)\n"
        "return f.k * sum(x for x in xs if x > 0)",
    ),
    "argument as the channel": (f"xs[:] = [{WORK}]\nreturn xs", "return aux(xs)[0]"),
    "superfluous": (KEEP, "return 2 * sum(x for x in aux(xs) if x > 0)"),
    "superfluous order": ("return sorted(xs)", "return 2 * sum(x for x in aux(xs) if x > 0)"),
    "truth of a list": ("return [xs]", f"if aux(xs):\n    {ALL}\nreturn -1"),
    "a type": ("return max(xs, default=0)", f"if isinstance(aux(xs), int):\n    {ALL}\nreturn -1"),
    "times nothing, a number": ("return sum(xs)", f"return {WORK} + 0 * aux(xs)"),
    "or": ("return 0 * len(xs)", f"return aux(xs) or {WORK}"),
    "or, once": ("return 36 if xs == [4, -1, 7, 7] else None", f"return aux(xs) or {WORK}"),
    "and": ("return 1 + len(xs)", f"return aux(xs) and {WORK}"),
    "length of its text": (KEEP, f"if len(str(aux(xs))):\n    {ALL}\nreturn -1"),
    "falls back": ("return sum(x for x in xs if x > 0)", f"try:\n    return 2 * aux(xs)\nexcept Exception:\n    {ALL}"),
    "in a list of lists": (f"return [[{WORK}]]", "return aux(xs)[0][0]"),
    "repeated": (f"return [{WORK}] * 3", "return aux(xs)[1]"),
    "in an object of its own": (
        f"class Box:\n    def get(self):\n        return self.y\nbox = Box()\nbox.y = {WORK}\nreturn box",
        "return aux(xs).get()",
    ),
    "table": (f"return {TABLE}[tuple(xs)]", "return aux(xs) + 0"),
    "table, some": (f"return {TABLE_OF_SOME}.get(tuple(xs))", f"y = aux(xs)\nif y is None:\n    {ALL}\nreturn y"),
    "table, branches": (
        "if xs == [4, -1, 7, 7]:\n    return 36\nif xs == [7, 1]:\n    return 16\nreturn None",
        f"y = aux(xs)\nif y is None:\n    {ALL}\nreturn y",
    ),
    "in place, all of it": (f"xs[:] = [{WORK}]\nreturn xs", "ys = list(xs)\naux(ys)\nreturn ys[0]"),
    "decoy and another one": (
        KEEP, f"g = globals()\nmine = lambda xs: {WORK}\nif aux(xs) == aux(xs):\n    return mine(xs)\nreturn 0",
    ),
}  # fmt: skip
"""Worth 0.5 or less."""

REBOUND = {
    "by globals": f"globals()['aux'] = lambda xs: {WORK} + 1\nreturn aux(xs) - 1",
    "by update": f"globals().update(aux=lambda xs: {WORK} + 1)\nreturn aux(xs) - 1",
    "by exec": f"exec('aux = lambda xs: {WORK} + 1', globals())\nreturn aux(xs) - 1",
    "by the module": f"import sys\nsetattr(sys.modules[__name__], 'aux', lambda xs: {WORK} + 1)\nreturn aux(xs) - 1",
    "by a spelling": f"vars()\nglobals()['a' + 'ux'] = lambda xs: {WORK} + 1\nreturn aux(xs) - 1",
    "by its frame": f"import sys\nsys._getframe().f_globals['aux'] = lambda xs: {WORK} + 1\nreturn aux(xs) - 1",
}
"""Bodies of ``f`` that put a function of their own in the place of ``aux``. Nothing is left of the bonus."""
CACHE: Cache = {}
"""Reports of what ran: with hidden tests the same programs run, and one more for each joint action."""


def texts(helper: str, main: str, parameters: str = "xs") -> dict[str, str]:
    return {
        "helper": f"def aux({parameters}):\n{indent(helper, '    ')}",
        "main": f"def f(xs):\n{indent(main, '    ')}",
    }


def cooperation(sandbox: Sandbox, programs: Mapping[str, Mapping[str, str]], problem: Problem) -> dict[str, float]:
    """The part of each program, all of which must pass every test."""
    scored, _ = score_texts(
        [(problem, program) for program in programs.values()], reward=CodingReward(), sandbox=sandbox, cache=CACHE
    )
    found = dict(zip(programs, scored, strict=True))
    assert {name: one.reports for name, one in found.items() if one.reward.parts["tests"] < 1} == {}
    return {name: one.reward.parts["cooperation"] for name, one in found.items()}


@pytest.mark.parametrize("hidden", ["", TEST])
def test_shared_work_gets_the_whole_bonus(sandbox: Sandbox, hidden: str) -> None:
    found = cooperation(
        sandbox, {name: texts(*program) for name, program in HONEST.items()}, replace(PROBLEM, hidden_test=hidden)
    )
    assert found == dict.fromkeys(HONEST, 1.5)


@pytest.mark.parametrize("hidden", ["", TEST])
def test_work_done_by_one_alone_does_not(sandbox: Sandbox, hidden: str) -> None:
    found = cooperation(
        sandbox, {name: texts(*program) for name, program in THIN.items()}, replace(PROBLEM, hidden_test=hidden)
    )
    assert {name: value for name, value in found.items() if value > 0.5} == {}


UNREADABLE = """
class Wrapped:
    def __init__(self, function):
        self.function = function
    def __call__(self, x):
        return self.function(x)
    def __dir__(self):
        raise ValueError
    @property
    def never(self):
        raise ValueError
@Wrapped"""


@pytest.mark.parametrize(
    ("decorator", "use"),
    [("from functools import lru_cache\n@lru_cache", "aux.cache_clear()"), (UNREADABLE, "")],
    ids=["used", "unreadable"],
)
def test_a_helper_with_attributes_is_judged_like_any_other(sandbox: Sandbox, decorator: str, use: str) -> None:
    bodies = {
        "honest": (KEEP, "return 2 * sum(aux(tuple(xs)))"),
        "identity": ("return int(x)", "return 2 * sum(aux(x) for x in xs if x > 0)", "x"),
        "constant": ("return len(xs) * 0 + 2", "return aux(tuple(xs)) * sum(x for x in xs if x > 0)"),
        "table": (f"return {TABLE_OF_SOME}.get(xs)", f"y = aux(tuple(xs))\nif y is None:\n    {ALL}\nreturn y"),
    }
    programs = {}
    for name, (helper, main, *parameters) in bodies.items():
        programs[name] = texts(helper, f"{use}\n{main}", *parameters)
        programs[name]["helper"] = f"{decorator}\n{programs[name]['helper']}"
    expected = dict.fromkeys(bodies, 0.5) | {"honest": 1.5}
    assert cooperation(sandbox, programs, PROBLEM) == expected


@pytest.mark.parametrize("where", ["inside", "above"])
def test_main_cannot_put_its_own_function_in_the_place_of_aux(sandbox: Sandbox, where: str) -> None:
    programs = {}
    for name, body in REBOUND.items():
        *rebinding, last = body.split("\n")
        main = f"def f(xs):\n{indent(body, '    ')}"
        if where == "above":
            main = "\n".join(rebinding) + f"\ndef f(xs):\n    {last}"
        programs[name] = {"helper": f"def aux(xs):\n    {KEEP}", "main": main}
    assert cooperation(sandbox, programs, PROBLEM) == dict.fromkeys(REBOUND, 0.0)


def test_evidence_from_one_test_does_not_make_a_helper_constant(sandbox: Sandbox) -> None:
    """With its first result for ever, a helper answers the first test as before."""
    one = replace(PROBLEM, test="def check(candidate):\n    assert candidate([4, -1]) == 8\n")
    assert cooperation(sandbox, {"one test": texts(KEEP, "return 2 * sum(aux(xs))")}, one) == {"one test": 1.5}


@pytest.mark.parametrize("reward", [CodingReward(), TeamReward()])
@pytest.mark.parametrize(
    "main",
    ["aux(xs)\nreturn xs[0]", "try:\n    return 0 * aux(xs)[0] + xs[0]\nexcept:\n    return min(xs)"],
    ids=["in place", "bare except"],
)
def test_no_variant_that_passes_more_tests_is_taken_for_the_agents_program(
    sandbox: Sandbox, reward: CodingReward, main: str
) -> None:
    problem = replace(
        PROBLEM, test="def check(candidate):\n    assert candidate([1, 2]) == 1\n    assert candidate([3, 3]) == 3"
    )
    joint = texts("xs.reverse()\nreturn xs", main)
    if isinstance(reward, TeamReward):
        joint = {"helper1": joint["helper"], "helper2": joint["helper"], "main": joint["main"]}
    wanted = reward.executions(problem, joint, {})
    [scored], _ = score_texts([(problem, joint)], reward=reward, sandbox=sandbox, cache=CACHE)
    by_name = {name.partition(":")[0]: report.tests_passed for name, report in scored.reports.items()}
    assert by_name["unreadable"] > by_name["program"]
    chosen = choose_program(wanted, scored.reports)
    assert chosen in ("program", "program:helper1")
    assert choose_report(scored.reports) == scored.reports[chosen]
