from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from magrpo.envs.coding import CodingEnv, SequentialEnv
from magrpo.envs.diagnosis import BARE_LINES
from magrpo.envs.relay import RelayInTurnEnv
from magrpo.interfaces import Env
from magrpo.types import Case, CaseStatus, ExecutionReport, JointReward, Message, PastTurn, Problem

PROBLEM = Problem("t/0", 'def f(xs):\n    """Sum."""\n', "f", "def check(candidate): ...", "    return sum(xs)\n")
TEXTS = {"ada": "def aux(xs): return sum(xs)  # HELPERTEXT", "bob": "def f(xs): return aux(xs)  # MAINTEXT"}


def past(parts: tuple[float, float, float, float], cases: tuple[Case, ...] = (), calls: int = 0) -> PastTurn:
    """A turn with ``parts`` as reward and, if there are cases, a report with the status of the first failed one."""
    names = ("structure", "syntax", "tests", "cooperation")
    reports = {}
    if cases:
        status: CaseStatus = next((case.status for case in cases if case.status != "pass"), "pass")
        reports["program"] = ExecutionReport(status, cases, "namespaces", watched_calls=calls)
    return PastTurn(TEXTS, JointReward(sum(parts), dict(zip(names, parts, strict=True))), reports)


PASS = Case("pass")
TURNS = {
    "good": past((1.0, 0.5, 1.0, 1.5), (PASS, PASS), 2),
    "nothing": past((0.0, 0.0, 0.0, 0.0)),
    "no_entry": past((0.4, 0.0, 0.0, 0.0)),
    "no_aux": past((0.6, 0.5, 0.5, 0.0), (PASS, Case("wrong", "f([1]) == 1, got 2")), 0),
    "syntax": past((1.0, 0.0, 0.0, 0.0)),
    "wrapper": past((1.0, 0.5, 1.0, 0.5), (PASS,), 1),
    "unused": past((1.0, 0.5, 1.0, -0.5), (PASS,), 1),
    "uncalled": past((1.0, 0.5, 0.0, 0.0), (Case("exception", "ValueError: HELPERTEXT"), Case("timeout")), 0),
    "called": past((1.0, 0.5, 0.0, 0.0), (Case("crash"),), 3),
}


def bare(turn: PastTurn, role: str = "main", agent: str = "bob", **fields: object) -> str:
    env = CodingEnv.model_validate({"prompt": "bare", "num_turns": 2, **fields})
    (message,) = env.observe(PROBLEM, role, [turn], agent).messages
    assert message.role == "user"
    return message.content


def full(turn: PastTurn, role: str = "main", agent: str = "bob", **fields: object) -> str:
    env = CodingEnv.model_validate({"num_turns": 2, **fields})
    return env.observe(PROBLEM, role, [turn], agent).messages[-1].content


def test_roles() -> None:
    assert CodingEnv().roles() == ("helper", "main")
    assert CodingEnv().num_turns == 1


def test_bare_first_turn_is_the_problem_under_its_role() -> None:
    env = CodingEnv(prompt="bare")
    for role in env.roles():
        assert env.observe(PROBLEM, role, [], "ada").messages == (Message("user", f"# {role}\n{PROBLEM.prompt}"),)


def test_bare_later_turn_shows_own_text_and_feedback() -> None:
    expected = f"# main\n{PROBLEM.prompt}\n# previous\n{TEXTS['bob']}\n# feedback\nall good\n"
    assert bare(TURNS["good"]) == expected


@pytest.mark.parametrize(
    ("turn", "lines"),
    [
        ("good", ["all good"]),
        ("nothing", ["aux missing", "entry missing"]),
        ("no_entry", ["entry missing"]),
        ("no_aux", ["aux missing", "most tests pass", "wrong answer"]),
        ("syntax", ["syntax error"]),
        ("wrapper", ["all tests pass", "wrapper"]),
        ("unused", ["all tests pass", "aux unused"]),
        ("uncalled", ["no tests pass", "exception", "aux not called"]),
        ("called", ["no tests pass", "crash"]),
    ],
)
def test_bare_level_feedback(turn: str, lines: list[str]) -> None:
    assert bare(TURNS[turn]).partition("# feedback\n")[2].splitlines() == lines


