from __future__ import annotations

import ast
import builtins
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.embedded.conventions import write_completion
from magrpo.interfaces import Sandbox
from magrpo.problems.coopcode import CoopCode
from magrpo.problems.operations import parse_composition
from magrpo.rewards.coding import MAXIMA, UNREADABLE, VARIANTS, CodingReward, SoloReward, combine_completions
from magrpo.rewards.common import make_trusted_test
from magrpo.stages.score import Scored, score_texts
from magrpo.types import Case, CaseStatus, Execution, ExecutionReport, Problem
from tests.rewards.test_program import HOSTILE
from tests.sandbox.test_humaneval import read_problems

TEST = """\
def check(candidate):
    assert candidate([1, 2]) == 6
    assert candidate([]) == 0
    for n in range(1, 3):
        assert candidate([n]) == 2 * n
"""
PROBLEM = Problem("t/0", 'def f(xs):\n    """Twice the sum."""\n', "f", TEST, "    return 2 * sum(xs)\n")
AUX = "def aux(xs):\n    return sum(xs)"
MAIN = "def f(xs):\n    return 2 * aux(xs)"
REWARD = CodingReward()


def report(passed: int, total: int = 4, calls: int = 0, forgeable: bool = False) -> ExecutionReport:
    cases = (Case("pass"),) * passed + (Case("wrong"),) * (total - passed)
    status: CaseStatus = "pass" if passed == total else "wrong"
    return ExecutionReport(status, cases, "namespaces", watched_calls=calls, forgeable=forgeable)


RAISED = ExecutionReport("exception", (Case("exception"),) * 4, "namespaces")
"""Of a program that uses what it cannot."""


def parts(
    helper: str,
    main: str,
    program: ExecutionReport | None = None,
    wrapper: ExecutionReport | None = None,
    identity: ExecutionReport | None = None,
    constant: ExecutionReport | None = None,
    unreadable: ExecutionReport = RAISED,
) -> tuple[float, ...]:
    """Structure, syntax, tests and cooperation under hand-written reports, which must be just those asked for.

    The variant ``empty`` passes nothing.
    """
    defaults = {"unreadable": unreadable, "empty": report(0)}
    given_reports = {"program": program, "wrapper": wrapper, "identity": identity, "constant": constant}
    texts, reports = {"helper": helper, "main": main}, dict[str, ExecutionReport]()
    while wanted := REWARD.executions(PROBLEM, texts, reports):
        for name in wanted:
            answer = defaults[name] if name in defaults else given_reports.pop(name)
            assert answer is not None, name
            reports[name] = answer
    assert set(given_reports.values()) <= {None}, "a report that was not asked for"
    price = REWARD.price(PROBLEM, texts, reports)
    assert price.total == sum(price.parts.values())
    return tuple(price.parts[name] for name in MAXIMA)


def test_a_local_part_is_each_agents_own_share_of_the_structure() -> None:
    reports = {"program": report(2), "wrapper": report(0)}
    for helper, main, local in (
        (AUX, MAIN, {"helper": 0.4, "main": 0.6}),
        ("no code", MAIN, {"helper": 0.0, "main": 0.6}),
        (AUX, "no code", {"helper": 0.4, "main": 0.0}),
    ):
        texts = {"helper": helper, "main": main}
        plain = REWARD.price(PROBLEM, texts, reports)
        mixed = CodingReward(local_weight=0.5, scale=2.0, shift=1.0).price(PROBLEM, texts, reports)
        assert plain.local == {}
        assert (mixed.total, mixed.parts) == (2 * plain.total + 1, plain.parts)
        assert mixed.local == local


