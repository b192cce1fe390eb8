"""Feedback on a joint action of the coding task: a diagnosis of what went wrong, and its wording for an agent.

Feedback is made from the parts of the joint reward and the execution report ``program``, never from a completion, so it
cannot show an agent its partner's text. For the same reason it omits exception messages, which the program controls,
and quotes only the assert and the name of a builtin exception.
"""

import builtins
import re
from dataclasses import dataclass
from typing import Literal

from magrpo.envs.prompts import PROMPTS
from magrpo.types import Case, PastTurn

Feedback = Literal["level_feedback", "level_passed", "passed", "plain", "discussion"]
"""Feedback modes: diagnostics of each level; pass or fail of each level; one line; nothing; the partner's last text."""

Cooperation = Literal["full", "thin", "unused", "not called", "unknown"]

_NAME = re.compile(r"(?:^|: )([A-Za-z]+)(?=:|$)")
_EXCEPTIONS = {
    name for name, item in vars(builtins).items() if isinstance(item, type) and issubclass(item, BaseException)
}
_FAILURES = {"wrong": "wrong answer", "exception": "exception", "timeout": "timeout"}
_COOPERATION = {"thin": "wrapper", "unused": "aux unused", "not called": "aux not called"}
_PASSES = ("no tests pass", "some tests pass", "most tests pass", "all tests pass")
_LEVELS = ("structure", "syntax", "tests", "cooperation")
_AUX_SHARE, _ENTRY_SHARE = 0.4, 0.6
"""Values of the functions ``aux`` and entry point in the part ``structure`` of the reward ``coding``."""
_TOLERANCE = 0.05
"""A distance from such a value below this counts as none."""

BARE_LINES: tuple[str, ...] = (
    "aux missing",
    "entry missing",
    "syntax error",
    *_PASSES,
    *_FAILURES.values(),
    "crash",
    *_COOPERATION.values(),
    "all good",
    *(f"{level} {verdict}" for level in _LEVELS for verdict in ("ok", "bad")),
    "passed",
    "failed",
    "revise",
)
"""Every line that feedback in the bare prompt can contain; a tiny tokenizer needs to cover only these."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdicts on one joint action. ``failures``: the cases that did not pass, in order."""

    judged: tuple[str, ...]
    """The levels that the reward judges. The others count as reached and are not mentioned."""
    has_aux: bool
    has_entry: bool
    compiles: bool
    cooperation: Cooperation
    passed: int
    total: int
    failures: tuple[Case, ...]

    @property
    def level_passes(self) -> dict[str, bool]:
        """Whether each judged level is at its maximum."""
        passes = {
            "structure": self.has_aux and self.has_entry,
            "syntax": self.compiles,
            "tests": 0 < self.total == self.passed,
            "cooperation": self.cooperation == "full",
        }
        return {level: passes[level] for level in self.judged}


def diagnose_turn(turn: PastTurn, role: str) -> Diagnosis:
    """Diagnose a joint action from the parts of its reward and its report ``program``.

    A reward need not have the parts of the reward ``coding``. Without ``structure``, every function counts as present;
    without ``syntax``, the report decides whether the program compiles; without ``cooperation``, its verdict is
    unknown. For the role ``solo``, levels that concern a helper are not mentioned.
    """
    parts, report = turn.reward.parts, turn.reports.get("program")
    # A solo is judged on ``cooperation`` too, which it never reaches, so its bare feedback is never "all good".
    judged = tuple(level for level in _LEVELS if level in parts or level == "tests" or role == "solo")
    structure, cooperation_part = parts.get("structure"), parts.get("cooperation")
    compiles = parts["syntax"] > 0 if "syntax" in parts else report is None or report.compiles
    has_aux = has_entry = True
    if structure is not None:
        ran = "syntax" in parts and compiles  # true also if the entry point is not a function
        least = 0 if role == "solo" else 0.5  # ``aux`` alone earns less
        has_entry = structure > least or ran
        has_aux = role == "solo" or _includes_aux(structure)
    cooperation: Cooperation = "unknown"
    if role != "solo" and cooperation_part is not None:
        if cooperation_part > 0:
            cooperation = "full" if cooperation_part > 1 else "thin"
        elif cooperation_part < 0:
            cooperation = "unused"
        elif report is not None and report.watched_calls == 0:
            cooperation = "not called"
    verdicts = judged, has_aux, has_entry, compiles, cooperation
    if report is None:
        return Diagnosis(*verdicts, 0, 0, ())
    failures = tuple(
        Case(case.status, "" if report.forgeable else case.message) for case in report.cases if case.status != "pass"
    )
    is_refused = report.forgeable and parts.get("tests") == 0  # the reward does not believe that any test passed
    return Diagnosis(*verdicts, 0 if is_refused else report.tests_passed, report.tests_total, failures)


