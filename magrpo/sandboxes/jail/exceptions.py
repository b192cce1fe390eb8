"""Exceptions on their way from a program to the test that expects them."""

import builtins
import sys
from typing import Any, TypeGuard

from .recorder import name_builtin_class
from .stand_ins import Inexpressible
from .values import Decoder, Encoder
from .wire import TooLarge, WireError

MAX_TEXT = 1000
MAX_NAME = 100


def encode_exception(error: BaseException) -> tuple[str, list[Any]]:
    """Return status and ``[builtin class, own class, text, details]`` of an exception, with empty details."""
    if isinstance(error, TooLarge):
        return "output_limit", ["Exception", "", str(error), None]
    status = "memory" if isinstance(error, MemoryError) else "exception"
    try:
        text = str(error)[:MAX_TEXT]
    except BaseException:  # noqa: BLE001 - its __str__ may raise
        text = ""
    return status, [name_builtin_class(error), type(error).__name__, text, None]


def encode_details(error: BaseException, encoder: Encoder) -> list[Any]:
    """``[class of the standard library, arguments, whether there is more]``; no arguments if they are not plain."""
    kinds = (base for base in type(error).__mro__ if base.__module__.partition(".")[0] in sys.stdlib_module_names)
    kind = next(kinds)
    given = error.args
    if isinstance(error, OSError) and error.filename is not None:  # a third argument, which it does not keep
        given = (*given[:2], error.filename)
    arguments = encoder.encode_if_plain(given)
    has_more = arguments is None or bool(vars(error)) or error.__cause__ is not None
    return [[kind.__module__, kind.__qualname__], arguments, has_more]


def build_error(value: Any, decoder: Decoder) -> BaseException:
    """Build an exception of the nearest class that the test knows, with the original's name, text and arguments.

    Raises:
        WireError: the value does not describe an exception. Inexpressible: it is a group, which holds other exceptions.
    """
    known, name, text, details = value
    path, arguments, has_more = details or (None, None, False)
    kind = _find_exception_class(known, path)
    if issubclass(kind, BaseExceptionGroup):
        raise Inexpressible("the program raises a group of exceptions")
    given = (text,) if arguments is None else decoder.decode(arguments)
    if type(given) is not tuple:
        raise WireError("malformed exception")
    own = name if name.isascii() and name.isidentifier() and len(name) <= MAX_NAME else known
    error = _make_error(kind, given)
    if kind.__module__ == "builtins" and own == kind.__name__ and str(error) == text and not has_more:
        return error
    return _make_error(type(own, (kind,), {"__str__": lambda _: text} | _MISSING), given)


def _refuse(*_: Any) -> Any:
    raise Inexpressible("the test reads an attribute of the program's exception")


_MISSING = {"__getattr__": _refuse, "__cause__": property(_refuse), "__context__": property(_refuse)}
"""Attributes that stay in the program's process."""


def _make_error(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    try:
        return kind(*arguments)
    except (TypeError, ValueError, AttributeError):  # its constructor takes other arguments than it stores
        error = kind.__new__(kind)
        error.args = arguments
        return error


def _find_exception_class(known: str, path: Any) -> type[BaseException]:
    """Find the class in the standard library if it is loaded here, else the builtin one. WireError if neither."""
    if path is not None:
        module, name = path
        found = vars(sys.modules.get(module, builtins)).get(name)
        if module.partition(".")[0] in sys.stdlib_module_names and _is_exception_class(found):
            return found
    kind = vars(builtins).get(known)
    if not _is_exception_class(kind):
        raise WireError("not an exception")
    return kind


def _is_exception_class(kind: Any) -> TypeGuard[type[BaseException]]:
    return isinstance(kind, type) and issubclass(kind, BaseException)