def test_hidden_tests_count_like_any_other() -> None:
    """A thin wrapper is one that passes whatever the program passes, of all tests."""
    problem, texts = replace(PROBLEM, hidden_test=TEST), {"helper": AUX, "main": MAIN}
    reports = {"program": report(4, calls=4), "program_hidden": report(1)}
    ends = ("", "_hidden")
    wanted = [f"{name}{end}" for name in ("program", UNREADABLE) for end in ends]
    assert list(REWARD.executions(problem, texts, {})) == wanted
    same = reports | {f"{UNREADABLE}{end}": reports[f"program{end}"] for end in ends}
    assert REWARD.executions(problem, texts, same) == {}
    assert REWARD.price(problem, texts, same).parts["cooperation"] == -0.5
    reports |= {UNREADABLE: report(4), f"{UNREADABLE}_hidden": RAISED}
    assert list(REWARD.executions(problem, texts, reports)) == [f"wrapper{end}" for end in ends]
    tried = reports | {f"wrapper{end}": report(0) for end in ends}
    assert list(REWARD.executions(problem, texts, tried)) == [f"{name}{end}" for name in VARIANTS[1:] for end in ends]
    wanted = [f"{name}{end}" for name in VARIANTS for end in ends]
    for variant in VARIANTS:
        for passed, cooperation in ((0, 1.5), (1, 0.5)):
            given = (
                reports | dict.fromkeys(wanted, report(0)) | {variant: report(4), f"{variant}_hidden": report(passed)}
            )
            assert REWARD.executions(problem, texts, given) == {}
            price = REWARD.price(problem, texts, given)
            assert (price.parts["tests"], price.parts["cooperation"]) == (5 / 8, cooperation)
            assert not REWARD.passed(given)


USED, UNCALLED = report(4, calls=4), report(4)


# -------------------------------------------------------------------------------------- each row of the table, by hand
def test_structure() -> None:
    assert parts("", "") == (0.0, 0.0, 0.0, 0.0)
    assert parts(AUX, "") == (0.4, 0.0, 0.0, 0.0)
    assert parts(AUX, "def f(xs):\n    pass") == (0.4, 0.0, 0.0, 0.0)
    assert parts(AUX, "def g(xs):\n    return 1") == (0.4, 0.0, 0.0, 0.0)
    assert parts("def aux(xs):\n    print(xs)", MAIN, report(0, calls=4)) == (0.6, 0.5, 0.0, 0.0)
    assert parts("I do not know.", "def f(xs):\n    return 2 * sum(xs)", UNCALLED) == (0.6, 0.5, 1.0, 0.0)


def test_main_cannot_supply_aux() -> None:
    assert parts("", f"{AUX}\n{MAIN}", report(0)) == (0.6, 0.5, 0.0, 0.0)


def test_a_program_that_does_not_compile_earns_its_structure() -> None:
    broken = replace(report(0), compiles=False)
    assert parts(AUX, "def f(xs):\n    return 1\nbreak", broken) == (1.0, 0.0, 0.0, 0.0)
    assert parts("def aux(x, x):\n    return x", MAIN, broken) == (1.0, 0.0, 0.0, 0.0)
    assert parts(AUX, MAIN, replace(USED, compiles=False)) == (1.0, 0.0, 0.0, 0.0)
    assert not REWARD.passed({"program": replace(USED, compiles=False)})
    unrun = REWARD.price(PROBLEM, {"helper": AUX, "main": MAIN}, {})
    assert unrun.parts["syntax"] == 0.0, "of a run whose trainer compiled"


