"""English word lists of the writing rewards (``words.toml``): stop words, transition words in twelve categories."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

_LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

STOP_WORDS = frozenset(_LISTS["stop_words"].split())

TRANSITIONS: Mapping[str, str] = _LISTS["transitions"]
"""Transition words and phrases by category, separated by semicolons."""


def _compile_pattern(listing: str) -> re.Pattern[str]:
    phrases = (" ".join(phrase.split()) for phrase in listing.split(";"))
    return re.compile(r"\b(?:" + "|".join(re.escape(phrase).replace(r"\ ", r"\s+") for phrase in phrases) + r")\b")


_PATTERNS = {category: _compile_pattern(listing) for category, listing in TRANSITIONS.items()}


def count_transition_categories(text: str) -> int:
    """The number of the twelve categories that occur in ``text`` as whole words, ignoring case."""
    text = text.lower()
    return sum(pattern.search(text) is not None for pattern in _PATTERNS.values())
