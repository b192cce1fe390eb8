"""What a program may do to the objects of the test that are passed to it.

A program that could ask for any attribute would find the test's globals, and in them the expected values and the record
of the cases.
"""

import functools
import io
import types
from typing import Any

from . import values
from .peer import ASYNC, VIEWS, Handle, list_powers

_FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType, functools.partial
)  # fmt: skip
_FUNCTION_NAMES = frozenset({"__name__", "__qualname__", "__doc__", "__module__"})
_STREAMS = (io.StringIO, io.BytesIO, io.TextIOWrapper)
_STREAM_NAMES = frozenset((
    "read", "readline", "readlines", "write", "writelines", "seek", "tell", "close", "closed", "flush", "getvalue",
    "truncate", "name", "encoding",
))  # fmt: skip
_ALWAYS = frozenset({"repr", "str", "format", "eq", "hash", "bool"})


def grant(value: Any) -> list[str]:
    """The powers of an object of the test; NotPlain if a program may not have it at all."""
    if isinstance(value, type):
        if value.__module__ == "test":
            return ["call"]
    elif isinstance(value, _FUNCTIONS) or _is_mock(value):
        return ["call"]
    elif isinstance(value, _STREAMS) or _is_of_test(value):
        return [power for power in list_powers(value) if power not in ASYNC]
    elif hasattr(type(value), "__next__"):
        return ["iter", "next"]
    elif isinstance(value, (range, types.MappingProxyType, *VIEWS, memoryview)):
        return [power for power in list_powers(value) if power in ("iter", "len", "reversed", "getitem")]
    raise values.NotPlain(f"a {type(value).__name__} of the test cannot be passed to a program in another process")


def check_operation(value: Any, operation: str, arguments: list[Any]) -> None:
    """Raise TypeError if a program may not do this to an object of the test."""
    if operation in ("getattr", "setattr", "delattr"):
        if not (arguments and type(arguments[0]) is str and _may_access(value, operation, arguments[0])):
            raise AttributeError("the test does not give this away")
    elif operation == "take":
        if "next" not in grant(value):
            raise TypeError("not an iterator")
    elif operation == "instancecheck":
        if not isinstance(value, type):
            raise TypeError("not a class")
    elif operation in ("data", "copy", "deepcopy"):
        if not _is_of_test(value):
            raise TypeError("the test does not give this away")
    elif operation not in _ALWAYS and operation not in grant(value):
        raise TypeError(f"the object of the test has no {operation}")


def _may_access(value: Any, operation: str, name: str) -> bool:
    if isinstance(value, (*_FUNCTIONS, type)):
        return operation == "getattr" and name in _FUNCTION_NAMES
    if isinstance(value, _STREAMS):
        return operation == "getattr" and name in _STREAM_NAMES
    is_readable = _is_of_test(value) or (_is_mock(value) and operation == "getattr")
    return is_readable and not name.startswith("_")


def _is_mock(value: Any) -> bool:
    return type(value).__module__ == "unittest.mock"


def _is_of_test(value: Any) -> bool:
    """Whether it is an instance of a class that the test defines."""
    return any(base.__module__ == "test" for base in type(value).__mro__) and not isinstance(value, (type, Handle))
