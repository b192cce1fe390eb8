"""``magrpo ask``: its output as text and as JSON, and the mistakes it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from magrpo.asking.answers import NO_TESTS, Answer
from magrpo.asking.problems import load_asked_problems
from magrpo.asking.teams import find_asked_team
from magrpo.rewards.coding import CodingReward
from magrpo.run.store import RunStore
from magrpo.types import (
    PENDING,
    Action,
    Case,
    ExecutionReport,
    JointReward,
    Problem,
    ScoredTurn,
    TrajectoryStep,
)
from pipelines.cli import main
from pipelines.commands.answer_view import AnswerView
from tests.asking.runs import CONFIGS, SMALL, make_run
from tests.pipelines.commands.typed import Typed, type_text

PARTS = {"structure": 1.0, "syntax": 0.5, "tests": 0.5, "cooperation": 0.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """A run of two programmers whose weights moved little, so that they still write programs."""
    return make_run(CONFIGS / "embedded.toml", tmp_path_factory.mktemp("ask") / "runs", SMALL, scale=1e-4)


def ask(run: RunStore, *arguments: str) -> int:
    return main(["ask", run.run_id, *arguments, "--root", str(run.path.parent)])


def test_an_answer_is_shown_beside_that_of_the_base_models(run: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(run, "--problem", "coopcode/plus:9/minus:3") == 0
    said = capsys.readouterr()
    assert said.out.startswith('coopcode/plus:9/minus:3\ndef plus_minus(n):\n    """')
    trained, base, joined, table = (
        said.out.index(text) for text in ("run run after 1 it", "base models", "joined program", "\nreward ")
    )
    assert trained < base < joined < table
    assert said.out.count("[helper]\ndef aux(n):") == said.out.count("[main]\ndef plus_minus(n):") == 2
    assert said.out.count("of 5 tests passed") == 2
    assert "wrong: assert plus_minus(" in said.out
    assert "at most  trained  base" in said.out
    assert said.out.split("\nreturn ")[1].split()[:2] == ["100", "%"]
    assert "loading" in said.err


def test_json_holds_everything_for_a_script(run: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'def plus_minus(n):\n    """Add 9, then subtract 3."""\n'
    test = "assert plus_minus(1) == 7"
    assert ask(run, text, "--test", test, "--json", "--seed", "3") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["team"], told["seed"]) == ("run run after 1 iteration", 3)
    assert told["problem"]["id"] == "yours"
    assert test in told["problem"]["test"]
    for team in ("trained", "base"):
        answer = told[team]
        assert list(answer["texts"]) == ["helper", "main"]
        assert answer["turns"] == [answer["texts"]]
        assert set(answer["parts"]) == {"structure", "syntax", "tests", "cooperation"}
        assert 0 <= answer["return"] <= 1
        assert answer["unmeasured"] is None
    assert ask(run, text, "--json", "--trained-only") == 0
    told = json.loads(capsys.readouterr().out)
    assert "base" not in told
    assert told["trained"]["unmeasured"] == NO_TESTS
    assert (told["trained"]["parts"], told["trained"]["return"], told["trained"]["passed"]) == (None, None, None)