def test_bare_tests_are_graded_in_four_steps() -> None:
    wrong = Case("wrong")
    for passed, line in [(0, "no tests pass"), (1, "some tests pass"), (2, "most tests pass"), (4, "all tests pass")]:
        turn = past((1.0, 0.5, passed / 4, 0.5), (PASS,) * passed + (wrong,) * (4 - passed), 1)
        assert bare(turn).partition("# feedback\n")[2].splitlines()[0] == line


@pytest.mark.parametrize(
    ("mode", "lines"),
    [
        ("level_passed", ["structure ok", "syntax ok", "tests ok", "cooperation bad"]),
        ("passed", ["passed"]),
        ("plain", ["revise"]),
        ("discussion", ["revise", "# partner", TEXTS["ada"]]),
    ],
)
def test_bare_other_modes(mode: str, lines: list[str]) -> None:
    assert bare(TURNS["wrapper"], feedback=mode).partition("# feedback\n")[2].splitlines() == lines


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("mode", ["level_feedback", "level_passed", "passed", "plain"])
def test_bare_vocabulary_is_closed(mode: str, turn: str) -> None:
    lines = bare(TURNS[turn], feedback=mode).partition("# feedback\n")[2].splitlines()
    assert lines
    assert set(lines) <= set(BARE_LINES)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("mode", ["level_feedback", "level_passed", "passed", "plain"])
@pytest.mark.parametrize("prompt", ["instruct", "list", "paper", "bare"])
def test_partner_text_is_never_shown(prompt: str, mode: str, turn: str) -> None:
    env = CodingEnv.model_validate({"prompt": prompt, "feedback": mode, "feedback_tests": "all", "num_turns": 3})
    for role, agent, mark in [("helper", "ada", "MAINTEXT"), ("main", "bob", "HELPERTEXT")]:
        observation = env.observe(PROBLEM, role, [TURNS[turn], TURNS["good"]], agent)
        seen = "\n".join(message.content for message in observation.messages)
        assert mark not in seen
        assert TEXTS[agent] in seen


def test_discussion_shows_the_partners_text() -> None:
    text = full(TURNS["good"], feedback="discussion")
    assert text == (
        f"Your partner wrote:\n```\n{TEXTS['ada']}\n```\nRevise your function `f`. Answer with Python code only."
    )


@pytest.mark.parametrize(
    ("env", "role", "language"),
    [
        (CodingEnv(num_turns=2, feedback="discussion"), "main", ""),
        (SequentialEnv(), "main", "python"),
        (RelayInTurnEnv(), "second", "python"),
    ],
)
def test_the_blocks_of_a_partners_answer_do_not_end_the_block_it_is_shown_in(
    env: Env, role: str, language: str
) -> None:
    answer = "Here it is:\n```python\ndef aux(x):\n    return x\n```\nIt returns `x`."
    texts = {"ada": answer, **({"bob": "def f(x): return aux(x)"} if role in env.acting(0) else {})}
    problem = replace(PROBLEM, tags={"second": "add 1"})
    shown = env.observe(problem, role, [PastTurn(texts, JointReward(0.0, {}), {})], "bob").messages[-1].content
    assert f"Your partner wrote:\n````{language}\n{answer}\n````" in shown


@pytest.mark.parametrize("prompt", ["instruct", "list"])
def test_first_turn(prompt: str) -> None:
    env = CodingEnv.model_validate({"prompt": prompt})
    for role, name in [("helper", "aux"), ("main", "f")]:
        system, user = env.observe(PROBLEM, role, [], "any").messages
        assert (system.role, user.role) == ("system", "user")
        assert f"the function `{name}`" in system.content
        assert "{" not in system.content
        assert PROBLEM.prompt.rstrip() in user.content
        assert ("returns a list" in system.content) is ("returns a list" in user.content) is (prompt == "list")


