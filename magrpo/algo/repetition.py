"""The share of a text that copies its prompt, that repeats the text itself, and of words that are its prompt's, too.

Copies and repetitions are measured in runs of words.

A word is a word with its combining marks, a punctuation mark, or a character of a script without spaces. A run of
:data:`RUN` words is so long that texts about one subject share almost none by chance, and longer than a function's
signature, which programs must repeat.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

RUN = 8
"""Number of words in a run."""
STEM = 5
"""Number of letters by which long words are compared, so that *package* is *packages*; shorter words say little."""
FEW_LONG = 8
"""Texts are expected to have one long word for this many words. In English prose every third word is long."""
# Thai, Lao, Burmese, Khmer, Japanese and Chinese, which have no spaces, and Korean.
_ALONE = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
# Marks that Python does not count as parts of a word: accents, vowels of Hebrew and Arabic, the scripts of India.
_MARKS = r"\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
_WORD = re.compile(rf"[{_ALONE}]|(?:[^\W{_ALONE}]|[{_MARKS}])+|[^\w\s]")
Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""


def find_copied(text: str, prompt: str, written: Iterable[str] = ()) -> list[bool]:
    """For each word of ``text``, whether it lies in a run of words that also occurs in ``prompt``.

    Runs of ``written``, earlier texts that the prompt may quote, do not count: an answer may keep them.
    """
    runs = _collect_runs(prompt)
    for earlier in written:
        runs -= _collect_runs(earlier)
    words = _read_words(text)
    marks = [False] * len(words)
    for start, run in enumerate(_list_runs(words)):
        if run in runs:
            marks[start : start + RUN] = [True] * RUN
    return marks


def find_repeated(text: str) -> list[bool]:
    """For each word of ``text``, whether it lies in a run of words that has occurred earlier in the text."""
    words = _read_words(text)
    seen: set[tuple[str, ...]] = set()
    marks = [False] * len(words)
    for start, run in enumerate(_list_runs(words)):
        if run in seen:
            marks[start : start + RUN] = [True] * RUN
        seen.add(run)
    return marks


def leave_out(prompt: str, written: Iterable[str], task: str) -> str:
    """The prompt without one place at which it quotes each text of ``written``, if it does.

    A text that is itself a copy of a passage of ``task``, the problem's text, stays where the problem has it.
    """
    # The longest first: a text may begin with another one, and would not be found without it.
    for text in sorted(map(str.strip, written), key=len, reverse=True):
        # A text of a few words may stand in the prompt by chance.
        if len(_read_words(text)) >= RUN and prompt.count(text) > task.count(text):
            prompt = prompt.replace(text, " ", 1)
    return prompt


def share_prompt_words(text: str, prompt: str) -> float:
    """The share of the long words of ``text`` that begin as a word of ``prompt``; 1 for a text of few words.

    A text without a long word for every :data:`FEW_LONG` words counts as if it had them, and as if they were not the
    prompt's: short words say nothing about a prompt. Scripts without spaces have no long words, so their share is 1. A
    low share says that a text is not about its prompt; a high one does not say that it is true.
    """
    known = _collect_stems(prompt)
    words = [word for word in _read_words(text) if len(word) > 1]  # no punctuation, no characters of such scripts
    stems = [word[:STEM] for word in words if len(word) >= STEM]
    num_long = max(len(stems), len(words) // FEW_LONG)
    return sum(stem in known for stem in stems) / num_long if num_long else 1.0


def marked_share(marks: Sequence[bool]) -> float:
    """The share of marked words; 0 for a text without words."""
    return sum(marks) / len(marks) if marks else 0.0


def marked_spans(text: str, marks: Sequence[bool]) -> Iterator[Span]:
    """The parts of ``text`` whose words are marked, from the first to the last word of each."""
    start = end = -1
    for word, marked in zip(_WORD.finditer(text), marks, strict=True):
        if marked:
            start = word.start() if start < 0 else start
            end = word.end()
        elif start >= 0:
            yield start, end
            start = -1
    if start >= 0:
        yield start, end


@lru_cache(maxsize=64)  # each measure of an answer asks for the words of the same text, and siblings share their prompt
def _read_words(text: str) -> tuple[str, ...]:
    return tuple(word.casefold() for word in _WORD.findall(text))


def _list_runs(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1))


@lru_cache(maxsize=32)  # siblings share their prompt
def _collect_stems(text: str) -> frozenset[str]:
    return frozenset(word[:STEM] for word in _read_words(text))


@lru_cache(maxsize=32)
def _collect_runs(text: str) -> frozenset[tuple[str, ...]]:
    return frozenset(_list_runs(_read_words(text)))
