"""The rewards of two texts that belong together: ``writing`` (two authors) and ``writing_solo`` (one writes both).

They have four parts: structure, length ratio, unique words, style. A part is scored only if the one before it scored.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import mul
from pathlib import Path
from typing import ClassVar, Literal

from magrpo.rewards.common import ScaledReward
from magrpo.types import Execution, JointReward, Problem, Reports, RoleTexts

MAXIMA: Mapping[str, float] = {"structure": 0.5, "length_ratio": 1.0, "unique_words": 0.5, "style": 1.0}
_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
STOP_WORDS = frozenset(_WORDS["stop_words"].split())
TRANSITIONS: Mapping[str, str] = _WORDS["transitions"]
"""Transition words and phrases in twelve categories, separated by semicolons."""


@dataclass(frozen=True, slots=True)
class Window:
    """A piecewise linear function: 0 up to ``start``, 1 from ``low`` to ``high``, 0 again from ``end`` on."""

    start: float
    low: float
    high: float = math.inf
    end: float = math.inf

    def __call__(self, x: float) -> float:
        if x < self.low:
            return max(0.0, (x - self.start) / (self.low - self.start))
        if x > self.high:
            return max(0.0, (self.end - x) / (self.end - self.high))
        return 1.0


@dataclass(frozen=True, slots=True)
class Form:
    """The targets of one writing task. ``roles``: first and second author; ``words``: limits of each text."""

    roles: tuple[str, str]
    words: tuple[int, int]
    length_ratio: Window
    unique_words: Window
    jaccard: float
    transitions_in_both: bool


_TLDR = Form(("summary", "elaboration"), (8, 256), Window(1.1, 1.6, 3.2, 5.0), Window(1.3, 2.0), 0.03, False)
_ARXIV = Form(("background", "methods"), (128, 256), Window(0.8, 1.0, 1.3, 1.5), Window(0.5, 0.7, 1.3, 1.7), 0.23, True)
_ARXIV_LATE = replace(_ARXIV, length_ratio=Window(0.8, 1.3, 1.6, 2.0))
FORMS: Mapping[str, Form] = {"tldr": _TLDR, "arxiv": _ARXIV, "arxiv_late": _ARXIV_LATE}
"""The tasks of arXiv 2508.04652. ``arxiv_late`` has the length window that the authors adopted after the paper."""


class WritingReward(ScaledReward):
    """Joint reward of two authors, at most 3.0 before scaling.

    A part is scored only if the one before it scored. See ``docs/rewards.md`` for the parts. Nothing runs in the
    sandbox, and no text passes or fails.
    """

    max_executions: ClassVar[int] = 0
    """See :class:`magrpo.interfaces.HasMaxExecutions`."""

    part_maxima: ClassVar[Mapping[str, float]] = MAXIMA

    kind: str = "writing"
    task: Literal["tldr", "arxiv", "arxiv_late"] = "tldr"
    """``tldr``: a short and a longer summary; ``arxiv``: background and methods of an introduction, with the paper's
    length window; ``arxiv_late``: the same with the authors' later length window."""

    @property
    def priced_roles(self) -> tuple[str, ...]:
        """See :class:`magrpo.interfaces.PricesRoles`."""
        return FORMS[self.task].roles

    def passed(self, reports: Reports) -> None:
        """Return None: texts have no tests."""

    def executions(self, problem: Problem, texts: RoleTexts, reports: Reports) -> Mapping[str, Execution]:
        """Request nothing: texts are not run."""
        return {}

    def price(self, problem: Problem, texts: RoleTexts, reports: Reports) -> JointReward:
        """Price the parts in order, up to the first one that scores 0. ``texts`` is keyed by role."""
        form = FORMS[self.task]
        first, second = (" ".join(text.split()) for text in self._pair_texts(texts))
        parts = dict.fromkeys(self.maxima, 0.0)
        for (name, maximum), score_part in zip(MAXIMA.items(), SCORES, strict=True):
            parts[name] = maximum * score_part(form, first, second)
            if parts[name] == 0:
                break
        return JointReward(self.scale_parts(parts), parts)

    def measure_texts(self, texts: Mapping[str, str]) -> Mapping[str, float]:
        """Measure ``structure``, ``consistency`` and ``coherence``, also where the reward scores no such part.

        See :class:`magrpo.interfaces.MeasuresTexts`. The paper calls the first three parts together structure, and
        splits the fourth one into consistency and coherence.
        """
        form = FORMS[self.task]
        first, second = (" ".join(text.split()) for text in self._pair_texts(texts))
        maxima = list(MAXIMA.values())[:3]
        shares = [score_part(form, first, second) for score_part in SCORES[:3]]
        return {
            "structure": sum(map(mul, maxima, shares)) / sum(maxima),
            "consistency": score_consistency(form, first, second),
            "coherence": score_coherence(form, first, second),
        }

    def _pair_texts(self, texts: Mapping[str, str]) -> tuple[str, str]:
        """Return the first and the second author's text."""
        first, second = (texts[role] for role in FORMS[self.task].roles)
        return first, second


