"""Stand-ins, in the test, for the program's entry point and for its values that are not plain data.

The objects themselves stay in the program's process. A test that does more with them than call the entry point and
compare results with data raises :class:`Inexpressible`, and must run in the program's process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .recorder import Abort
from .values import is_of_data_class

_OPERATIONS = (
    "bool eq ne lt le gt ge hash len iter next contains getitem setitem delitem call int float complex index round "
    "trunc floor ceil abs neg pos invert add radd iadd sub rsub isub mul rmul imul truediv rtruediv floordiv "
    "rfloordiv mod rmod divmod rdivmod pow rpow and rand or ror xor rxor lshift rlshift rshift rrshift str repr "
    "format bytes reversed enter exit getattr deepcopy copy matmul rmatmul await aiter anext aenter aexit setattr "
    "delattr dir fspath get instancecheck subclasscheck mro_entries reduce_ex"
)
"""Operations on a value, by the names of their special methods without underscores."""


class Inexpressible(Abort):
    """The test cannot run apart from the program, because an object would have to cross that is not plain data."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise Inexpressible("the test uses an object of the program")


def _make_refusing_base(allowed: str) -> Any:
    """Make a class whose instances refuse all but the ``allowed`` operations, and hide their class."""
    methods = {f"__{operation}__": _refuse for operation in set(_OPERATIONS.split()) - set(allowed.split())}
    return type("Refusing", (), methods | {"__class__": property(_refuse), "__doc__": property(_refuse)})


class Opaque(_make_refusing_base("bool eq ne repr")):  # type: ignore[misc]
    # A value of the program that is not plain data. ``kind``: its nearest builtin class; ``compares``: whether it may
    # equal data, as an instance of a subclass of a data type; another object equals none, but may equal an object of
    # the test. ``is_true``: whether it is true because its class says nothing else.
    # No docstring, because the test would take it for that of the program's object.
    _is_being_described = False

    def __init__(self, kind: str, compares: bool, is_true: bool) -> None:
        self.__dict__.update(_kind=kind, _compares=compares, _is_true=is_true)

    def __bool__(self) -> bool:
        if not self._is_true:
            _refuse()
        return True

    def __eq__(self, other: object) -> Any:
        if self._compares or not (type(other) is EntryPoint or is_of_data_class(other)):
            _refuse()
        return NotImplemented

    __hash__ = _refuse

    def __repr__(self) -> str:
        if not Opaque._is_being_described:
            _refuse()
        return f"<{self._kind} object>"


@contextmanager
def describe_opaque_values() -> Iterator[None]:
    """Let opaque values be turned into text for the message of a case."""
    Opaque._is_being_described = True
    try:
        yield
    finally:
        Opaque._is_being_described = False


class EntryPoint(_make_refusing_base("eq ne hash repr bool call")):  # type: ignore[misc]
    # The program's entry point. Calls ``function(args, kwargs)``.

    def __init__(self, name: str, function: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self.__dict__.update(__name__=name, __qualname__=name, _function=function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(args, kwargs)

    def __bool__(self) -> bool:
        return True
