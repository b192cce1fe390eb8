"""Functions whose source is copied into variants of a program, to find out whether helper and main both do work.

The variants run only in the sandbox, so each function is self-contained, imports included, and is not protected from
the program around it. Do not edit a function: its source, docstring included, is part of the programs that run. The
comment above each function, which is not copied, explains it. ``replaced`` is the helper's function ``aux``.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from magrpo.rewards.program import Module

_read_source = lru_cache(inspect.getsource)


def module_of(call: str, *functions: Callable[..., Any]) -> Module:
    """Make a module that defines some of the functions below and then runs the statement ``call``."""
    return Module(("from __future__ import annotations",), "\n\n".join([*map(_read_source, functions), call]))


# Main may call ``aux.cache_clear()``: a variant without it would fail, as if it missed the work of the helper.
def keep_attributes(stand_in: Callable[..., Any], replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``stand_in`` with the attributes of ``replaced`` that it lacks and that can be read."""
    from contextlib import suppress

    for name in set(object.__dir__(replaced)) - set(dir(stand_in)):
        with suppress(BaseException):  # of a property that the agents wrote
            setattr(stand_in, name, getattr(replaced, name))
    return stand_in


# The stand-in calls ``replaced`` with copies of the arguments, so that changes of them are lost. If main ``reads`` the
# results, it gets an object instead on which every operation raises what ``except Exception`` does not catch. Calls
# that ``replaced`` makes to itself by its name are passed on.
def unreadable_result(replaced: Callable[..., Any], reads: bool) -> Callable[..., Any]:
    """In place of ``replaced``: a function with results that cannot be used, if main ``reads`` them, and no effects."""
    from contextlib import suppress
    from copy import deepcopy

    class ResultUsed(BaseException):
        pass

    def refuse(*_: Any, **__: Any) -> Any:
        raise ResultUsed

    operations = (
        "bool eq ne lt le gt ge hash len iter next contains getitem setitem delitem call int float complex index round "
        "trunc floor ceil abs neg pos invert add radd iadd sub rsub isub mul rmul imul truediv rtruediv floordiv "
        "rfloordiv mod rmod divmod rdivmod pow rpow and rand or ror xor rxor lshift rlshift rshift rrshift str repr "
        "format bytes reversed enter exit getattr deepcopy copy"
    )
    unreadable = type("Unreadable", (), {f"__{name}__": refuse for name in operations.split()})
    running: list[bool] = []

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if running:  # it calls itself
            return replaced(*args, **kwargs)
        with suppress(Exception):  # if an argument cannot be copied, changes of it have their effect
            args, kwargs = deepcopy((args, kwargs))
        running.append(True)
        try:
            result = replaced(*args, **kwargs)
        finally:
            running.clear()
        return unreadable() if reads else result

    return stand_in


# The stand-in returns its first argument, or None without arguments. If some arguments are functions, it returns what
# the first function returns when it is called with the arguments that are no functions.
def first_argument(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """In place of ``replaced``: a function that returns its first argument.

    A function among its arguments is called with the others: helping to call what main wrote is no work either.
    """

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        functions = [value for value in given if callable(value)]
        others = [value for value in given if not callable(value)]
        return functions[0](*others) if functions else [*others, None][0]

    return stand_in


# The stand-in calls ``replaced`` once and returns a copy of that result in every later call. Calls that ``replaced``
# makes to itself by its name reach the stand-in, and are passed on. Raises TypeError for a function or an iterator as
# result: its work is done only when it is called or iterated over.
def first_result(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """In place of ``replaced``: a function that returns for ever what ``replaced`` returned first.

    Raises TypeError where that can only be called or iterated over: its work is not done yet.
    """
    from copy import deepcopy

    results: list[Any] = []
    running: list[bool] = []

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if running:  # it calls itself
            return replaced(*args, **kwargs)
        if not results:
            running.append(True)
            try:
                result = replaced(*args, **kwargs)
            finally:
                running.clear()
            if callable(result):
                raise TypeError("a function does its work when it is called: it is no constant")
            results.append(deepcopy(result))
        return deepcopy(results[0])

    return stand_in


# The stand-in calls ``replaced`` once, with each argument of a type in ``strangers`` exchanged for a value that no
# test uses, and returns the result in every call; None if that call raises. If no argument can be exchanged,
# ``replaced`` is not called, and the stand-in raises TypeError, as it does if the result is a function.
def empty_result(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """In place of ``replaced``: a function that returns for ever what ``replaced`` returns for what no test passes.

    Returns None if that raises. Raises TypeError if ``replaced`` takes nothing that can be exchanged.
    """
    from contextlib import suppress

    strangers = {int: 19, float: 19.5, str: "\x7f", list: [object()], tuple: (object(),), dict: {object(): object()}}
    results: list[Any] = []

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(None)
            given = [strangers.get(type(value), value) for value in args]
            named = {name: strangers.get(type(value), value) for name, value in kwargs.items()}
            if not any(type(value) in strangers for value in (*args, *kwargs.values())):
                results[0] = replaced
            else:
                with suppress(Exception):
                    results[0] = replaced(*given, **named)
        if callable(results[0]):
            raise TypeError("a function does its work when it is called")
        return results[0]

    return stand_in


# Used where main only returns what ``aux`` returned. ``unpack`` looks for the answer among the parts of that value: it
# compares them with the result of the original main, and keeps the places of those that were right in every call.
def unpacker(main: Callable[..., Any], packs_lists: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``keep`` and ``unpack``: what the helper returned, without what it is packed in.

    ``keep(*args)`` copies the arguments of ``main``. ``unpack(kept, value)`` gives the part of ``value`` that was what
    ``main`` returns in this and every earlier call; ``value`` itself if there is none. Parts are those of tuples, small
    dicts, objects, functions without parameters, iterators and containers of one item, and of lists of any length if
    ``packs_lists``; a list of another length may be data that ``main`` has to choose from.
    """
    from copy import deepcopy
    from itertools import chain, islice

    most, depth = 16, 3
    candidates: list[tuple[Any, ...]] | None = None

    def items(value: Any) -> list[tuple[Any, Any]]:
        if isinstance(value, dict):
            return list(value.items()) if len(value) <= most else []
        if isinstance(value, (tuple, list, set, frozenset)):
            record = isinstance(value, tuple) or (packs_lists and isinstance(value, list)) or len(value) == 1
            return list(enumerate(value)) if record and len(value) <= most else []
        if callable(value):
            code = getattr(value, "__code__", None)
            return [("()", value())] if code is not None and code.co_argcount == 0 else []
        return list(vars(value).items())[:most] if hasattr(value, "__dict__") else []

    def parts(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
        found = {path: value}
        for key, item in items(value) if len(path) < depth else []:
            found |= parts(item, (*path, key))
        return found

    def keep(*args: Any, **kwargs: Any) -> Any:
        return deepcopy((args, kwargs))

    def unpack(kept: Any, value: Any) -> Any:
        nonlocal candidates
        if hasattr(value, "__next__"):
            first = list(islice(value, 2))
            value = first if len(first) == 1 else chain(first, value)
        found = parts(value)
        if len(found) == 1:
            return value
        answer = main(*kept[0], **kept[1])
        candidates = [
            path for path in (found if candidates is None else candidates) if path in found and found[path] == answer
        ]
        return found[candidates[0]] if candidates else value

    return keep, unpack
