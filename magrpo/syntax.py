"""Parsing Python in a process with threads."""

import ast
import threading

_ONE_AT_A_TIME = threading.RLock()


def parse_python(source: str, name: str = "<program>") -> ast.Module:
    """``ast.parse``, in one thread at a time: threads that parse at once raise SystemError (python/cpython#106905).

    Raises:
        SyntaxError: the source is not Python; so is one that holds a lone surrogate.
    """
    with _ONE_AT_A_TIME:
        try:
            return ast.parse(source, name)
        except UnicodeEncodeError as error:
            raise SyntaxError(str(error)) from None
