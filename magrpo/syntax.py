"""Parsing Python in a process with threads."""

import ast
import threading

_ONE_AT_A_TIME = threading.RLock()


def parse_python(source: str, name: str = "<program>") -> ast.Module:
    """``ast.parse``, in one thread at a time: threads that parse at once raise SystemError (python/cpython#106905)."""
    with _ONE_AT_A_TIME:
        return ast.parse(source, name)
