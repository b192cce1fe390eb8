"""Lone surrogates, code blocks, control characters and counts in texts.

Lone surrogates are halves of characters that Python and JSON allow in a text, but UTF-8 does not. They are replaced
where a text enters a run: from a data file, a plug-in (:mod:`magrpo.checks`), a user or a service. All other code can
then write texts as UTF-8.
"""

import re
from typing import Any, TypeVar

REPLACEMENT = "\ufffd"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_SINGULAR = re.compile(r"s\b")
ValueT = TypeVar("ValueT")


def replace_surrogates(value: ValueT) -> ValueT:
    """Replace every lone surrogate by U+FFFD, in a text or in plain JSON of lists and dicts."""
    found: Any = value
    if isinstance(value, str):
        found = _LONE_SURROGATE.sub(REPLACEMENT, value)
    elif isinstance(value, list):
        found = [replace_surrogates(item) for item in value]
    elif isinstance(value, dict):
        found = {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    return found  # type: ignore[no-any-return]


def fence_text(text: str, language: str = "") -> str:
    """Format the text as a code block of Markdown, with a fence longer than any run of backticks inside."""
    longest_run = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest_run + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def make_printable(text: str) -> str:
    """Escape the text's control characters, because a model's text must not command a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def format_count(number: int, things: str) -> str:
    """``1,234 programs run``, ``1 program run``: the first word of ``things`` that ends in -s loses it for 1."""
    if number == 1:
        things = _SINGULAR.sub("", things, count=1)
    return f"{number:,} {things}"
