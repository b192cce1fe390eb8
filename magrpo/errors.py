"""The errors that users see, and the words of their messages: quotations, names, choices."""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

MAX_QUOTED = 200
"""Longest quotation of a value in a message, in characters."""
_MAX_LINE = 1600
"""Longest line of a message."""
_NAME = re.compile(r"[A-Za-z0-9]+")


class ConfigError(ValueError):
    """A configuration, a flag or an input file is unusable. The message names it and the remedy."""

    def __str__(self) -> str:
        """The message, with long lines shortened by :func:`cut_lines`."""
        return cut_lines(super().__str__())


class PluginFailed(RuntimeError):
    """A method of a plug-in raised an exception. The message names class and method, and shows the last frames."""


def cut_lines(message: str) -> str:
    """Cut the middle out of very long lines of ``message``, which may quote a file."""
    half = _MAX_LINE // 2
    return "\n".join(
        line if len(line) <= _MAX_LINE else f"{line[:half]} ... ({len(line) - 2 * half} characters) ... {line[-half:]}"
        for line in message.splitlines()
    )


def quote_value(value: object) -> str:
    """Quote ``value`` for a message: its ``repr``, or the beginning and the length of a long one."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}... ({len(text)} characters)"


def quote_error(error: BaseException) -> str:
    """Quote the error of a library on one line, shortened, after its type unless the message makes sense alone."""
    text = " ".join(str(error).split())
    if not isinstance(error, OSError | ConfigError) or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def check_name(
    name: str, what: str = "name", reserved: Collection[str] = (), longest: int = 100, signs: str = "-_"
) -> str:
    """Return ``name`` if it can be part of files, metrics and URLs and is not ``reserved``; else raise ConfigError.

    ``what`` is the flag or the kind of name, for the message. ``signs`` may follow the first letter or digit.
    """
    letters = name[:1] + re.sub(f"[{re.escape(signs)}]", "0", name[1:])
    if not _NAME.fullmatch(letters) or len(name) > longest:
        shown = ", ".join(map(repr, signs))
        allowed = f"letters, digits, {shown}, at most {longest} of them, the first a letter or digit"
        raise ConfigError(f"{what} {quote_value(name)} cannot be used: a name consists of {allowed}")
    if name.lower() in reserved:
        raise ConfigError(f"{what} {name!r} is reserved: choose another one")
    return name


def list_choices(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """The end of an error message about an unknown name: the closest match, then every choice."""
    closest = difflib.get_close_matches(name[:MAX_QUOTED], list(known), n=1)
    hint = f"did you mean {closest[0]!r}? " if closest else ""
    return f"{hint}choices: {', '.join(sorted(known))}"


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the name of its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