def test_json_has_cut_answers_prompts_and_the_remark(run: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    limit = ("--set", "rollout.max_new_tokens=4", "--show-prompts")
    assert ask(run, "Add 9 to it, then subtract 3.", "--json", *limit) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["remark"].startswith(
        "coopcode-base is a tiny model that can solve only problems like those of this run; no "
    )
    for team in ("trained", "base"):
        assert told[team]["cut_at"] == {"helper": 4, "main": 4}
        [prompts] = told[team]["prompts"]
        assert prompts["main"].startswith('# main\ndef solve(n):\n    """Add 9 to it, then subtract 3."""')
    assert ask(run, "--problem", "coopcode/plus:9/minus:3", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["remark"], told["trained"]["cut_at"]) == (None, {})
    assert "prompts" not in told["trained"]


@pytest.mark.parametrize("stdin", [Typed("", at_terminal=True), Typed("\n", at_terminal=False), None])
def test_without_a_problem_the_first_held_out_one_is_asked(
    stdin: Typed | None, run: RunStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    assert ask(run, "--trained-only", "--set", 'sandbox={kind="tests.plugins:Sandbox"}') == 0
    first = next(iter(load_asked_problems(find_asked_team(run.run_id, run.path.parent))))
    assert capsys.readouterr().out.startswith(f"{first}\ndef ")


def test_prompts_are_shown_once_and_unknown_words_and_cut_answers_are_named(
    run: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(run, "Add 9, then subtract 3.", "--show-prompts") == 0
    said = capsys.readouterr().out
    assert said.count("prompt of helper\n# helper\ndef plus_minus(n):") == 1, "those of the base models are the same"
    assert "worded like the training problems" in said
    assert ask(run, "Add 9 to the number.", "--trained-only", "--set", "rollout.max_new_tokens=4") == 0
    said = capsys.readouterr().out
    remark = said.index("like those of this run; no training problem says 'add 9 to the number'; closest: '")
    assert said.index('"""Add 9 to the number."""') < remark < said.index("[helper]", remark)
    assert said.count("\n[cut at 4 tokens]\n") == 2
    assert "--set rollout.max_new_tokens=N" in said
    assert "no runnable program: `main` was asked for `solve` and wrote no function that compiles" in said


def test_agents_before_their_first_update_are_their_base_models(
    run: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(run, "--problem", "coopcode/plus:9/minus:3", "--checkpoint", "0") == 0
    said = capsys.readouterr().out
    assert "\nrun run before training\n" in said
    assert "at most  base  \n" in said


def test_a_text_may_come_from_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("problems.num_train=12", "problems.num_test=4")
    run = make_run(CONFIGS / "writing_embedded.toml", tmp_path / "runs", small)
    type_text(monkeypatch, "A sweater\nI wanted to knit a sweater.\n")
    assert ask(run, "--trained-only") == 0
    said = capsys.readouterr().out
    assert "[summary]" in said
    assert "[elaboration]" in said
    assert "joined program" not in said
    assert "length ratio" in said


def test_mistakes_are_one_line(
    run: RunStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_text(monkeypatch, "")
    mistakes = {
        ("x", "--problem", "y"): "--problem names a problem of the run: leave out PROBLEM and --test",
        ("--problem", "nowhere"): "no problem 'nowhere'; similar ids: ",
        ("--test", "assert f(1)"): "--test needs a problem: PROBLEM, or text on standard input",
        ("x", "--checkpoint", "9"): "run run has no weights of checkpoint 9; choose one of 0 to 1",
        ("rollout.temperature=1",): "rollout.temperature=1 is a value of the configuration: write --set rollout.temp",
        ("x", "--set", "rollout.temperatur=1"): "rollout.temperatur: unknown key; did you mean 'temperature'",
    }
    for arguments, message in mistakes.items():
        assert ask(run, *arguments) == 2
        said = capsys.readouterr()
        assert said.err.startswith("magrpo: ")
        assert message in said.err
        assert not said.out


def test_bytes_that_are_no_text_are_refused(
    run: RunStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Modèle".encode("latin-1")), encoding="utf-8"))
    assert ask(run) == 2
    assert capsys.readouterr().err.startswith("magrpo: standard input is not text in utf-8; convert it")


def answer(texts: dict[str, str], turn: ScoredTurn, cut: str = "", **others: str) -> Answer:
    """An answer of one turn, in which agent ``cut`` hit the length limit; ``others`` give ``program`` and ``why``."""
    actions = {
        agent: Action(agent, text, (1, 2), (0.0, 0.0), "length" if agent == cut else "stop", 1)
        for agent, text in texts.items()
    }
    problem = Problem("t", "def f(x):\n", "f", "t")
    return Answer(problem, (TrajectoryStep({}, actions, turn),), others.get("program", ""), others.get("why", ""))


def shown(width: int, text: str) -> str:
    """A scored and an unscored answer on a terminal of ``width`` columns."""
    report = ExecutionReport("wrong", (Case("pass"), *[Case("wrong", f"assert candidate({i})") for i in range(5)]), "n")
    texts = {"helper": "def aux(x):\n    return 1", "main": text}
    turn = ScoredTurn({}, JointReward(2.0, PARTS | {"penalty": -0.25}), {"program": report})
    good = answer(texts, turn, program="def f(x): ...", cut="main")
    unscored = answer(texts, ScoredTurn({}, PENDING, {}), why=NO_TESTS)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, height=30)
    view = AnswerView(console, CodingReward(), "main")
    view.show_turn(good, 2)
    view.show_comparison({"trained": good, "base": unscored})
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_agents_stand_side_by_side_where_there_is_room(width: int) -> None:
    said = shown(width, "def f(x):\n    return aux(x)")
    assert max(map(len, said.splitlines())) <= width
    first = next(line for line in said.splitlines() if "helper, turn 1 of 2" in line)
    assert ("main, turn 1 of 2" in first) == (width >= 80)
    assert said.count("[cut at 2 tokens]") == 1
    assert "1 of 6 tests passed\n  wrong: assert f(0)\n" in said
    assert "  and 2 more" in said
    assert said.split("\npenalty ")[1].splitlines()[0].split() == ["0.00", "-0.25", "-"]
    assert said.split("\nreturn ")[1].split() == ["100", "%", "50", "%", "-"]


@pytest.mark.parametrize(
    ("main", "why"),
    [
        ("def double_squares(xs):\n    return aux(xs)", "`main` was asked for `f` and wrote `double_squares`"),
        ("def g(x):\n    return 1\ndef h(x):\n    return 2", "`main` was asked for `f` and wrote `g` and `h`"),
        ("return aux(", "`main` was asked for `f` and wrote no function that compiles"),
        ("def f(x):\n    aux(x)", "`f` of `main` returns nothing"),
    ],
)
def test_a_missing_program_is_explained(main: str, why: str) -> None:
    turn = ScoredTurn({}, JointReward(0.4, PARTS), {})
    said = answer({"main": main, "helper": "def aux(x):\n    return x"}, turn).explain_missing_program("main")
    assert said == f"no runnable program: {why}"


def test_a_text_cannot_command_the_terminal() -> None:
    said = shown(80, "def f(x):\n    return '\x1b]0;mine\x07[bold]'")
    assert "\x1b" not in said
    assert r"\x1b]0;mine\x07[bold]" in said