class SoloWritingReward(WritingReward):
    """The reward ``writing`` of the two texts of one author, ``solo``, who leaves an empty line between them."""

    kind: str = "writing_solo"

    @property
    def priced_roles(self) -> tuple[str, ...]:
        return ("solo",)

    def _pair_texts(self, texts: Mapping[str, str]) -> tuple[str, str]:
        return split_texts(texts["solo"])


def split_texts(text: str) -> tuple[str, str]:
    """Split a completion at its first empty line. The second text is empty if there is none."""
    first, *rest = re.split(r"\n\s*\n", text.strip(), maxsplit=1)
    return first, "".join(rest)


def score_structure(form: Form, first: str, second: str) -> float:
    """1 if both texts have an allowed number of words, split at white space; else 0."""
    fewest, most = form.words
    return float(all(fewest <= len(text.split()) <= most for text in (first, second)))


def score_length_ratio(form: Form, first: str, second: str) -> float:
    """The fit, from 0 to 1, of the ratio of lengths in characters, second text to first."""
    return form.length_ratio(len(second) / len(first)) if first else 0.0


def score_unique_words(form: Form, first: str, second: str) -> float:
    """The fit, from 0 to 1, of the ratio of numbers of distinct words, second text to first."""
    words = len(_list_words(first))
    return form.unique_words(len(_list_words(second)) / words) if words else 0.0


def score_style(form: Form, first: str, second: str) -> float:
    """0.4 times the variety of transition words plus 0.6 times the overlap of vocabularies, each at most 1."""
    overlap = min(_compute_jaccard(first, second), form.jaccard)
    return 0.4 * score_coherence(form, first, second) + 0.6 * overlap / form.jaccard


def score_coherence(form: Form, first: str, second: str) -> float:
    """The variety of transition words, from 0 to 1: in the second text or, if the form says so, in both together."""
    count = count_transition_categories(f"{first}\n{second}" if form.transitions_in_both else second)
    return min(1.0, 0.4 + 0.05 * (count - 1)) if count else 0.0


def score_consistency(form: Form, first: str, second: str) -> float:
    """The overlap of vocabularies, from 0 to 1: Jaccard similarity without stop words, over the form's target."""
    return min(_compute_jaccard(first, second), form.jaccard) / form.jaccard


SCORES = (score_structure, score_length_ratio, score_unique_words, score_style)
"""Functions that score the parts, from 0 to 1, in the order of :data:`MAXIMA`."""


def _compute_jaccard(first: str, second: str) -> float:
    one, two = (_list_words(text) - STOP_WORDS for text in (first, second))
    return len(one & two) / len(one | two) if one | two else 0.0


def _list_words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _compile_pattern(phrases: list[str]) -> re.Pattern[str]:
    alternatives = (r"\s+".join(map(re.escape, phrase.split())) for phrase in phrases)
    return re.compile(rf"\b(?:{'|'.join(alternatives)})\b")


_PATTERNS = [_compile_pattern(listing.split(";")) for listing in TRANSITIONS.values()]


def count_transition_categories(text: str) -> int:
    """The number of categories, of twelve, with a phrase that occurs in ``text`` as whole words, ignoring case."""
    text = text.lower()
    return sum(pattern.search(text) is not None for pattern in _PATTERNS)