def _includes_aux(structure: float) -> bool:
    """Whether a value of the part ``structure`` includes what ``aux`` is worth."""
    values_with_aux = (_AUX_SHARE, _AUX_SHARE + _ENTRY_SHARE)
    return any(abs(structure - value) < _TOLERANCE for value in values_with_aux)


def format_bare_feedback(mode: Feedback, diagnosis: Diagnosis) -> list[str]:
    """Format feedback for the bare prompt, as lines of :data:`BARE_LINES`."""
    if mode == "level_passed":
        return [f"{level} {'ok' if ok else 'bad'}" for level, ok in diagnosis.level_passes.items()]
    if mode == "passed":
        return ["passed" if diagnosis.level_passes["tests"] else "failed"]
    if mode in ("plain", "discussion"):
        return ["revise"]
    if all(diagnosis.level_passes.values()):
        return ["all good"]
    lines = [] if diagnosis.has_aux else ["aux missing"]
    if not diagnosis.has_entry:
        return [*lines, "entry missing"]
    if not diagnosis.compiles:
        return [*lines, "syntax error"]
    if diagnosis.passed in (0, diagnosis.total):
        lines.append(_PASSES[3 if diagnosis.passed else 0])
    else:
        lines.append(_PASSES[2 if 2 * diagnosis.passed >= diagnosis.total else 1])
    if diagnosis.failures:
        lines.append(_FAILURES.get(diagnosis.failures[0].status, "crash"))
    if diagnosis.has_aux and diagnosis.cooperation in _COOPERATION:
        lines.append(_COOPERATION[diagnosis.cooperation])
    return lines


def format_feedback(mode: Feedback, diagnosis: Diagnosis, role: str, entry_point: str, num_tests: int) -> str:
    """Format feedback in English for ``role``, quoting at most ``num_tests`` failing tests."""
    if mode == "plain":
        return word_feedback("plain")
    if mode == "passed":
        return word_feedback("passed" if diagnosis.level_passes["tests"] else "not_passed")
    if mode == "level_passed":
        verdicts = {True: "level_passed", False: "level_not_passed"}
        return "\n".join(word_feedback(verdicts[ok], level=level) for level, ok in diagnosis.level_passes.items())
    helper_answer, main_answer = word_feedback("partners_answer"), word_feedback("own_answer")
    if role == "helper":
        helper_answer, main_answer = main_answer, helper_answer
    lines = []
    if not diagnosis.has_aux:
        lines.append(word_feedback("no_function", answer=helper_answer, function="aux"))
    if not diagnosis.has_entry:
        lines.append(word_feedback("no_function", answer=main_answer, function=entry_point))
    elif not diagnosis.compiles:
        lines.append(word_feedback("syntax_error"))
    else:
        lines.append(word_feedback("tests", passed=diagnosis.passed, total=diagnosis.total))
        lines += [f"- {_quote_case(case)}" for case in diagnosis.failures[:num_tests]]
        if diagnosis.has_aux and diagnosis.cooperation != "unknown":
            lines.append(word_feedback(diagnosis.cooperation, entry_point=entry_point))
    return "\n".join(lines)


def word_feedback(name: str, **values: object) -> str:
    """Fill ``values`` into the text ``name`` of the feedback for programmers in ``prompts.toml``."""
    return PROMPTS["program_feedback"][name].format(**values)


def _quote_case(case: Case) -> str:
    """Quote a failing case without the program's own words: an exception is cut after the name of its builtin class.

    The sandbox writes that name itself, before any text. Its messages about a wrong value, a timeout or a crash hold
    only the assert and the value received.
    """
    message = case.message
    if case.status in ("exception", "wrong"):
        names = (match for match in _NAME.finditer(message) if match[1] in _EXCEPTIONS)
        message = next((message[: match.end(1)] for match in names), message if case.status == "wrong" else "")
    elif case.status not in ("timeout", "crash"):
        message = ""
    return f"{case.status}: {message[:200]}" if message else case.status