def test_no_completion_is_compiled_in_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython copies every ``finally``: these 633 characters take 5 GiB."""
    compile_source = builtins.compile

    def refuse(source: str, filename: str, mode: str, flags: int = 0, **options: object) -> object:
        assert flags & ast.PyCF_ONLY_AST, "a completion is compiled"
        return compile_source(source, filename, mode, flags, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(builtins, "compile", refuse)
    blocks = [f"{' ' * i}try: return 1\n{' ' * i}finally:" for i in range(1, 17)]
    bomb = "\n".join(["def f(xs):", *blocks, " " * 17 + "pass"])
    assert parts(AUX, bomb, replace(report(0), compiles=False)) == (1.0, 0.0, 0.0, 0.0)
    solo, texts = SoloReward(), {"solo": bomb}
    assert set(solo.executions(PROBLEM, texts, {})) == {"program"}
    assert solo.price(PROBLEM, texts, {"program": replace(report(0), compiles=False)}).total == 1.0


@pytest.mark.parametrize("name", [*HOSTILE, "finally", "names"])
def test_hostile_completions_take_little_memory_of_the_trainer(name: str) -> None:
    blocks = "\n".join(f"{' ' * i}try: return 1\n{' ' * i}finally:" for i in range(1, 17))
    names = "=".join(f"a{i}" for i in range(2500)) + "=" + ",".join(f"b{i}" for i in range(2500))
    body = {"finally": f"{blocks}\n{' ' * 17}pass", "names": f" {names}"}.get(
        name, " return aux(x)\n" + HOSTILE.get(name, "")
    )
    tracemalloc.start()
    try:
        for helper, entry in ((AUX, f"def f(x):\n{body}"), (f"def aux(x):\n{body}", MAIN)):
            combine_completions(PROBLEM.prompt, "f", helper, entry)
        assert tracemalloc.get_traced_memory()[1] < 96 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("passed", "value"), [(0, 0.0), (1, 0.25), (3, 0.75), (4, 1.0)])
def test_tests_count_by_the_assert(passed: int, value: float) -> None:
    assert parts(AUX, "def f(xs):\n    return 0", report(passed)) == (1.0, 0.5, value, 0.0)


def test_no_case_at_all_is_no_test_passed() -> None:
    assert parts(AUX, MAIN, report(0, 0)) == (1.0, 0.5, 0.0, 0.0)


def test_cooperation_needs_a_test_passed() -> None:
    assert parts(AUX, MAIN, report(0, calls=4)) == (1.0, 0.5, 0.0, 0.0)
    assert parts(AUX, MAIN, report(1, calls=4), report(0), report(0)) == (1.0, 0.5, 0.25, 1.5)


def test_cooperation_needs_a_real_call() -> None:
    assert parts(AUX, MAIN, report(4)) == (1.0, 0.5, 1.0, 0.0)


def test_a_discarded_result_costs() -> None:
    discarding = "def f(xs):\n    y = aux(xs)\n    return 2 * sum(xs)"
    assert parts(AUX, discarding, USED, unreadable=report(4)) == (1.0, 0.5, 1.0, -0.5)
    assert parts(AUX, discarding, report(0, calls=4)) == (1.0, 0.5, 0.0, 0.0), "a change of an argument mattered"
    assert parts(AUX, MAIN, USED, unreadable=report(4)) == (1.0, 0.5, 1.0, -0.5)
    assert parts(AUX, MAIN, report(0, calls=4), unreadable=report(0)) == (1.0, 0.5, 0.0, -0.5)


def test_a_call_that_failed_gives_no_verdict_on_its_result() -> None:
    crashed = ExecutionReport("exception", (Case("pass"), Case("exception")), "namespaces", watched_calls=1)
    assert parts(AUX, MAIN, crashed, unreadable=crashed) == (1.0, 0.5, 0.5, 0.0)
    assert parts(AUX, "def f(xs):\n    aux(xs)\n    return 2", crashed, unreadable=crashed) == (1.0, 0.5, 0.5, -0.5)


def test_a_thin_wrapper_earns_half() -> None:
    """If main only calls ``aux``, the other variants do not run."""
    assert parts(AUX, MAIN, USED, report(4)) == (1.0, 0.5, 1.0, 0.5)
    assert parts(AUX, MAIN, USED, report(3), report(0), report(0)) == (1.0, 0.5, 1.0, 1.5)
    assert parts(AUX, "from functools import partial\nf = partial(aux, 2)", USED) == (0.4, 0.5, 1.0, 0.5)


def test_a_helper_without_work_earns_half() -> None:
    assert parts("def aux(xs):\n    return xs", MAIN, USED) == (1.0, 0.5, 1.0, 0.5)
    assert parts(AUX, MAIN, USED, report(0), report(4), report(0)) == (1.0, 0.5, 1.0, 0.5)
    assert parts(AUX, MAIN, USED, report(0), report(0), report(4)) == (1.0, 0.5, 1.0, 0.5)
    assert parts(AUX, MAIN, USED, report(3), report(3), report(3)) == (1.0, 0.5, 1.0, 1.5)
    reports = {"program": USED, UNREADABLE: RAISED, **dict.fromkeys(VARIANTS, report(0)), "empty": report(4)}
    assert REWARD.price(PROBLEM, {"helper": AUX, "main": MAIN}, reports).parts["cooperation"] == 0.5


def test_a_wrapper_that_passes_other_tests_is_none() -> None:
    first, second = report(2, calls=4), report(3)
    shuffled = ExecutionReport("wrong", second.cases[::-1], "namespaces")
    hanging, none = ExecutionReport("timeout", (Case("timeout"),), "namespaces"), report(0)
    assert parts(AUX, MAIN, first, shuffled, none, none) == (1.0, 0.5, 0.5, 1.5)
    assert parts(AUX, MAIN, first, second) == (1.0, 0.5, 0.5, 0.5)
    assert parts(AUX, MAIN, first, hanging, hanging, hanging) == (1.0, 0.5, 0.5, 1.5)


def test_variants_are_the_program_with_a_stand_in() -> None:
    texts = {"helper": AUX, "main": f"K = 2\n\n{MAIN}"}
    wanted: dict[str, Execution] = {}
    reports = {"program": USED, UNREADABLE: RAISED, "wrapper": report(0)}
    for known in (0, 2, 3):
        wanted |= REWARD.executions(PROBLEM, texts, dict(list(reports.items())[:known]))
    del wanted["program"]
    assert tuple(wanted) == (UNREADABLE, *VARIANTS)
    assert {(one.entry_point, one.test, one.watch) for one in wanted.values()} == {("f", TEST, "")}
    unreadable, wrapper, identity, constant, empty = (one.source for one in wanted.values())
    assert unreadable.endswith(f"aux = keep_attributes(unreadable_result(aux, True), aux)\n\n\nK = 2\n\n{MAIN}\n")
    assert f"{AUX}\n\n\nK = 2\n\n{MAIN}\n" in wrapper
    assert wrapper.endswith("def f(xs):\n    return __unpack__(__keep__(xs), aux(xs))\n")
    assert identity.endswith(f"aux = keep_attributes(first_argument(aux), aux)\n\n\nK = 2\n\n{MAIN}\n")
    assert constant.endswith(f"aux = keep_attributes(first_result(aux), aux)\n\n\nK = 2\n\n{MAIN}\n")
    assert empty.endswith(f"aux = keep_attributes(empty_result(aux), aux)\n\n\nK = 2\n\n{MAIN}\n")


def test_the_run_is_asked_to_watch_aux() -> None:
    wanted = REWARD.executions(PROBLEM, {"helper": AUX, "main": MAIN}, {})
    assert list(wanted) == ["program", UNREADABLE]
    execution = wanted["program"]
    assert (execution.source, execution.entry_point, execution.test, execution.watch) == (
        f"{AUX}\n\n\n{MAIN}\n", "f", TEST, "aux"
    )  # fmt: skip
    assert list(REWARD.executions(PROBLEM, {"helper": AUX, "main": "def f(xs):\n    return 1"}, {})) == ["program"]


def test_preamble_helper_main_in_this_order() -> None:
    prompt = (
        "from __future__ import annotations\nimport math\n\ndef half(x):\n    return x / 2\n\ndef f(xs):\n    'Do.'\n"
    )
    problem = Problem("t", prompt, "f", "def check(candidate):\n    assert candidate(half(2)) == 1\n")
    execution = REWARD.executions(problem, {"helper": AUX, "main": MAIN}, {})["program"]
    above = "from __future__ import annotations\n\n\nimport math\n\ndef half(x):\n    return x / 2"
    assert execution.source == f"{above}\n\n\n{AUX}\n\n\n{MAIN}\n"
    assert execution.test == make_trusted_test(prompt, "f", problem.test) == f"{above}\n\n\n{problem.test}\n"


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        (
            "'Doc.'\nfrom __future__ import annotations\n@mark\ndef check(candidate):\n    assert candidate(1) == 1\n",
            "from __future__ import annotations\n\n\nimport math\n\n\n'Doc.'\n\n@mark\ndef check(candidate):\n"
            "    assert candidate(1) == 1\n",
        ),
        (
            "from __future__ import annotations; assert f(1) == 1",
            "from __future__ import annotations\n\n\nimport math\n\n\nassert f(1) == 1\n",
        ),
        ("# Cases.\nassert f(1) == 1  # one\n", "import math\n\n\n# Cases.\nassert f(1) == 1  # one\n\n"),
        ("assert (", "import math\n\n\nassert (\n"),
    ],
)
def test_future_imports_of_a_test_come_first(test: str, expected: str) -> None:
    assert make_trusted_test("import math\n\ndef f(x):\n    'Do.'\n", "f", test) == expected


def test_scale_and_shift_act_on_the_total_only() -> None:
    reward = CodingReward(scale=0.5, shift=-1.0)
    texts, reports = (
        {"helper": AUX, "main": MAIN},
        {
            "program": USED,
            UNREADABLE: RAISED,
            **dict.fromkeys(VARIANTS, report(0)),
        },
    )
    price = reward.price(PROBLEM, texts, reports)
    assert price.total == 1.0
    assert reward.fraction(price.total) == 1.0
    assert price.parts == dict(MAXIMA) == dict(reward.maxima)


def test_forgeable_reports_are_refused_unless_they_are_allowed() -> None:
    texts, reports = {"helper": AUX, "main": MAIN}, {"program": report(4, calls=4, forgeable=True), UNREADABLE: RAISED}
    assert not CodingReward().passed(reports)
    assert CodingReward().price(PROBLEM, texts, reports).total == 1.5
    assert CodingReward(refuse_forgeable=False).passed(reports)


def test_passed() -> None:
    assert REWARD.passed({"program": report(4)})
    for reports in ({}, {"program": report(3)}, {"program": report(0, 0)}):
        assert not REWARD.passed(reports)


def test_a_failed_sandbox_has_no_price() -> None:
    failed = {"program": ExecutionReport("infra_error", (Case("infra_error"),), "namespaces")}
    with pytest.raises(AssertionError, match="mask the turn"):
        REWARD.price(PROBLEM, {"helper": AUX, "main": MAIN}, failed)


MODULES = st.sampled_from(
    [AUX, MAIN, "def f(xs):\n    return aux(xs)", "def f(x): return 1", "return", "```", "aux(1)", ""]
)
TEXTS = st.one_of(st.text(max_size=60), st.lists(MODULES, max_size=3).map("\n".join))
REPORTS = st.builds(report, st.integers(0, 4), st.just(4), st.integers(0, 2), st.booleans())


@given(TEXTS, TEXTS, REPORTS, REPORTS)
@settings(max_examples=200)
def test_price_is_bounded_by_the_maxima(
    helper: str, main: str, program: ExecutionReport, variant: ExecutionReport
) -> None:
    texts, reports = {"helper": helper, "main": main}, dict[str, ExecutionReport]()
    for _ in range(5):
        wanted = REWARD.executions(PROBLEM, texts, reports)
        reports |= {name: program if name == "program" else variant for name in wanted}
    assert not wanted
    price = REWARD.price(PROBLEM, texts, reports)
    assert price == REWARD.price(PROBLEM, dict(texts), dict(reports))
    assert set(price.parts) == set(MAXIMA)
    assert all(-0.5 <= price.parts[name] <= MAXIMA[name] for name in MAXIMA)
    assert 0 <= REWARD.fraction(price.total) <= 1


# ------------------------------------------------------------------------------------------------- in the real sandbox
def run(sandbox: Sandbox, items: Sequence[tuple[Problem, str, str]]) -> list[Scored]:
    pairs = [(problem, {"helper": helper, "main": main}) for problem, helper, main in items]
    scored, _ = score_texts(pairs, reward=REWARD, sandbox=sandbox, cache={})
    assert not any(item.masked for item in scored)
    return scored


DOUBLE = "def aux(xs):\n    return 2 * sum(xs)"


def main(*lines: str) -> str:
    return "\n    ".join(("def f(xs):", *lines))


ALONE = "return 2 * sum(xs)"
FULL, NONE, COSTS, HALF = (1.0, 0.5, 1.0, 1.5), (1.0, 0.5, 1.0, 0.0), (1.0, 0.5, 1.0, -0.5), (1.0, 0.5, 1.0, 0.5)
CASES = {
    "gold": (AUX, MAIN, FULL),
    "fenced": (f"```python\n{AUX}\n```", f"Here:\n```python\n{MAIN}\n```\nDone.", FULL),
    "two copies of aux": (f"{AUX}\n{AUX}", f"def aux(xs):\n    return 0\n{MAIN}", FULL),
    "nothing": ("", "", (0.0, 0.0, 0.0, 0.0)),
    "alone": ("", f"    {ALONE}", (0.6, 0.5, 1.0, 0.0)),
    "comment": (AUX, main("# aux(xs)", ALONE), NONE),
    "text": (AUX, main("s = 'aux(xs)'", ALONE), NONE),
    "dead branch": (AUX, main("if xs is None:", "    return aux(xs)", ALONE), NONE),
    "dead constant": (AUX, main("if False:", "    return aux(xs)", ALONE), NONE),
    "own aux": (AUX, main("def aux(x):", "    return sum(x)", "return 2 * aux(xs)"), NONE),
    "statement": (AUX, main("aux(xs)", ALONE), COSTS),
    "assigned": (AUX, main("y = aux(xs)", ALONE), COSTS),
    "dead use": (AUX, main("y = aux(xs)", "if xs is None:", "    return y", ALONE), COSTS),
    "tested": (AUX, main("if aux(xs):", "    pass", ALONE), COSTS),
    "printed": (AUX, main("print(aux(xs))", ALONE), COSTS),
    "reads an attribute": (
        "from functools import lru_cache\n@lru_cache(None)\ndef aux(n):\n    return n + 1",
        main("aux.cache_clear()", "aux(len(xs))", ALONE),
        COSTS,
    ),
    "kept unread": (AUX, main("seen = [aux(xs)]", "return 2 * sum(xs) if seen else 0"), COSTS),
    "kept unread, recursive": (
        "def aux(xs):\n    return xs[0] + aux(xs[1:]) if xs else 0",
        main("seen = [aux(xs)]", "return 2 * sum(xs) if seen else 0"),
        COSTS,
    ),
    "dropped, then a crash": (AUX, main("aux(xs)", "return 2 * sum(xs) if xs else xs[0]"), (1.0, 0.5, 0.75, -0.5)),
    "nothing changed": (AUX, main("ys = list(xs)", "aux(ys)", "return 2 * sum(ys)"), COSTS),
    "changes unread": ("def aux(xs):\n    xs.append(1)\n    return xs", main("ys = [1]", "aux(ys)", ALONE), COSTS),
    "changes read, result printed": (
        "def aux(xs):\n    xs[:] = [sum(xs)]\n    return xs",
        main("print(aux(xs))", "return 2 * xs[0]"),
        FULL,
    ),
    "fallback": (AUX, main("try:", "    return 2 * aux(xs)", "except Exception:", f"    {ALONE}"), HALF),
    "wrapper": (DOUBLE, main("return aux(xs)"), HALF),
    "filler wrapper": (DOUBLE, main("n = len(xs)", "return aux(xs)"), HALF),
    "live filler wrapper": (DOUBLE, main("n = len(xs)", "return aux(xs) + 0 * n"), HALF),
    "wrapper by a name": (DOUBLE, main("y = aux(xs)", "z: int = y", "return z"), HALF),
    "wrapper with a constant": ("def aux(xs, k):\n    return 2 * sum(xs)", f"K = 3\n{main('return aux(xs, K)')}", HALF),
    "wrapper with a number": ("def aux(xs, k):\n    return 2 * sum(xs)", main("return aux(xs, -1)"), HALF),
    "wrapper with a length": ("def aux(xs, k):\n    return 2 * sum(xs)", main("return aux(xs, len(xs))"), HALF),
    "half right": (AUX, main("return 2 * aux(xs) if len(xs) == 1 else -1"), (1.0, 0.5, 0.5, 1.5)),
    "aux raises": ("def aux(xs):\n    raise ValueError\n    return 1", MAIN, (1.0, 0.5, 0.0, 0.0)),
    "aux raises sometimes": (AUX, main("return 2 * aux(xs[0]) if xs else 0"), (1.0, 0.5, 0.25, 0.0)),
    "main raises on it": ("def aux(xs):\n    return {1: 2}", MAIN, (1.0, 0.5, 0.0, 0.0)),
    "aux hangs": ("def aux(xs):\n    while True: pass\n    return 1", MAIN, (1.0, 0.5, 0.0, 0.0)),
    "assigned entry": (AUX, "f = lambda xs: 2 * aux(xs)", (0.4, 0.5, 1.0, 1.5)),
    "assigned wrapper": (DOUBLE, "f = aux", (0.4, 0.5, 1.0, 0.5)),
    "lambda with a number": (
        "def aux(xs, k):\n    return k * sum(xs)",
        "f = lambda xs: aux(xs, 2)",
        (0.4, 0.5, 1.0, 0.5),
    ),
    "lambda wrapper": (DOUBLE, "f = lambda xs: aux(xs)", (0.4, 0.5, 1.0, 0.5)),
    "partial": (
        "def aux(k, xs):\n    return k * sum(xs)",
        "from functools import partial\nf = partial(aux, 2)",
        (0.4, 0.5, 1.0, 0.5),
    ),
    "instance": (
        AUX,
        "class Solver:\n    def __call__(self, xs):\n        return 2 * aux(xs)\nf = Solver()",
        (0.4, 0.5, 1.0, 1.5),
    ),
    "imported": (AUX, "from builtins import sum as f", (0.4, 0.5, 0.25, 0.0)),
    "no function": (AUX, "f = 3", (0.4, 0.0, 0.0, 0.0)),
    "does not compile": (AUX, main("return 1", "yield from ()", "nonlocal y"), (1.0, 0.0, 0.0, 0.0)),
    "does not load": (f"import nowhere\n{AUX}", MAIN, (1.0, 0.5, 0.0, 0.0)),
}


def test_what_really_runs(sandbox: Sandbox) -> None:
    scored = run(sandbox, [(PROBLEM, helper, main) for helper, main, _ in CASES.values()])
    found = {name: tuple(item.reward.parts[p] for p in MAXIMA) for name, item in zip(CASES, scored, strict=True)}
    assert found == {name: expected for name, (_, _, expected) in CASES.items()}


def list_statements(source: str) -> set[str]:
    """The statements of a program, each once, without the docstrings of functions, which may be indented anew."""
    body = ast.parse(source).body
    for node in body:
        if isinstance(node, ast.FunctionDef):
            node.body = [part for part in node.body if not is_text(part)]
    return {ast.dump(node) for node in body}


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_humaneval_canonical_solutions_pass_as_the_main_agents_completion(sandbox: Sandbox) -> None:
    rows = read_problems()
    assert len(rows) == 164
    problems = [Problem(*(row[key] for key in ("task_id", "prompt", "entry_point", "test"))) for row in rows]
    bodies = [(problem, "", row["canonical_solution"]) for problem, row in zip(problems, rows, strict=True)]
    whole = [(problem, "", f"```python\n{problem.prompt}{body}```") for problem, _, body in bodies]
    for (problem, _, body), (_, _, module) in zip(bodies, whole, strict=True):
        for text in (body, module):
            program = combine_completions(problem.prompt, problem.entry_point, "", text)
            assert list_statements(program.source) == list_statements(problem.prompt + body), problem.task_id
    some = bodies[::8] + whole[::8]
    scored = run(sandbox, some)  # together, because programs that come out equal run once
    failed = {p.task_id: s.reports for (p, _, _), s in zip(some, scored, strict=True) if not REWARD.passed(s.reports)}
    assert not failed
    assert {item.reward.total for item in scored} == {0.6 + 0.5 + 1.0}


def test_agreeing_conventions_on_coopcode_earn_what_they_should(sandbox: Sandbox) -> None:
    problems = CoopCode(kind="coopcode", num_train=180, num_test=3, num_ood=3).load()["train"][::27]
    expected = {"first": 4.0, "last": 4.0, "all": 3.0, "nothing": 2.5}
    written = [
        (problem, *(write_completion(parse_composition(problem), role, convention) for role in ("helper", "main")))
        for convention in expected
        for problem in problems
    ]
    totals = [item.reward.total for item in run(sandbox, written)]
    assert totals == [total for total in expected.values() for _ in problems]
