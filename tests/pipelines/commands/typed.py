"""Standard input of the commands."""

from __future__ import annotations

import io

import pytest


class Typed(io.StringIO):
    """Text that a user types at a terminal, or that comes from a file or another program."""

    def __init__(self, text: str, *, at_terminal: bool) -> None:
        super().__init__(text)
        self.at_terminal = at_terminal

    def isatty(self) -> bool:
        return self.at_terminal


def type_text(monkeypatch: pytest.MonkeyPatch, text: str, *, at_terminal: bool = False) -> None:
    """Let the next command read ``text`` from standard input."""
    monkeypatch.setattr("sys.stdin", Typed(text, at_terminal=at_terminal))