def test_the_paper_has_prompts_of_its_own() -> None:
    env = CodingEnv(prompt="paper")
    for role, name in [("helper", "aux"), ("main", "f")]:
        (message,) = env.observe(PROBLEM, role, [], "any").messages
        assert message.role == "user"
        assert f"def {name}(" in message.content
        assert PROBLEM.prompt.rstrip() in message.content


@pytest.mark.parametrize(
    ("prompt", "parameters"),
    [
        ('def f(xs, *, key=None):\n    """Sum."""\n', "xs, key"),
        ("def f(*numbers):", "*numbers"),
        ("def f(a, /, *rest, b, **others):", "a, *rest, b, **others"),
        ("from typing import List\n\ndef g(): return 1\n\ndef f(xs: List[int]) -> int:", "xs"),
        ("Write a program that sums.", "..."),
        ("def f(\0", "..."),
        ("", "..."),
    ],
)
def test_main_is_asked_to_call_aux_with_the_parameters_of_the_entry_point(prompt: str, parameters: str) -> None:
    user = CodingEnv().observe(Problem("t", prompt, "f"), "main", [], "any").messages[-1].content
    assert f"from partner import aux  # aux({parameters}) does" in user
    assert f"begins by calling `aux({parameters})`" in user


def test_instruct_is_a_chat_over_all_turns() -> None:
    env = CodingEnv(num_turns=3)
    messages = env.observe(PROBLEM, "helper", [TURNS["nothing"], TURNS["good"]], "ada").messages
    assert [m.role for m in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert messages[2].content == TEXTS["ada"]


def test_instruct_level_feedback_addresses_each_role() -> None:
    assert "Your answer holds no complete function `aux`" in full(TURNS["nothing"], "helper", "ada")
    assert "Your partner's answer holds no complete function `aux`" in full(TURNS["nothing"])
    assert "Your answer holds no complete function `f`" in full(TURNS["nothing"])
    assert "One of `f` and `aux` does all the work" in full(TURNS["wrapper"])
    assert "does nothing with its result" in full(TURNS["unused"])
    assert "never called" in full(TURNS["uncalled"])
    assert "syntax error" in full(TURNS["syntax"])


def test_feedback_tests_limits_what_is_quoted() -> None:
    turn = past((1.0, 0.5, 0.0, 0.0), tuple(Case("wrong", f"case {i}") for i in range(5)), 1)
    for limit, quoted in [(0, 0), (2, 2), ("all", 5)]:
        text = full(turn, feedback_tests=limit)
        assert text.count("wrong: case") == quoted
        assert "0 of 5 tests passed" in text


@pytest.mark.parametrize(
    ("case", "quoted"),
    [
        (Case("wrong", "assert f([1]) == 2  # got 3"), "- wrong: assert f([1]) == 2  # got 3"),
        (
            Case("exception", "assert f({1: 1}) == 2: ValueError: secret"),
            "- exception: assert f({1: 1}) == 2: ValueError",
        ),
        (Case("exception", "ValueError: secret"), "- exception: ValueError"),
        (Case("exception", "KeyError"), "- exception: KeyError"),
        (Case("exception", "assert f(1): Secret: secret"), "- exception"),
        (Case("exception", "assert f(1): SystemExit: secret: ValueError"), "- exception: assert f(1): SystemExit"),
        (Case("wrong", "assert f(1)['k'] == 2: KeyError: 'secret'"), "- wrong: assert f(1)['k'] == 2: KeyError"),
        (Case("timeout", "assert f(1): more than 2 s"), "- timeout: assert f(1): more than 2 s"),
        (Case("load_error", "SyntaxError: secret"), "- load_error"),
        (Case("memory", "secret"), "- memory"),
    ],
)
def test_failing_tests_are_quoted_without_the_programs_own_words(case: Case, quoted: str) -> None:
    text = full(past((1.0, 0.5, 0.0, 0.0), (case,), 1))
    assert text.splitlines()[1] == quoted


def test_a_test_that_ran_beside_the_program_is_not_quoted() -> None:
    turn = past((1.0, 0.5, 0.0, 0.0), (Case("wrong", "assert f([1]) == 2  # secret"),), 1)
    forged = replace(turn, reports={"program": replace(turn.reports["program"], forgeable=True)})
    assert full(forged).splitlines()[1] == "- wrong"


def test_tests_whose_results_the_reward_refuses_have_not_passed() -> None:
    refused, believed = past((1.0, 0.5, 0.0, 0.0), (PASS, PASS)), past((1.0, 0.5, 1.0, 0.0), (PASS, PASS))
    for turn, passed in ((refused, 0), (believed, 2)):
        forged = replace(turn, reports={"program": replace(turn.reports["program"], forgeable=True)})
        assert full(forged).splitlines()[0].startswith(f"{passed} of 2 tests passed")
        assert ("failed" in bare(forged, feedback="passed")) is (passed == 0)


def test_an_entry_point_that_ran_is_not_missing() -> None:
    """``f = partial(aux, 2)`` earns no structure, and is tested."""
    assert full(past((0.4, 0.5, 1.0, 0.5), (PASS,), 1)).splitlines()[0] == "1 of 1 tests passed."


def test_unknown_options_are_refused() -> None:
    for fields in ({"feedback": "shout"}, {"feedback_tests": -1}, {"num_turns": 0}, {"colour": 1}):
        with pytest.raises(ValidationError):
            CodingEnv.model_validate(fields)


@given(st.text(), st.sampled_from(["instruct", "list", "paper", "bare"]), st.sampled_from(["helper", "main"]))
def test_any_prompt_text_is_carried_unchanged(text: str, prompt: str, role: str) -> None:
    problem = Problem("t", text, "f")
    env = CodingEnv.model_validate({"prompt": prompt})
    assert text.rstrip("\n") in env.observe(problem, role, [], "a").messages[-1].content


@pytest.mark.parametrize("feedback", ["level_feedback", "level_passed", "passed", "plain", "discussion"])
@pytest.mark.parametrize("given", [(), ("structure",), ("syntax",), ("cooperation",), ("syntax", "cooperation")])
@pytest.mark.parametrize("has_report", [True, False])
def test_feedback_needs_no_part_of_the_reward(feedback: str, given: tuple[str, ...], has_report: bool) -> None:
    """A user's own reward has other parts; nothing is claimed of those that are missing."""
    turn = TURNS["no_aux"] if has_report else TURNS["nothing"]
    parts = {name: value for name, value in turn.reward.parts.items() if name in given} | {"brevity": 0.5}
    own = replace(turn, reward=JointReward(1.0, parts))
    for role, agent in (("main", "bob"), ("helper", "ada")):
        lines = bare(own, role, agent, feedback=feedback).partition("# feedback\n")[2].splitlines()
        said = full(own, role, agent, feedback=feedback)
        if feedback != "discussion":
            assert set(lines[:-1]) <= set(BARE_LINES)
        for name, claims in {
            "structure": ("structure", "aux missing", "entry missing", "holds no complete function"),
            "syntax": ("syntax",),
            "cooperation": ("cooperation", "aux not called", "never called"),
        }.items():
            if name not in given:
                assert not any(claim in text for claim in claims for text in (said, *lines))


def test_feedback_on_a_reward_of_tests_alone() -> None:
    passing = replace(TURNS["good"], reward=JointReward(1.0, {"tests": 1.0}))
    failing = replace(TURNS["no_aux"], reward=JointReward(0.5, {"tests": 0.5}))
    assert bare(passing).endswith("# feedback\nall good\n")
    assert bare(failing).endswith("# feedback\nmost tests pass\nwrong answer\n")
    assert bare(failing, feedback="level_passed").endswith("# feedback\ntests bad\n")
    assert full(failing).startswith("1 of 2 tests passed.\n- wrong: f([1]) == 1, got 2\n")
